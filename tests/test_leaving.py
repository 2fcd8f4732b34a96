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
from descant.config import read
from descant.core.messages import Report, Task
from descant.deployment.flower.flower_connection import Away, TurnedAway
from descant.deployment.silo import SiloFile
from descant.deployment.silo.dry_run import checked
from descant.deployment.silo.forget import FORGOTTEN, be_forgotten, clear
from descant.deployment.silo.outgoing_fields import FORGET
from descant.engines.remote import Lost
from descant.serialization.wire import pack, unpack
from descant.storage.vault.private_keys import PrivateKey, fingerprint
from descant.storage.vault.vault_folder import Vault
from problems import classes
from teams import LEARNING
from test_faults import leaving, organised
from test_letters import Post, met, team, training


class Server:
    """A party's line to a server that has these letters for it, and answers a wish as it is told."""

    def __init__(self, letters: list[Task], goodbye: dict[str, Any] | None = None) -> None:
        self.letters, self.goodbye, self.answers = letters, goodbye, list[bytes]()

    def joined(self) -> Any:
        return nullcontext()

    def pull(self) -> tuple[str, bytes] | None:
        return ("", pack(self.letters.pop(0))) if self.letters else None

    def push(self, to: str, answer: bytes) -> None:
        self.answers.append(answer)
        if FORGET in unpack(answer, Report).metrics and self.goodbye is not None:
            self.letters.append(Task("0", 0, "goodbye", {}, self.goodbye))


HELLO = Task("0", 0, "hello", {}, {"federation": "lab"})

# ── what leaves is named ──────────────────────────────────────────────────────────────────────────────────────────────

WHEN = {"hello": "when it joins", "train": "after training", "evaluate": "when models are judged"}
UNSEEN = "where work is added up unseen"
RECIPES = {
    "plain": LEARNING.format(method="ditto"),
    "unseen": LEARNING.format(method="fedavg") + 'wrap = [{by = "secure"}]',
    "measured": LEARNING.format(method="fedavg") + 'wrap = [{by = "adaptive", reward = "clients"}]',
    "private": LEARNING.format(method="fedavg") + 'wrap = [{by = "local_privacy", clip = 1.0, noise = 1.0}]',
}


@dataclass
class Heard:
    """All that a party answers, by the part of the list that must name it."""

    fields: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    arrays: dict[str, list[int]] = field(default_factory=dict)
    hello: dict[str, Any] = field(default_factory=dict)

    def take(self, kind: str, answer: bytes, unseen: bool = False) -> None:
        report = unpack(answer, Report)
        when = UNSEEN if kind == "keys" else WHEN[kind]
        self.fields[when] |= set(report.metrics) | ({"sealed"} if report.sealed else set())
        self.fields["in every answer"] |= {"party", "round", "kind", "status", *(["reason"] if report.reason else [])}
        if kind == "keys":
            self.fields[when] |= set(report.arrays)
        elif report.arrays:
            self.fields[UNSEEN if unseen else when].add("arrays")
            self.arrays |= {name: list(tensor.shape) for name, tensor in report.arrays.items()}
        if kind == "hello":
            self.hello |= report.metrics


def heard(folder: Path) -> Heard:
    """What party 0 says in trainings of several kinds, when it has lost its memory, rests and is forgotten."""
    found = Heard()
    for name, text in RECIPES.items():
        post = Post(leaving(folder / name))

        def spoil(task: Task, answer: bytes, unseen: bool = name == "unseen") -> bytes:
            if task.party == "0":
                found.take(task.kind, answer, unseen)
            return answer

        post.spoil = spoil
        fed = met(post, read("[run]\nseed = 5\n" + text))
        fed.fit(1, progress=False).scores()
    desk = team(folder / "rows", '{"share": 1, "rounds_a_day": 1}')
    vault = Vault.create(folder / "vault", PrivateKey.new(), "r")
    for letter in (training(2, vault=vault, accepted=1), training(3, accepted=1)):
        found.take("train", desk.answer(letter))
    line = Server([HELLO])
    with pytest.raises(Away):
        be_forgotten(line, "a mark", "lab", 0.2)
    found.take("hello", line.answers[0])
    return found


def test_every_field_that_is_sent_is_named_and_every_field_that_is_named_is_sent(tmp_path: Path) -> None:
    found = heard(tmp_path)
    told = checked(SiloFile(tmp_path / "plain" / "team0.py", "0"))
    leaves = {when: {one for names in fields for one in names.split(", ")} for when, fields in told["leaves"].items()}
    del leaves["on the line"]
    assert found.fields == leaves
    assert found.arrays == told["tensors"]
    joins = told["leaves"]["when it joins"]
    assert all(str(found.hello[name]) in joins[name] for name in ("layout", "version", "loss"))
    assert found.hello["described"] == told["data"]


# ── whoever wishes it is forgotten ────────────────────────────────────────────────────────────────────────────────────


class Wishing:
    """In place of a desk, as `descant silo forget` answers."""

    def __init__(self, machine: str) -> None:
        self.machine = machine

    def answer(self, letter: bytes) -> bytes:
        line = Server([unpack(letter, Task)])
        with pytest.raises(Away):
            be_forgotten(line, self.machine, "lab", 0.01)
        return line.answers[0]


def wish(post: Post, folder: Path, machine: str = "") -> None:
    """Party 1 comes, and wishes to be forgotten."""
    machine = machine or (folder / "at-1" / "machine").read_text()
    post.desks["1"] = lambda: Wishing(machine)  # type: ignore[assignment, return-value]
    post.marks["1"] = f"{post.marks.get('1')} again"
    post.away = set()


def goodbyes(post: Post) -> list[dict[str, Any]]:
    tasks = [unpack(letter, Task) for party, letter in post.letters.values() if party == "1"]
    return [dict(task.settings) for task in tasks if task.kind == "goodbye"]


def test_who_wishes_to_be_forgotten_is_and_nobody_stands_in_for_it(tmp_path: Path) -> None:
    post, said = Post(leaving(tmp_path)), list[str]()
    desk = post.desks["1"]
    _, fed = organised(tmp_path, post, said.append)
    fed.fit(1, progress=False)
    post.away = {"1"}
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
    post.desks["1"], post.marks["1"] = desk, "back"
    assert fed.fit(1, progress=False).history_[-1]["presence"] == "pppp"


@pytest.mark.parametrize("lost", [None, Lost("its machine is off")], ids=["swallowed", "lost"])
def test_a_round_does_not_wait_for_who_is_forgotten_meanwhile(tmp_path: Path, lost: Lost | None) -> None:
    post = Post(leaving(tmp_path))
    _, fed = organised(tmp_path, post)
    fed.fit(1, progress=False)

    def spoil(task: Task, answer: bytes) -> bytes | Lost | None:
        if task.party != "1" or task.kind != "train":
            return answer
        wish(post, tmp_path)
        return lost

    post.spoil = spoil
    with pytest.warns(DescantWarning, match="party '1': lost: it was forgotten, as it wished"):
        fed.fit(1, progress=False)
    assert {one.party: one.state for one in Vault(tmp_path / "vault").parties()}["1"] == "forgotten"


def test_another_machine_cannot_let_a_party_be_forgotten(tmp_path: Path) -> None:
    post, said = Post(leaving(tmp_path)), list[str]()
    _, fed = organised(tmp_path, post, said.append)
    fed.fit(1, progress=False)
    wish(post, tmp_path, "another mark")
    assert fed.fit(1, progress=False).history_[-1]["presence"] == "pspp"
    [told] = goodbyes(post)
    assert "another machine" in told["reason"] and FORGOTTEN not in told
    assert any("used in two places" in text for text in said)


def test_a_server_that_cannot_forget_says_so_and_names_none_of_its_files(tmp_path: Path) -> None:
    post, said = Post(leaving(tmp_path)), list[str]()
    _, fed = organised(tmp_path, post, said.append)
    (tmp_path / "vault" / "vault.json").rename(tmp_path / "vault" / "elsewhere")
    wish(post, tmp_path)
    fed.engine_._post.here()  # type: ignore[attr-defined]
    [told] = goodbyes(post)
    assert "trouble of its own" in told["reason"] and FORGOTTEN not in told and "vault.json" not in str(told)
    assert any("vault.json" in text for text in said)


def test_a_party_knows_whether_it_was_forgotten() -> None:
    before, work = Task("0", 0, "goodbye", {}, {"reason": "of before"}), Task("0", 4, "train", {}, {})
    done = Server([before, work, HELLO], {"reason": "all gone", FORGOTTEN: True})
    assert be_forgotten(done, "mark", "lab", 5) == "all gone"
    assert [unpack(answer, Report).status for answer in done.answers] == ["refused", "ok"]
    with pytest.raises(TurnedAway, match="of the federation 'bank', and the server of 'lab'"):
        be_forgotten(Server([HELLO], {"reason": "all gone", FORGOTTEN: True}), "mark", "bank", 5)
    with pytest.raises(TurnedAway, match="trouble"):
        be_forgotten(Server([HELLO], {"reason": "trouble"}), "mark", "lab", 5)
    with pytest.raises(TurnedAway, match="over"):
        be_forgotten(Server([Task("0", 0, "goodbye", {}, {"rounds": 7})]), "mark", "lab", 5)
    with pytest.raises(Away, match="has not said that it was done"):
        be_forgotten(Server([HELLO]), "mark", "lab", 0.3)
    with pytest.raises(Away, match="has not asked who we are"):
        be_forgotten(Server([]), "mark", "lab", 0.3)


def test_however_often_a_party_is_forgotten_its_policy_holds(tmp_path: Path) -> None:
    vault, sealed = Vault.create(tmp_path / "vault", PrivateKey.new(), "r"), 0
    for again in range(4):
        desk = team(tmp_path, '{"share": 0.3, "rounds_a_day": 12}', "state")
        for seed in range(4):
            report = unpack(desk.answer(training(seed=10 * again + seed, vault=vault)), Report)
            assert report.status == ("ok" if again < 3 else "refused"), report.reason
            sealed += bool(report.sealed)
        _, kept = clear(tmp_path)
        assert kept == ["state/days.json", "state/left.safetensors", "state/machine"]
    rows = desk.keeping.left()
    assert sealed and rows is not None and len(rows) <= math.ceil(0.3 * classes(5)["0"].samples)


# ── for whom rows are sealed ──────────────────────────────────────────────────────────────────────────────────────────


def test_a_party_seals_for_the_vault_of_its_invite_and_for_no_other(tmp_path: Path) -> None:
    ours, theirs = (Vault.create(tmp_path / name, PrivateKey.new(), "r") for name in ("ours", "theirs"))
    known, said = fingerprint(ours.public), list[str]()
    desk = team(tmp_path, '{"share": 1}', log=said.append, vault=known)
    report = unpack(desk.answer(training(1, vault=theirs)), Report)
    assert report.status == "ok" and not report.sealed and "left no coreset" in report.reason
    assert any(known in text and fingerprint(theirs.public) in text for text in said)
    assert desk.keeping.left() is None
    assert unpack(desk.answer(training(2, vault=ours)), Report).sealed
