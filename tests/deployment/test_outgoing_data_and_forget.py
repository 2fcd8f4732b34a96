"""Only listed fields leave a silo, and its rows are erased when the party asks to be forgotten."""

from __future__ import annotations

import math
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from descant import DescantWarning
from descant.config import read_recipe
from descant.core.messages import Reply, Task
from descant.deployment.flower.flower_connection import ConnectionRejected, PeerUnavailable
from descant.deployment.silo import SiloFile
from descant.deployment.silo.dry_run import dry_run
from descant.deployment.silo.forget import FORGOTTEN, clear_folder, request_erasure
from descant.deployment.silo.outgoing_fields import FORGET_REQUEST
from descant.engines.remote import UndeliveredError
from descant.serialization.wire import pack, unpack
from descant.storage.vault.private_keys import PrivateKey, key_fingerprint
from descant.storage.vault.vault_folder import Vault
from silo_file_templates import MODEL_AND_METHOD_TABLES
from test_deployment_faults import federation_with_vault, silos_with_row_policy
from test_deployment_in_memory import InMemoryTransport, deployed_federation, packed_train_task, silo_with_policy
from toy_problems import classification_parties


class FakeConnection:
    """A silo's connection to a server that sends these tasks and confirms an erasure with `goodbye`."""

    def __init__(self, tasks: list[Task], goodbye: dict[str, Any] | None = None) -> None:
        self.tasks = tasks
        self.goodbye = goodbye
        self.replies = list[bytes]()

    def session(self) -> Any:
        return nullcontext()

    def pull(self) -> tuple[str, bytes] | None:
        return ("", pack(self.tasks.pop(0))) if self.tasks else None

    def push(self, request: str, payload: bytes) -> None:
        self.replies.append(payload)
        if FORGET_REQUEST in unpack(payload, Reply).metrics and self.goodbye is not None:
            self.tasks.append(Task("0", 0, "goodbye", arrays={}, settings=self.goodbye))


HANDSHAKE = Task("0", 0, "handshake", arrays={}, settings={"federation": "lab"})


OCCASIONS = {"handshake": "on joining", "train": "after training", "evaluate": "after evaluation"}
SECURE = "with secure aggregation"
RECIPES = {
    "plain": MODEL_AND_METHOD_TABLES.format(method="ditto"),
    "unseen": MODEL_AND_METHOD_TABLES.format(method="fedavg") + 'wrap = [{wrapper = "secure"}]',
    "measured": MODEL_AND_METHOD_TABLES.format(method="fedavg") + 'wrap = [{wrapper = "adaptive", reward = "clients"}]',
    "private": MODEL_AND_METHOD_TABLES.format(method="fedavg")
    + 'wrap = [{wrapper = "local_dp", clip = 1.0, noise = 1.0}]',
}


@dataclass
class SentFields:
    """All fields that a party sends, by the occasion that must list them."""

    fields: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    arrays: dict[str, list[int]] = field(default_factory=dict)
    description: dict[str, Any] = field(default_factory=dict)

    def take(self, kind: str, payload: bytes, secure: bool = False) -> None:
        reply = unpack(payload, Reply)
        occasion = SECURE if kind == "keys" else OCCASIONS[kind]
        self.fields[occasion] |= set(reply.metrics) | ({"encrypted_coreset"} if reply.encrypted_coreset else set())
        self.fields["in every reply"] |= {"party", "round", "kind", "status", *(["reason"] if reply.reason else [])}
        if kind == "keys":
            self.fields[occasion] |= set(reply.arrays)
        elif reply.arrays:
            self.fields[SECURE if secure else occasion].add("arrays")
            self.arrays |= {name: list(tensor.shape) for name, tensor in reply.arrays.items()}
        if kind == "handshake":
            self.description |= reply.metrics


def collect_sent_fields(folder: Path) -> SentFields:
    """Collect what party 0 sends in several trainings, without its state, at its daily limit, and when forgotten."""
    found = SentFields()
    for name, text in RECIPES.items():
        transport = InMemoryTransport(silos_with_row_policy(folder / name))

        def corrupt(task: Task, payload: bytes, secure: bool = name == "unseen") -> bytes:
            if task.party == "0":
                found.take(task.kind, payload, secure)
            return payload

        transport.corrupt_reply = corrupt
        fed = deployed_federation(transport, read_recipe("[run]\nseed = 5\n" + text))
        fed.fit(1, progress=False).scores()
    handler = silo_with_policy(folder / "rows", '{"share": 1, "rounds_a_day": 1}')
    vault = Vault.create(folder / "vault", PrivateKey.new(), "r")
    for packed_task in (packed_train_task(2, vault=vault, accepted=1), packed_train_task(3, accepted=1)):
        found.take("train", handler.answer(packed_task))
    connection = FakeConnection([HANDSHAKE])
    with pytest.raises(PeerUnavailable):
        request_erasure(connection, "a mark", "lab", 0.2)
    found.take("handshake", connection.replies[0])
    return found


def test_listed_fields_and_sent_fields_are_equal(tmp_path: Path) -> None:
    found = collect_sent_fields(tmp_path)
    checks = dry_run(SiloFile(tmp_path / "plain" / "team0.py", "0"))
    leaves = {
        occasion: {one for names in fields for one in names.split(", ")}
        for occasion, fields in checks["outgoing"].items()
    }
    del leaves["on the connection"]
    assert found.fields == leaves
    assert found.arrays == checks["tensors"]
    joins = checks["outgoing"]["on joining"]
    assert all(str(found.description[name]) in joins[name] for name in ("layout", "version", "loss"))
    assert found.description["data_description"] == checks["data"]


class ForgetHandler:
    """A handler that replies as `descant silo forget` does."""

    def __init__(self, machine: str) -> None:
        self.machine = machine

    def answer(self, packed_task: bytes) -> bytes:
        connection = FakeConnection([unpack(packed_task, Task)])
        with pytest.raises(PeerUnavailable):
            request_erasure(connection, self.machine, "lab", 0.01)
        return connection.replies[0]


def ask_to_forget(transport: InMemoryTransport, folder: Path, machine: str = "") -> None:
    """Let party 1 connect and ask to be forgotten."""
    machine = machine or (folder / "at-1" / "machine").read_text()
    transport.handlers["1"] = lambda: ForgetHandler(machine)  # type: ignore[assignment, return-value]
    transport.session_ids["1"] = f"{transport.session_ids.get('1')} again"
    transport.unreachable = set()


def goodbyes(transport: InMemoryTransport) -> list[dict[str, Any]]:
    tasks = [unpack(packed_task, Task) for party, packed_task in transport.messages.values() if party == "1"]
    return [dict(task.settings) for task in tasks if task.kind == "goodbye"]


def test_a_forgotten_party_loses_its_coreset_and_its_proxy(tmp_path: Path) -> None:
    transport = InMemoryTransport(silos_with_row_policy(tmp_path))
    log_lines = list[str]()
    handler = transport.handlers["1"]
    _, fed = federation_with_vault(tmp_path, transport, log_lines.append)
    fed.fit(1, progress=False)
    transport.unreachable = {"1"}
    assert fed.fit(1, progress=False).history_[-1]["presence"] == "pspp"
    ask_to_forget(transport, tmp_path)
    with pytest.warns(DescantWarning, match=r"party '1': .*forgotten at its own request: it gets no coreset proxy"):
        fed.fit(2, progress=False)
    assert [entry["presence"] for entry in fed.history_[-2:]] == ["papp", "papp"]
    vault = Vault(tmp_path / "vault")
    held = {one.party: one.state for one in vault.parties()}
    assert held["1"] == "forgotten" and {held[name] for name in "023"} == {"sealed"}
    assert len(list((tmp_path / "vault" / "parties").iterdir())) == 3 and vault.verify().coresets == 3
    assert "the party 1" in (tmp_path / "vault" / "audit.jsonl").read_text()
    [goodbye] = goodbyes(transport)
    assert goodbye[FORGOTTEN] and "destroyed its encrypted rows" in goodbye["reason"]
    assert any("1 asks to be forgotten: the vault has destroyed its encrypted rows" in text for text in log_lines)
    ask_to_forget(transport, tmp_path)  # a second request: nothing is left to erase, and the reason says so
    fed.fit(1, progress=False)
    assert "the server holds no row of it" in goodbyes(transport)[-1]["reason"]
    transport.handlers["1"], transport.session_ids["1"] = handler, "back"
    assert fed.fit(1, progress=False).history_[-1]["presence"] == "pppp"


@pytest.mark.parametrize("lost_reply", [None, UndeliveredError("its machine is off")], ids=["swallowed", "lost"])
def test_a_round_does_not_wait_for_a_party_forgotten_during_it(
    tmp_path: Path, lost_reply: UndeliveredError | None
) -> None:
    transport = InMemoryTransport(silos_with_row_policy(tmp_path))
    _, fed = federation_with_vault(tmp_path, transport)
    fed.fit(1, progress=False)

    def corrupt(task: Task, payload: bytes) -> bytes | UndeliveredError | None:
        if task.party != "1" or task.kind != "train":
            return payload
        ask_to_forget(transport, tmp_path)
        return lost_reply

    transport.corrupt_reply = corrupt
    with pytest.warns(DescantWarning, match="party '1': lost: it was forgotten at its own request"):
        fed.fit(1, progress=False)
    assert {one.party: one.state for one in Vault(tmp_path / "vault").parties()}["1"] == "forgotten"


def test_another_machine_cannot_have_a_party_forgotten(tmp_path: Path) -> None:
    transport = InMemoryTransport(silos_with_row_policy(tmp_path))
    log_lines = list[str]()
    _, fed = federation_with_vault(tmp_path, transport, log_lines.append)
    fed.fit(1, progress=False)
    ask_to_forget(transport, tmp_path, "another mark")
    assert fed.fit(1, progress=False).history_[-1]["presence"] == "pspp"
    [goodbye] = goodbyes(transport)
    assert "another machine" in goodbye["reason"] and FORGOTTEN not in goodbye
    assert any("used in two places" in text for text in log_lines)


def test_a_failed_erasure_is_reported_without_file_names(tmp_path: Path) -> None:
    transport = InMemoryTransport(silos_with_row_policy(tmp_path))
    log_lines = list[str]()
    _, fed = federation_with_vault(tmp_path, transport, log_lines.append)
    (tmp_path / "vault" / "vault.json").rename(tmp_path / "vault" / "elsewhere")
    ask_to_forget(transport, tmp_path)
    fed.engine_._transport.connected_parties()  # type: ignore[attr-defined]
    [goodbye] = goodbyes(transport)
    assert (
        "internal error of the server" in goodbye["reason"]
        and FORGOTTEN not in goodbye
        and "vault.json" not in str(goodbye)
    )
    assert any("vault.json" in text for text in log_lines)


def test_a_party_knows_whether_it_was_forgotten() -> None:
    earlier = Task("0", 0, "goodbye", arrays={}, settings={"reason": "of an earlier session"})
    work = Task("0", 4, "train", arrays={}, settings={})
    done = FakeConnection([earlier, work, HANDSHAKE], {"reason": "all gone", FORGOTTEN: True})
    assert request_erasure(done, "mark", "lab", 5) == "all gone"
    assert [unpack(payload, Reply).status for payload in done.replies] == ["declined", "ok"]
    with pytest.raises(ConnectionRejected, match="to the federation 'bank', the server to 'lab'"):
        request_erasure(FakeConnection([HANDSHAKE], {"reason": "all gone", FORGOTTEN: True}), "mark", "bank", 5)
    with pytest.raises(ConnectionRejected, match="trouble"):
        request_erasure(FakeConnection([HANDSHAKE], {"reason": "trouble"}), "mark", "lab", 5)
    with pytest.raises(ConnectionRejected, match="over"):
        request_erasure(FakeConnection([Task("0", 0, "goodbye", arrays={}, settings={"rounds": 7})]), "mark", "lab", 5)
    with pytest.raises(PeerUnavailable, match="has not confirmed the erasure"):
        request_erasure(FakeConnection([HANDSHAKE]), "mark", "lab", 0.3)
    with pytest.raises(PeerUnavailable, match="has sent no handshake"):
        request_erasure(FakeConnection([]), "mark", "lab", 0.3)


def test_the_policy_holds_however_often_a_party_is_forgotten(tmp_path: Path) -> None:
    vault = Vault.create(tmp_path / "vault", PrivateKey.new(), "r")
    sealed = 0
    for again in range(4):
        handler = silo_with_policy(tmp_path, '{"share": 0.3, "rounds_a_day": 12}', "state")
        for seed in range(4):
            reply = unpack(handler.answer(packed_train_task(seed=10 * again + seed, vault=vault)), Reply)
            assert reply.status == ("ok" if again < 3 else "declined"), reply.reason
            sealed += bool(reply.encrypted_coreset)
        _, kept_names = clear_folder(tmp_path)
        assert kept_names == ["state/daily_tasks.json", "state/machine", "state/shared_rows.safetensors"]
    rows = handler.state.shared_rows()
    assert sealed and rows is not None and len(rows) <= math.ceil(0.3 * classification_parties(5)["0"].samples)


def test_a_party_encrypts_only_for_the_vault_of_its_invite(tmp_path: Path) -> None:
    ours, theirs = (Vault.create(tmp_path / name, PrivateKey.new(), "r") for name in ("ours", "theirs"))
    known = key_fingerprint(ours.public)
    log_lines = list[str]()
    handler = silo_with_policy(tmp_path, '{"share": 1}', log=log_lines.append, vault=known)
    reply = unpack(handler.answer(packed_train_task(1, vault=theirs)), Reply)
    assert reply.status == "ok" and not reply.encrypted_coreset and "sent no coreset" in reply.reason
    assert any(known in text and key_fingerprint(theirs.public) in text for text in log_lines)
    assert handler.state.shared_rows() is None
    assert unpack(handler.answer(packed_train_task(2, vault=ours)), Reply).encrypted_coreset
