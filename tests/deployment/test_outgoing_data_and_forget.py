"""What leaves a silo is what it was told, and goes when the party wishes to be forgotten."""

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
from test_server_silo_protocol import InMemoryTransport, deployed_federation, packed_train_task, silo_with_policy
from toy_problems import classification_parties


class Server:
    """A party's line to a server that has these letters for it, and answers a wish as it is told."""

    def __init__(self, letters: list[Task], goodbye: dict[str, Any] | None = None) -> None:
        self.letters = letters
        self.goodbye = goodbye
        self.answers = list[bytes]()

    def session(self) -> Any:
        return nullcontext()

    def pull(self) -> tuple[str, bytes] | None:
        return ("", pack(self.letters.pop(0))) if self.letters else None

    def push(self, request: str, payload: bytes) -> None:
        self.answers.append(payload)
        if FORGET_REQUEST in unpack(payload, Reply).metrics and self.goodbye is not None:
            self.letters.append(Task("0", 0, "goodbye", arrays={}, settings=self.goodbye))


HELLO = Task("0", 0, "handshake", arrays={}, settings={"federation": "lab"})

# ── what leaves is named ──────────────────────────────────────────────────────────────────────────────────────────────

WHEN = {"handshake": "when it joins", "train": "after training", "evaluate": "when models are judged"}
UNSEEN = "where work is added up unseen"
RECIPES = {
    "plain": MODEL_AND_METHOD_TABLES.format(method="ditto"),
    "unseen": MODEL_AND_METHOD_TABLES.format(method="fedavg") + 'wrap = [{wrapper = "secure"}]',
    "measured": MODEL_AND_METHOD_TABLES.format(method="fedavg") + 'wrap = [{wrapper = "adaptive", reward = "clients"}]',
    "private": MODEL_AND_METHOD_TABLES.format(method="fedavg")
    + 'wrap = [{wrapper = "local_dp", clip = 1.0, noise = 1.0}]',
}


@dataclass
class Heard:
    """All that a party answers, by the part of the list that must name it."""

    fields: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    arrays: dict[str, list[int]] = field(default_factory=dict)
    hello: dict[str, Any] = field(default_factory=dict)

    def take(self, kind: str, answer: bytes, unseen: bool = False) -> None:
        report = unpack(answer, Reply)
        when = UNSEEN if kind == "keys" else WHEN[kind]
        self.fields[when] |= set(report.metrics) | ({"sealed"} if report.encrypted_coreset else set())
        self.fields["in every answer"] |= {"party", "round", "kind", "status", *(["reason"] if report.reason else [])}
        if kind == "keys":
            self.fields[when] |= set(report.arrays)
        elif report.arrays:
            self.fields[UNSEEN if unseen else when].add("arrays")
            self.arrays |= {name: list(tensor.shape) for name, tensor in report.arrays.items()}
        if kind == "handshake":
            self.hello |= report.metrics


def heard(folder: Path) -> Heard:
    """What party 0 says in trainings of several kinds, when it has lost its memory, rests and is forgotten."""
    found = Heard()
    for name, text in RECIPES.items():
        post = InMemoryTransport(silos_with_row_policy(folder / name))

        def spoil(task: Task, answer: bytes, unseen: bool = name == "unseen") -> bytes:
            if task.party == "0":
                found.take(task.kind, answer, unseen)
            return answer

        post.corrupt_reply = spoil
        fed = deployed_federation(post, read_recipe("[run]\nseed = 5\n" + text))
        fed.fit(1, progress=False).scores()
    desk = silo_with_policy(folder / "rows", '{"share": 1, "rounds_a_day": 1}')
    vault = Vault.create(folder / "vault", PrivateKey.new(), "r")
    for letter in (packed_train_task(2, vault=vault, accepted=1), packed_train_task(3, accepted=1)):
        found.take("train", desk.answer(letter))
    line = Server([HELLO])
    with pytest.raises(PeerUnavailable):
        request_erasure(line, "a mark", "lab", 0.2)
    found.take("handshake", line.answers[0])
    return found


def test_listed_fields_and_sent_fields_are_equal(tmp_path: Path) -> None:
    found = heard(tmp_path)
    told = dry_run(SiloFile(tmp_path / "plain" / "team0.py", "0"))
    leaves = {when: {one for names in fields for one in names.split(", ")} for when, fields in told["outgoing"].items()}
    del leaves["on the line"]
    assert found.fields == leaves
    assert found.arrays == told["tensors"]
    joins = told["outgoing"]["when it joins"]
    assert all(str(found.hello[name]) in joins[name] for name in ("layout", "version", "loss"))
    assert found.hello["data_description"] == told["data"]


# ── whoever wishes it is forgotten ────────────────────────────────────────────────────────────────────────────────────


class Wishing:
    """In place of a desk, as `descant silo forget` answers."""

    def __init__(self, machine: str) -> None:
        self.machine = machine

    def answer(self, letter: bytes) -> bytes:
        line = Server([unpack(letter, Task)])
        with pytest.raises(PeerUnavailable):
            request_erasure(line, self.machine, "lab", 0.01)
        return line.answers[0]


def wish(post: InMemoryTransport, folder: Path, machine: str = "") -> None:
    """Party 1 comes, and wishes to be forgotten."""
    machine = machine or (folder / "at-1" / "machine").read_text()
    post.handlers["1"] = lambda: Wishing(machine)  # type: ignore[assignment, return-value]
    post.session_ids["1"] = f"{post.session_ids.get('1')} again"
    post.unreachable = set()


def goodbyes(post: InMemoryTransport) -> list[dict[str, Any]]:
    tasks = [unpack(letter, Task) for party, letter in post.messages.values() if party == "1"]
    return [dict(task.settings) for task in tasks if task.kind == "goodbye"]


def test_a_forgotten_party_loses_its_coreset_and_its_proxy(tmp_path: Path) -> None:
    post = InMemoryTransport(silos_with_row_policy(tmp_path))
    said = list[str]()
    desk = post.handlers["1"]
    _, fed = federation_with_vault(tmp_path, post, said.append)
    fed.fit(1, progress=False)
    post.unreachable = {"1"}
    assert fed.fit(1, progress=False).history_[-1]["presence"] == "pspp"
    wish(post, tmp_path)
    with pytest.warns(DescantWarning, match=r"party '1': .*forgotten, as it wished: nobody stands in"):
        fed.fit(2, progress=False)
    assert [entry["presence"] for entry in fed.history_[-2:]] == ["papp", "papp"]
    vault = Vault(tmp_path / "vault")
    held = {one.party: one.state for one in vault.parties()}
    assert held["1"] == "forgotten" and {held[name] for name in "023"} == {"sealed"}
    assert len(list((tmp_path / "vault" / "parties").iterdir())) == 3 and vault.verify().coresets == 3
    assert "the party 1" in (tmp_path / "vault" / "audit.jsonl").read_text()
    [told] = goodbyes(post)
    assert told[FORGOTTEN] and "destroyed its sealed rows" in told["reason"]
    assert any("1 wishes to be forgotten: the vault has destroyed its sealed rows" in text for text in said)
    wish(post, tmp_path)  # once more: there is nothing to destroy, and it is told so
    fed.fit(1, progress=False)
    assert "no row of it is held" in goodbyes(post)[-1]["reason"]
    post.handlers["1"], post.session_ids["1"] = desk, "back"
    assert fed.fit(1, progress=False).history_[-1]["presence"] == "pppp"


@pytest.mark.parametrize("lost", [None, UndeliveredError("its machine is off")], ids=["swallowed", "lost"])
def test_a_round_does_not_wait_for_a_party_forgotten_during_it(tmp_path: Path, lost: UndeliveredError | None) -> None:
    post = InMemoryTransport(silos_with_row_policy(tmp_path))
    _, fed = federation_with_vault(tmp_path, post)
    fed.fit(1, progress=False)

    def spoil(task: Task, answer: bytes) -> bytes | UndeliveredError | None:
        if task.party != "1" or task.kind != "train":
            return answer
        wish(post, tmp_path)
        return lost

    post.corrupt_reply = spoil
    with pytest.warns(DescantWarning, match="party '1': lost: it was forgotten, as it wished"):
        fed.fit(1, progress=False)
    assert {one.party: one.state for one in Vault(tmp_path / "vault").parties()}["1"] == "forgotten"


def test_another_machine_cannot_have_a_party_forgotten(tmp_path: Path) -> None:
    post = InMemoryTransport(silos_with_row_policy(tmp_path))
    said = list[str]()
    _, fed = federation_with_vault(tmp_path, post, said.append)
    fed.fit(1, progress=False)
    wish(post, tmp_path, "another mark")
    assert fed.fit(1, progress=False).history_[-1]["presence"] == "pspp"
    [told] = goodbyes(post)
    assert "another machine" in told["reason"] and FORGOTTEN not in told
    assert any("used in two places" in text for text in said)


def test_a_failed_erasure_is_reported_without_file_names(tmp_path: Path) -> None:
    post = InMemoryTransport(silos_with_row_policy(tmp_path))
    said = list[str]()
    _, fed = federation_with_vault(tmp_path, post, said.append)
    (tmp_path / "vault" / "vault.json").rename(tmp_path / "vault" / "elsewhere")
    wish(post, tmp_path)
    fed.engine_._transport.connected_parties()  # type: ignore[attr-defined]
    [told] = goodbyes(post)
    assert "trouble of its own" in told["reason"] and FORGOTTEN not in told and "vault.json" not in str(told)
    assert any("vault.json" in text for text in said)


def test_a_party_knows_whether_it_was_forgotten() -> None:
    before = Task("0", 0, "goodbye", arrays={}, settings={"reason": "of before"})
    work = Task("0", 4, "train", arrays={}, settings={})
    done = Server([before, work, HELLO], {"reason": "all gone", FORGOTTEN: True})
    assert request_erasure(done, "mark", "lab", 5) == "all gone"
    assert [unpack(answer, Reply).status for answer in done.answers] == ["declined", "ok"]
    with pytest.raises(ConnectionRejected, match="of the federation 'bank', and the server of 'lab'"):
        request_erasure(Server([HELLO], {"reason": "all gone", FORGOTTEN: True}), "mark", "bank", 5)
    with pytest.raises(ConnectionRejected, match="trouble"):
        request_erasure(Server([HELLO], {"reason": "trouble"}), "mark", "lab", 5)
    with pytest.raises(ConnectionRejected, match="over"):
        request_erasure(Server([Task("0", 0, "goodbye", arrays={}, settings={"rounds": 7})]), "mark", "lab", 5)
    with pytest.raises(PeerUnavailable, match="has not said that it was done"):
        request_erasure(Server([HELLO]), "mark", "lab", 0.3)
    with pytest.raises(PeerUnavailable, match="has not asked who we are"):
        request_erasure(Server([]), "mark", "lab", 0.3)


def test_the_policy_holds_however_often_a_party_is_forgotten(tmp_path: Path) -> None:
    vault = Vault.create(tmp_path / "vault", PrivateKey.new(), "r")
    sealed = 0
    for again in range(4):
        desk = silo_with_policy(tmp_path, '{"share": 0.3, "rounds_a_day": 12}', "state")
        for seed in range(4):
            report = unpack(desk.answer(packed_train_task(seed=10 * again + seed, vault=vault)), Reply)
            assert report.status == ("ok" if again < 3 else "declined"), report.reason
            sealed += bool(report.encrypted_coreset)
        _, kept = clear_folder(tmp_path)
        assert kept == ["state/daily_tasks.json", "state/shared_rows.safetensors", "state/machine"]
    rows = desk.state.shared_rows()
    assert sealed and rows is not None and len(rows) <= math.ceil(0.3 * classification_parties(5)["0"].samples)


# ── for whom rows are sealed ──────────────────────────────────────────────────────────────────────────────────────────


def test_a_party_encrypts_only_for_the_vault_of_its_invite(tmp_path: Path) -> None:
    ours, theirs = (Vault.create(tmp_path / name, PrivateKey.new(), "r") for name in ("ours", "theirs"))
    known = key_fingerprint(ours.public)
    said = list[str]()
    desk = silo_with_policy(tmp_path, '{"share": 1}', log=said.append, vault=known)
    report = unpack(desk.answer(packed_train_task(1, vault=theirs)), Reply)
    assert report.status == "ok" and not report.encrypted_coreset and "left no coreset" in report.reason
    assert any(known in text and key_fingerprint(theirs.public) in text for text in said)
    assert desk.state.shared_rows() is None
    assert unpack(desk.answer(packed_train_task(2, vault=ours)), Reply).encrypted_coreset
