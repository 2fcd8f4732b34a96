"""Parties on machines of their own, without the machines: a post in memory, desks with folders, and what dies."""

from __future__ import annotations

import io
import math
import os
import re
import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import date
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from descant import DescantWarning, Federation, algorithms
from descant.algorithms import Timetable
from descant.config import Recipe, read
from descant.core.algorithm import seeds
from descant.core.messages import Report, Task
from descant.core.metrics import by_chance
from descant.core.timeouts import Patience
from descant.coresets import proxy_training
from descant.deployment.server import Meeting, training_session
from descant.deployment.server.server_report import write_report
from descant.deployment.server.training_session import Training, first_rounds, in_words, met_in
from descant.deployment.server.training_status import outcome
from descant.deployment.silo import Desk, SiloFile
from descant.deployment.silo.console_messages import done
from descant.deployment.silo.handshake_reply import reduced
from descant.deployment.silo.result_files import Result
from descant.deployment.silo.silo_evaluation import judged
from descant.deployment.silo.silo_worker import Worker
from descant.engines.remote import Lost, Silos
from descant.errors import PartyError, StateError
from descant.models.flat import Net
from descant.parties import People, from_arrays
from descant.parties.party import Form
from descant.parties.remote_parties import elsewhere
from descant.privacy.gaussian_mechanism import epsilon
from descant.rounds.checkpoint import models_digest
from descant.rounds.dispatch import tasks_for
from descant.rounds.plan import Plan
from descant.rounds.validation import Refusal
from descant.serialization.references import address_of
from descant.serialization.wire import Letter, pack, unpack
from descant.storage import atomic
from descant.storage.vault.coreset_rows import Expected, Rows
from descant.storage.vault.private_keys import PrivateKey
from descant.storage.vault.vault_folder import Vault
from descant.tracking import read as recorded
from dying import Death, faults
from problems import classes, network
from teams import LEARNING, TEAM, WORK
from test_wire import LIES, in_file

NAMES = ("0", "1", "2", "3")
RECIPE = """
[run]
seed = 5
[parties]
population = "problems:classes"
"""
RECIPE += LEARNING
LAYOUT = Net.made(network, 0).layout


class Post:
    """Letters are answered when they are asked for, by desks that are made anew for every letter, as after a kill.

    Answers are files, as Flower's are.
    """

    def __init__(self, desks: dict[str, Callable[[], Desk]]) -> None:
        self.desks, self.away, self.marks = desks, set[str](), dict[str, str]()
        self.gone = set[str]()
        self.letters: dict[str, tuple[str, bytes]] = {}
        self.awaited = set[str]()
        self.spoil: Callable[[Task, bytes], bytes | Lost | None] = lambda task, answer: answer
        self.count = 0

    def here(self) -> dict[str, str]:
        return {name: self.marks.get(name, "first") for name in self.desks if name not in self.away}

    def left(self) -> set[str]:
        return self.gone & self.away

    def send(self, party: str, letter: Letter, seconds: float) -> str:
        if party in self.away:
            raise Lost("nobody is there")
        self.count += 1
        self.letters[str(self.count)] = (party, letter[:])
        if "rounds" in (task := unpack(letter, Task)).settings and task.kind == "goodbye":
            self.away.add(party)
        self.awaited.add(str(self.count))
        return str(self.count)

    def fetch(self, numbers: Collection[str], most: int) -> dict[str, Letter | Lost]:
        found: dict[str, Letter | Lost] = {}
        for number in numbers:
            party, letter = self.letters.pop(number, ("", b""))
            if party:
                answer = self.spoil(unpack(letter, Task), self.desks[party]().answer(letter))
                if answer is not None:
                    found[number] = in_file(answer) if isinstance(answer, bytes) else answer
        self.awaited -= found.keys()
        return found

    def drop(self, numbers: Collection[str]) -> None:
        self.awaited -= set(numbers)


class Killed(BaseException):
    """What dies here does not tidy up behind itself."""


class Restarting(Post):
    """Desks that live on from letter to letter; one that is killed over a letter is made anew, and given it again."""

    def __init__(self, makers: dict[str, Callable[[], Desk]]) -> None:
        self.alive: dict[str, Desk] = {}
        super().__init__({name: partial(self._desk, name, make) for name, make in makers.items()})

    def _desk(self, name: str, make: Callable[[], Desk]) -> Desk:
        return self.alive.setdefault(name, make()) if name not in self.alive else self.alive[name]

    def fetch(self, numbers: Collection[str], most: int) -> dict[str, Letter | Lost]:
        before = dict(self.letters)
        try:
            return super().fetch(numbers, most)
        except Killed:
            self.alive, self.letters = {}, before
            return super().fetch(numbers, most)


def desks(
    folder: Path, names: Collection[str] = NAMES, log: Callable[[str], None] = lambda text: None, team: str = TEAM
) -> dict[str, Callable[[], Desk]]:
    folder.mkdir(exist_ok=True)
    found: dict[str, Callable[[], Desk]] = {}
    for name in names:
        file = folder / f"team{name}.py"
        file.write_text(team.format(name=name))
        found[name] = lambda file=file, name=name: Desk(SiloFile(file, name), folder / f"at-{name}", log)  # type: ignore[misc]
    return found


def recipe(method: str = "fedgeomed+") -> Recipe:
    return read(RECIPE.format(method=method))


def met(
    post: Post,
    chosen: Recipe,
    patience: Patience = Patience(),  # noqa: B008
    say: Callable[[str], None] = lambda text: None,
    barred: Callable[[], Mapping[str, str]] = dict,
) -> Federation:
    """A federation of whoever is there."""
    loss = address_of(torch.nn.functional.cross_entropy)
    meeting = Meeting(post, chosen, "lab", Net.made(network, 0), loss, say=lambda text: None)
    people = elsewhere(meeting.gather(len(post.here())))
    engine = Silos(meeting, patience, say, barred)
    return Federation(network, people, chosen.algorithm(), solver=chosen.solver(), seed=5, engine=engine)


def simulated(chosen: Recipe, rounds: int, names: Collection[str] = NAMES, **more: Any) -> Federation:
    people = from_arrays({name: (p.x, p.y, p.x[:3], p.y[:3]) for name, p in classes(5).subset(names).items()})
    settings = {"algorithm": chosen.algorithm(), "solver": chosen.solver(), "seed": 5, **more}
    return Federation(network, people, **settings).fit(rounds, progress=False)


def same(one: Federation, other: Federation, names: Collection[str] = NAMES) -> None:
    assert torch.equal(one.state.center, other.state.center)
    for name in names:
        mine, yours = (fed.state.own.get(name) for fed in (one, other))
        assert mine.keys() == yours.keys() and all(torch.equal(mine[key], yours[key]) for key in mine)


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "fedgeomed+", "ditto", "rfa"])
def test_deployment_is_the_simulation_bit_for_bit(tmp_path: Path, method: str) -> None:
    fed, twin = met(Post(desks(tmp_path)), recipe(method)).fit(3, progress=False), simulated(recipe(method), 3)
    same(fed, twin)
    assert models_digest(fed.state) == models_digest(twin.state)
    np.testing.assert_array_equal(fed.scores().own.values, twin.scores().own.values)


OTHERWISE = {
    "a layer of its own": ("class Layer(torch.nn.Linear): pass\n", "Layer(6, 5), torch.nn.Tanh(), Layer(5, 3)"),
    "dropout": (
        "",
        "torch.nn.Linear(6, 5), torch.nn.Sequential(torch.nn.Tanh(), torch.nn.Dropout(0.5)), torch.nn.Linear(5, 3)",
    ),
}


@pytest.mark.parametrize("how", OTHERWISE)
def test_a_team_may_write_the_same_tensors_otherwise(tmp_path: Path, how: str) -> None:
    """Its model has the federation's names and shapes, and is not computed by the way that the server has tried."""
    people, (before, layers) = desks(tmp_path), OTHERWISE[how]
    written = f"import torch\n{before}" + TEAM.replace("return network()", f"return torch.nn.Sequential({layers})")
    (tmp_path / "team0.py").write_text(written.format(name="0"))
    fed = met(Post(people), recipe("fedavg"))
    assert fed.state.way == "stacked"
    fed.fit(2, progress=False)
    assert not fed.refusals_ and fed.scores().names == NAMES
    assert set(Result(tmp_path / "at-0").worked()) == {1, 2}
    assert len(judged(people["0"]().file, tmp_path / "at-0").rows) == 1  # it trains alone by the same way


def deaths_in(folder: Path, run: Callable[[Path], None], every: int = 1) -> int:
    """At how many of their writes desks died, each time in another run; they are asked again, and nothing differs."""
    for died in range(400):
        left = [died * every]

        def dying(change: Callable[..., object], *arguments: object, left: list[int] = left) -> object:
            left[0] -= 1
            if left[0] == -1:
                raise Killed
            return change(*arguments)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(atomic, "_do", dying)
            run(folder / str(died))
        if left[0] >= 0:
            return died
    raise AssertionError("there is always one write more")


def deaths(folder: Path, chosen: Recipe, every: int = 1) -> int:
    """The same in runs of two rounds by a recipe."""
    two = NAMES[:2]
    twin = simulated(chosen, 2, two)

    def run(place: Path) -> None:
        same(met(Restarting(desks(place, two)), chosen).fit(2, progress=False), twin, two)

    return deaths_in(folder, run, every)


def test_what_is_killed_at_any_moment_goes_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    assert deaths(tmp_path, recipe()) > 50


ONLY_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only Linux says how much a process has")
SLY = """
import os, time
from problems import classes, network

def model():
    return network()

def data():
    party = classes(5)["0"]
    return party.x, party.y

def limit():
    import resource
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**27, resource.RLIM_INFINITY))  # 128 MB more than it has

def loss(output, target):
    mark = __file__ + ".mark"
    if os.path.exists(mark):
        what = open(mark).read()
        os.remove(mark)
        exec(what)
    return torch.nn.functional.cross_entropy(output, target)

import torch
"""


@pytest.mark.parametrize(
    ("does", "told"),
    [
        ("raise ValueError('a row: 4711')", "ValueError"),
        ("os._exit(3)", "exited with 3"),
        ("os.kill(os.getpid(), 9)", "SIGKILL"),
        ("time.sleep(600)", "was ended"),
        pytest.param("limit(); [bytearray(2**24) for _ in range(2**20)]", "MemoryError", marks=ONLY_LINUX),
    ],
    ids=["raises", "exits", "is killed", "hangs", "runs out of memory"],
)
def test_what_a_teams_code_does_costs_it_one_round_and_shows_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, does: str, told: str
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
    file = tmp_path / "team0.py"
    file.write_text(SLY)
    said: list[str] = []
    worker = Worker(file, "0", tmp_path / "at", said.append)
    try:
        chosen, layout = recipe(), Plan.made(network, classes(5), recipe().algorithm(), 5, **_rest()).net.layout
        hello = {"recipe": {**chosen.tables, "model": {}}, "federation": "lab", "layout": layout.digest}
        report = unpack(worker.answer(pack(Task("0", 0, "hello", {}, hello))), Report)
        assert report.status == "ok", report.reason
        center = torch.zeros(layout.width)
        settings = {"seed": 5, "way": "looped", "layout": layout.digest, "lr": 0.1, "work": 1, "accepted": 0}
        train = Task("0", 1, "train", {"center": center, "own": center}, settings)
        Path(f"{file}.mark").write_text(does)
        report = unpack(worker.answer(pack(replace(train, deadline=5.0 if "sleep" in does else 600.0))), Report)
        assert report.status == "error" and told in report.reason and "4711" not in report.reason
        Path(f"{file}.mark").unlink(missing_ok=True)  # a slow machine may have ended it before it read that
        assert unpack(worker.answer(pack(train)), Report).status == "ok"
    finally:
        worker.close()


def test_a_team_reads_a_line_for_all_that_its_party_has_done(tmp_path: Path) -> None:
    said = list[str]()
    post = Post(desks(tmp_path, ["0"], said.append))
    fed = met(post, recipe("fedavg")).fit(2, progress=False)
    scores, rows = fed.scores(), classes(5)["0"].samples
    told = [text for text in said if text.startswith("Round")]
    assert len(told) == 3
    for round, text in enumerate(told[:2], 1):
        loss = f"{fed.history_[round - 1]['loss']:.4f}"  # of one party the mean is its own
        assert re.fullmatch(rf"Round {round}: trained on {rows} samples in \d+\.\d s, loss {loss}\.", text), text
    own, center = (f"{column.mean:.4f}" for column in (scores.own, scores.center))
    assert re.fullmatch(rf"Round 2: judged in \d+\.\d s, its own model {own}, the common one {center}\.", told[2]), told


def test_a_team_reads_that_rows_of_it_have_left_and_that_it_was_asked_again(tmp_path: Path) -> None:
    sent = Report("0", 1, "train", metrics={"samples": 9, "loss": 1.0, "coreset": 4}, sealed=b"rows")
    assert done(sent, 0.0).endswith("loss 1.0000, 4 rows sealed and sent, by which it is stood in for.")
    said = list[str]()
    post = Post(desks(tmp_path, ["0"], said.append))
    fed = met(post, recipe("fedavg"))
    post.spoil = lambda task, answer: post.desks["0"]().answer(pack(task)) if task.kind == "train" else answer
    fed.fit(1, progress=False)
    again = "Round 1: it was asked again, and answers as before."
    assert [text for text in said if text.startswith("Round")][1:] == [again]


def test_what_a_team_reads_has_the_time_of_its_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
    (tmp_path / "team0.py").write_text(TEAM.format(name="0"))
    worker = Worker(tmp_path / "team0.py", "0", tmp_path / "at")
    hello = {"recipe": {**recipe().tables, "model": {}}, "federation": "lab", "layout": LAYOUT.digest}
    try:
        worker.answer(pack(Task("0", 0, "hello", {}, hello)))
    finally:
        worker.close()
    assert re.search(r"^\d\d:\d\d:\d\d Taking part by", capfd.readouterr().err, re.MULTILINE)


def _rest() -> dict[str, object]:
    return {"solver": recipe().solver(), "loss": torch.nn.functional.cross_entropy, "metric": None}


def falsified(letter: Task, answer: bytes, how: str) -> bytes:
    report = unpack(answer, Report)
    first = next(iter(report.arrays))
    tensor = report.arrays[first]
    other = {
        "nan": torch.full_like(tensor, torch.nan),
        "infinite": torch.full_like(tensor, torch.inf),
        "another shape": tensor.flatten()[:1],
        "a shape that broadcasts": tensor[:1],
        "another dtype": tensor.double(),
    }
    if how in other:
        return pack(replace(report, arrays={**report.arrays, first: other[how]}))
    arrays, metrics = dict(report.arrays), dict(report.metrics)
    if how == "a tensor missing":
        del arrays[first]
    elif how == "a tensor too many":
        arrays["backdoor"] = torch.zeros(2)
    elif how == "an absurd weight":
        metrics["samples"] = 1e30
    elif how == "no weight":
        del metrics["samples"]
    elif how == "a name for the terminal":
        arrays[CLEARS] = torch.zeros(2)
    elif how == "a name in place of another":
        arrays[CLEARS] = arrays.pop(first)
    status: Any = CLEARS if how == "a status for the terminal" else report.status
    return pack(replace(report, status=status, arrays=arrays, metrics=metrics))


BYTES: dict[str, Callable[[bytes], bytes]] = {
    "too long": lambda answer: answer + bytes(2**23),
    "nothing": lambda answer: b"",
    "cut": lambda answer: answer[: len(answer) // 2],
    "a pickle": lambda answer: b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94.",
    "an npz bomb": lambda answer: _bomb(2**26),
    "a flipped bit": lambda answer: answer[:-1] + bytes([answer[-1] ^ 1]),
    "a header that lies": lambda answer: (2**62).to_bytes(8, "little") + answer[8:],
}
REPORTS = ["nan", "infinite", "another shape", "a shape that broadcasts", "another dtype", "a tensor missing"]
REPORTS += ["a tensor too many", "an absurd weight", "no weight", "a name for the terminal"]
REPORTS += ["a name in place of another", "a status for the terminal"]
CLEARS = "\x1b[2J" * 10**4  # what a terminal obeys, and long


def _bomb(size: int) -> bytes:
    """A file of numpy that is a thousand times as large as its bytes once it is read."""
    file = io.BytesIO()
    np.savez_compressed(file, weights=np.zeros(size, np.uint8))
    return file.getvalue()


@pytest.mark.parametrize("how", [*REPORTS, *BYTES, *LIES])
def test_a_false_answer_is_refused_and_the_others_go_on(tmp_path: Path, how: str) -> None:
    post = Post(desks(tmp_path))

    def spoil(task: Task, answer: bytes) -> bytes:
        if task.party != "1" or task.kind != "train":
            return answer
        return LIES[how]() if how in LIES else BYTES[how](answer) if how in BYTES else falsified(task, answer, how)

    post.spoil = spoil
    fed = met(post, recipe("fedavg"))
    if how in LIES:
        fed.engine_._most = 2**40  # as where the model is large: its size does not give a letter away
    with pytest.warns(DescantWarning, match="refused"):
        fed.fit(2, progress=False)
    assert [refusal.party for refusal in fed.refusals_] == ["1", "1"]
    assert "it answered for" not in str(fed.refusals_[0])  # it says the party and the round that were asked
    assert all(str(refusal).isprintable() and len(str(refusal)) < 800 for refusal in fed.refusals_)
    without = simulated(recipe("fedavg"), 2, [name for name in NAMES if name != "1"])
    assert torch.equal(fed.state.center, without.state.center)


@pytest.mark.parametrize("whose", ["another party's", "an old round's"])
def test_an_answer_to_another_letter_is_not_taken(tmp_path: Path, whose: str) -> None:
    post, kept = Post(desks(tmp_path)), dict[tuple[str, int], bytes]()

    def spoil(task: Task, answer: bytes) -> bytes:
        kept[task.party, task.round] = answer
        if task.party != "1" or task.round != 2 or task.kind != "train":
            return answer
        return kept["0", 2] if whose == "another party's" else kept["1", 1]

    post.spoil = spoil
    with pytest.warns(DescantWarning, match="refused"):
        fed = met(post, recipe("fedavg")).fit(3, progress=False)
    [refusal] = fed.refusals_
    assert refusal.party == "1" and refusal.round == 2 and "was asked for" in refusal.reason


def test_letters_that_a_desk_does_not_answer(tmp_path: Path) -> None:
    post = Post(desks(tmp_path))
    fed = met(post, recipe("fedavg")).fit(2, progress=False)
    plan, desk = fed.plan_, post.desks["0"]()

    def said(**changes: object) -> str:
        task = next(iter(tasks_for(plan, fed.state, {"0": plan.solver.hyper}, "train", 3)))
        task = replace(task, settings={**task.settings, "accepted": 2, **changes.pop("settings", {})}, **changes)  # type: ignore[arg-type, dict-item]
        report = unpack(desk.answer(pack(task)), Report)
        assert report.status in ("refused", "error") and not report.arrays
        return report.reason

    assert "'0'" in said(party="1")
    assert "not answered here" in said(kind="personal") and "not answered here" in said(kind="stand_in")
    assert "cannot follow" in said(settings={"accepted": 3}) and "cannot follow" in said(settings={"accepted": None})
    assert "Stale" in said(settings={"accepted": 0})
    assert "ModelError" in said(settings={"layout": "another"})
    assert "hello" in unpack(desk.answer(b"no letter"), Report).kind


def test_a_party_that_cannot_count_its_budget_says_so_when_it_joins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = list[str]()
    chosen = read(RECIPE.format(method="fedavg") + 'wrap = [{by = "local_privacy", noise = 4.0, budget = 9.0}]')
    [desk] = desks(tmp_path, ["0"], said.append).values()
    hello = {"recipe": reduced(chosen.tables), "federation": "lab", "layout": LAYOUT.digest}
    letter = pack(Task("0", 0, "hello", {}, hello))
    assert unpack(desk().answer(letter), Report).status == "ok"
    epsilon.cache_clear()
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    assert unpack(desk().answer(letter), Report).status == "refused" and "pip install 'descant[dp]'" in said[-1]


def test_who_has_another_loss_is_not_told_where_the_organiser_s_file_lies(tmp_path: Path) -> None:
    post = Post(desks(tmp_path, ["0"]))
    meeting = Meeting(post, recipe(), "lab", Net.made(network, 0), "/home/organiser/secret/mine.py:loss", len)
    assert not meeting.here()
    [(_, letter)] = post.letters.values()
    assert "federation's is mine.py:loss" in unpack(letter, Task).settings["reason"] and b"organiser" not in letter


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"layout": "another"}, "model"),
        ({"federation": 7}, "federation"),
        ({"recipe": {"method": {"algorithm": "fedavg", "wrap": [{"by": "os:system"}]}}}, "code"),
        ({"recipe": {"method": {"algorithm": "fedavg"}, "work": {"optimizer": "../x"}}}, "files"),
        ({"recipe": {"method": {"algorithm": "unheard"}}}, "unheard"),
    ],
)
def test_an_introduction_that_a_party_refuses(tmp_path: Path, said: dict[str, object], why: str) -> None:
    desk = desks(tmp_path)["0"]()
    hello = {"recipe": recipe().tables, "federation": "lab", "layout": "", **said}
    report = unpack(desk.answer(pack(Task("0", 0, "hello", {}, hello))), Report)
    assert report.status == "refused" and why in report.reason


def test_a_desk_in_the_folder_of_another_party_refuses_and_changes_nothing(tmp_path: Path) -> None:
    post = Post(desks(tmp_path))
    met(post, recipe("fedavg")).fit(1, progress=False)
    place = tmp_path / "at-1"
    before = {file: file.read_bytes() for file in place.rglob("*") if file.is_file()}
    desk = Desk(SiloFile(tmp_path / "team0.py", "0"), place, lambda text: None)
    hello = {"recipe": reduced(recipe("fedavg").tables), "federation": "lab", "layout": LAYOUT.digest}
    settings = {"seed": 5, "way": "looped", "layout": LAYOUT.digest, "lr": 0.1, "work": 1, "accepted": 1}
    center = {"center": torch.zeros(LAYOUT.width)}
    for task in (Task("0", 0, "hello", {}, hello), Task("0", 2, "train", center, settings)):
        report = unpack(desk.answer(pack(task)), Report)
        assert report.status == "refused" and "'1'" in report.reason and "'0'" in report.reason
    assert {file: file.read_bytes() for file in place.rglob("*") if file.is_file()} == before


AGREED = RECIPE.format(method="fedavg")
OTHER = RECIPE.format(method="rfa")
MARKED = "\ufeff" + AGREED.replace("\n", "\r\n")  # as some editors write it


@pytest.mark.parametrize(
    ("agreed", "text", "done", "why"),
    [
        (AGREED, AGREED, AGREED, ""),
        (MARKED, MARKED, AGREED, ""),
        (AGREED, OTHER, OTHER, "another recipe needs another server"),
        (AGREED, "", AGREED, "another recipe needs another server"),
        (AGREED, AGREED, OTHER, "something else"),
    ],
    ids=["as agreed", "written elsewhere", "another", "none", "a lie"],
)
def test_a_party_learns_by_the_recipe_that_it_was_invited_to(
    tmp_path: Path, agreed: str, text: str, done: str, why: str
) -> None:
    desks(tmp_path)
    wanted, found = (sha256(one.encode()).hexdigest() for one in (agreed, text))
    desk = Desk(SiloFile(tmp_path / "team0.py", "0"), tmp_path / "at", lambda text: None, wanted)
    hello = {"recipe": reduced(read(done).tables), "federation": "lab", "layout": LAYOUT.digest, "text": text}
    report = unpack(desk.answer(pack(Task("0", 0, "hello", {}, hello))), Report)
    assert (report.status == "ok") == (not why) and why in report.reason
    assert wanted == found or (wanted in report.reason and found in report.reason)


def test_a_round_goes_on_with_a_quorum_and_says_without_whom(tmp_path: Path) -> None:
    post = Post(desks(tmp_path))
    post.spoil = lambda task, answer: None if task.party == "1" and task.round == 2 else answer
    fed = met(post, recipe("fedavg"), Patience(deadline=0.2, quorum=3))
    with pytest.warns(DescantWarning, match="went on without it"):
        fed.fit(3, progress=False)
    assert [refusal.party for refusal in fed.refusals_] == ["1"]
    twin = simulated(recipe("fedavg"), 3)
    assert not torch.equal(fed.state.center, twin.state.center)


def test_a_letter_that_nobody_waits_for_any_more_is_dropped(tmp_path: Path) -> None:
    """A server whose parties do not answer, or cannot take part, keeps no number of their letters for ever."""
    post = Post(desks(tmp_path))
    post.spoil = lambda task, answer: None if task.party == "1" and task.kind == "train" else answer
    fed = met(post, recipe("fedavg"), Patience(deadline=0.05, quorum=3))
    with pytest.warns(DescantWarning, match="went on without it"):
        for _ in fed.rounds(4):
            assert len(post.awaited) == 1
    assert fed.history_[-1]["presence"] == "p.pp"


def test_a_round_that_waits_for_all_sends_again_to_whoever_comes_back(tmp_path: Path) -> None:
    post, lost = Post(desks(tmp_path)), [3]

    def spoil(task: Task, answer: bytes) -> bytes | Lost:
        if task.party == "1" and task.round == 2 and lost[0]:
            lost[0] -= 1
            return Lost("its machine is off")
        return answer

    post.spoil = spoil
    fed = met(post, recipe()).fit(3, progress=False)
    assert not lost[0] and not fed.refusals_
    same(fed, simulated(recipe(), 3))


class Waits(Exception):
    """The server waits for somebody, and would do so for ever."""


def listening(said: list[str]) -> Callable[[str], None]:
    """Keeps what the server says; where it waits, the test ends."""

    def hear(text: str) -> None:
        said.append(text)
        if "Waiting" in text:
            raise Waits(text)

    return hear


QUORUM = {None: Patience(gather=4, farewell=0), 3: Patience(gather=4, quorum=3, deadline=0.1, farewell=0)}


def without(name: str, since: int) -> Timetable:
    return Timetable.of([{"party": name, "to": since - 1}])


def test_a_round_begins_with_a_quorum_once_the_training_has_begun(tmp_path: Path) -> None:
    """`gather` is for the first round: who is gone later is waited for by nobody, and named."""
    post, said = Post(desks(tmp_path)), list[str]()
    fed = met(post, recipe(), QUORUM[3], listening(said))
    for round in fed.rounds(4):
        post.away = {"1"} if round.index > 1 else set()
    assert [text for text in said if "without" in text] == ["Round 3 begins without 1."]
    same(fed, simulated(recipe(), 4, attend=without("1", 3)))


def test_the_first_round_waits_for_all_that_are_to_gather(tmp_path: Path) -> None:
    post, said = Post(desks(tmp_path)), list[str]()
    fed = met(post, recipe(), QUORUM[3], listening(said))
    post.away = {"1"}
    with pytest.raises(Waits, match=r"3 of 4 parties are there. Waiting for 1."):
        fed.fit(1, progress=False)
    post.away = set()
    same(fed.fit(2, progress=False), simulated(recipe(), 2))


def test_without_a_quorum_every_round_waits_for_all_that_are_to_gather(tmp_path: Path) -> None:
    post, said = Post(desks(tmp_path)), list[str]()
    fed = met(post, recipe(), QUORUM[None], listening(said))
    fed.fit(1, progress=False)
    post.away = {"1"}
    with pytest.raises(Waits, match=r"3 of 4 parties are there. Waiting for 1."):
        fed.fit(1, progress=False)
    post.away = set()
    same(fed.fit(1, progress=False), simulated(recipe(), 2))


def test_who_has_left_in_the_last_round_is_not_waited_for_to_be_judged(tmp_path: Path) -> None:
    post, said = Post(desks(tmp_path)), list[str]()
    fed = met(post, recipe(), QUORUM[None], listening(said)).fit(2, progress=False)
    post.away = {"1"}
    with pytest.raises(Waits, match=r"Waiting for 1\."):  # it fell silent, and comes back
        fed.scores()
    post.gone = {"1"}
    assert fed.scores().names == ("0", "2", "3")
    with pytest.raises(Waits, match=r"Waiting for 1\."):
        fed.fit(1, progress=False)


def test_fewer_than_a_quorum_do_not_begin_a_round(tmp_path: Path) -> None:
    post, said = Post(desks(tmp_path)), list[str]()
    fed = met(post, recipe(), QUORUM[3], listening(said)).fit(1, progress=False)
    post.away = {"1", "2"}
    with pytest.raises(Waits, match=r"2 of 3 parties are there. Waiting for 1, 2."):
        fed.fit(1, progress=False)


@pytest.mark.parametrize("quorum", QUORUM)
@pytest.mark.parametrize("begun", [0, 2], ids=["before the first round", "later"])
def test_who_was_revoked_is_never_waited_for(tmp_path: Path, quorum: int | None, begun: int) -> None:
    post, said, revoked = Post(desks(tmp_path)), list[str](), dict[str, str]()
    patience = replace(QUORUM[quorum], quorum=quorum and 2)
    fed = met(post, recipe(), patience, listening(said), lambda: revoked)
    for name in ("1", "2"):
        fed.fit(begun, progress=False)
        revoked[name] = "it was revoked"
    post.away = {"2"}  # and 1 is there still, as one is whom the proxy has not cut off yet
    fed.fit(2, progress=False)
    assert fed.history_[-1]["presence"] == ("paap" if begun else "p..p")


def test_a_quorum_holds_whoever_was_revoked(tmp_path: Path) -> None:
    """Or the common model could be that of the one party which is left; those who are there can still be judged."""
    post, revoked = Post(desks(tmp_path)), dict[str, str]()
    fed = met(post, recipe(), QUORUM[3], listening([]), lambda: revoked).fit(1, progress=False)
    revoked |= {"1": "it was revoked", "2": "it was forgotten"}
    with pytest.raises(Waits, match=r"2 of 3 parties are there. Waiting for new invites.*smaller --quorum"):
        fed.fit(1, progress=False)
    assert fed.scores().names == ("0", "3") and fed.state.round == 1


def test_a_letter_that_got_lost_is_not_kept_for_who_was_revoked(tmp_path: Path) -> None:
    post, revoked = Post(desks(tmp_path)), dict[str, str]()

    def spoil(task: Task, answer: bytes) -> bytes | Lost:
        if task.party != "1" or task.round != 2:
            return answer
        post.away = {"1"}
        revoked["1"] = "it was revoked"
        return Lost("its machine is off")

    post.spoil = spoil
    fed = met(post, recipe(), Patience(gather=4, limit=20), barred=lambda: revoked)
    with pytest.warns(DescantWarning, match="party '1': lost: it was revoked"):
        fed.fit(3, progress=False)
    same(fed, simulated(recipe(), 3, attend=without("1", 2)), ["0", "2", "3"])


@pytest.mark.parametrize("answer", [Lost("it has gone"), None], ids=["that is told", "that nobody tells"])
def test_who_leaves_in_order_in_mid_round_is_not_waited_for(tmp_path: Path, answer: Lost | None) -> None:
    post = Post(desks(tmp_path))

    def spoil(task: Task, true: bytes) -> bytes | Lost | None:
        if task.party != "1" or task.round != 2:
            return true
        post.away, post.gone = {"1"}, {"1"}
        return answer

    post.spoil = spoil
    fed = met(post, recipe(), Patience(gather=3, limit=20))
    with pytest.warns(DescantWarning, match="party '1': lost: it has left"):
        fed.fit(3, progress=False)
    same(fed, simulated(recipe(), 3, attend=without("1", 2)), ["0", "2", "3"])


def test_who_left_in_order_and_is_back_is_given_its_letter_again(tmp_path: Path) -> None:
    post, times = Post(desks(tmp_path)), [0]

    def spoil(task: Task, true: bytes) -> bytes | None:
        times[0] += (first := task.party == "1" and task.round == 2 and not times[0])
        if first:
            post.gone, post.marks["1"] = {"1"}, "again"
        return None if first else true

    post.spoil = spoil
    fed = met(post, recipe(), Patience(limit=20)).fit(3, progress=False)
    assert times == [1] and not fed.refusals_
    same(fed, simulated(recipe(), 3))


def test_an_answer_that_says_why_there_is_none_counts_to_a_quorum(tmp_path: Path) -> None:
    """One fails and one is dead: the round goes on with the two others, and does not wait for the dead one."""
    post, said = Post(desks(tmp_path)), list[str]()

    def spoil(task: Task, answer: bytes) -> bytes | None:
        if task.round != 2 or task.party not in "12":
            return answer
        return None if task.party == "2" else pack(Report("1", 2, "train", "error", reason="KeyError."))

    post.spoil = spoil
    fed = met(post, recipe(), replace(QUORUM[3], limit=20), listening(said))
    with pytest.warns(DescantWarning, match="2 of 4 reports were refused"):
        fed.fit(2, progress=False)
    assert fed.history_[-1]["presence"] == "paap"
    assert {refusal.party: refusal.reason for refusal in fed.refusals_}["2"].endswith("the round went on without it")


def test_a_round_that_has_no_quorum_when_it_is_due_says_whom_it_waits_for(tmp_path: Path) -> None:
    post, said = Post(desks(tmp_path)), list[str]()
    post.spoil = lambda task, answer: None if task.party in "12" and task.round == 2 else answer
    fed = met(post, recipe(), QUORUM[3], listening(said))
    needs = "2 of the 3 answers with which it goes on without others, after 0.1 s"
    with pytest.raises(Waits, match=f"Round 2 has {needs}. Waiting for 1, 2."):
        fed.fit(2, progress=False)


def test_nobody_is_waited_for_to_be_judged_once_that_is_due(tmp_path: Path) -> None:
    post, said = Post(desks(tmp_path)), list[str]()
    post.spoil = lambda task, answer: None if task.party in "12" and task.kind == "evaluate" else answer
    fed = met(post, recipe(), QUORUM[3], listening(said)).fit(1, progress=False)
    with pytest.warns(DescantWarning, match="could not be evaluated.*no answer within 0.1 s"):
        own = fed.scores().own.values
    assert np.isnan(own).tolist() == [False, True, True, False]


@pytest.mark.parametrize("lie", [10**400, "high", [1.0], None], ids=["too large", "a word", "a list", "nothing"])
def test_a_score_that_is_no_number_is_not_counted_and_ends_nothing(tmp_path: Path, lie: object) -> None:
    post = Post(desks(tmp_path))

    def spoil(task: Task, answer: bytes) -> bytes:
        if task.party != "1" or task.kind != "evaluate":
            return answer
        return pack(replace(report := unpack(answer, Report), metrics={**report.metrics, "own": lie}))

    post.spoil = spoil
    atomic.make(tmp_path / "run")
    trained(tmp_path / "run", post, "fedavg", NAMES, lambda text: None, patience=QUORUM[None])
    own = recorded(tmp_path / "run" / "training").numbers.scores["own"][-1]
    assert np.isnan(own).tolist() == [False, True, False, False]


def test_where_work_is_added_up_unseen_fewer_than_it_hides_in_are_waited_for(tmp_path: Path) -> None:
    """Else all rounds would be used up, each of them void."""
    post, said = Post(desks(tmp_path)), list[str]()
    chosen = read(RECIPE.format(method="fedavg") + 'wrap = [{by = "secure"}]')
    fed = met(post, chosen, Patience(quorum=2, deadline=0.1), listening(said)).fit(1, progress=False)
    post.away = {"1"}
    fed.fit(1, progress=False)
    post.away = {"1", "2"}
    with pytest.raises(Waits, match=r"2 of 3 parties are there. Waiting for 1, 2."):
        fed.fit(1, progress=False)


def test_a_party_that_lost_its_folder_begins_anew_and_says_so(tmp_path: Path) -> None:
    post, told = Post(desks(tmp_path)), list[float]()
    fed = met(post, recipe()).fit(2, progress=False)
    for file in (tmp_path / "at-1").glob("*"):
        if file.name != "party.json":
            file.unlink()
    for round in fed.rounds(2):
        told.append(round.round.metrics["1"].get("began_anew", 0.0))
    assert told == [1.0, 0.0] and not fed.refusals_


def test_a_quorum_is_the_least_that_a_round_counts_with(tmp_path: Path) -> None:
    post, lost = Post(desks(tmp_path)), dict.fromkeys(("1", "2"), 4)

    def spoil(task: Task, answer: bytes) -> bytes | Lost:
        if task.round == 2 and lost.get(task.party):
            lost[task.party] -= 1
            return Lost("its machine is off")
        return answer

    post.spoil = spoil
    fed = met(post, recipe("fedavg"), Patience(deadline=0.01, quorum=3))
    for round in fed.rounds(3):
        assert len(round.round.accepted) >= 3


def test_whoever_goes_and_comes_back_unseen_is_given_its_letter_again(tmp_path: Path) -> None:
    """Flower tells of nobody who was away for a moment only: what it had fetched is never answered."""
    post, swallowed = Post(desks(tmp_path)), [1]

    def spoil(task: Task, answer: bytes) -> bytes | None:
        if task.party == "1" and task.round == 2 and task.kind == "train" and swallowed[0]:
            swallowed[0] -= 1
            post.marks["1"] = "second"
            return None
        return answer

    post.spoil = spoil
    fed = met(post, recipe()).fit(3, progress=False)
    assert not swallowed[0] and not fed.refusals_
    same(fed, simulated(recipe(), 3))


LIED: list[dict[str, object]] = [{"samples": 10**12}, {"samples": 0}, {"tested": -1}]
LIED += [{"x": [10**12]}, {"x": [3]}, {"x": []}, {"x_dtype": "object"}, {"x_dtype": "float64"}]
LIED += [{"y": [7]}, {"y_dtype": "float16"}]


class Flattening(torch.nn.Sequential):
    """The same model; on rows of too few dimensions torch raises an IndexError."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.flatten(1))


@pytest.mark.parametrize("lie", LIED, ids=str)
def test_a_party_that_lies_about_its_data_is_not_let_in(tmp_path: Path, lie: dict[str, object]) -> None:
    post, said = Post(desks(tmp_path)), list[str]()

    def spoil(task: Task, answer: bytes) -> bytes:
        if task.party != "0" or task.kind != "hello":
            return answer
        report = unpack(answer, Report)
        return pack(replace(report, metrics={**report.metrics, "described": {**report.metrics["described"], **lie}}))

    post.spoil = spoil
    loss = address_of(torch.nn.functional.cross_entropy)
    meeting = Meeting(post, recipe(), "lab", Net(Flattening(*network())), loss, say=said.append)
    assert meeting.gather(3).keys() == {"1", "2", "3"}
    assert any("0 has come, and cannot take part" in text for text in said)


@pytest.mark.parametrize(
    ("raises", "kind"),
    [
        ("ast.literal_eval('account 4711')", "SyntaxError"),
        ("error = ValueError(); error.add_note('account 4711'); raise error", "ValueError"),
        ("raise AccountError('4711')", "AccountError"),
    ],
)
def test_of_what_a_team_s_code_raises_nothing_leaves_but_its_kind(tmp_path: Path, raises: str, kind: str) -> None:
    """Python shows some texts before it names the error, some behind it without a colon, and names the file, too."""
    odd = TEAM + f"\nclass AccountError(ValueError): pass\n\ndef loss(output, target):\n    import ast\n    {raises}\n"
    file = tmp_path / "team.py"
    file.write_text(TEAM.format(name="0"))
    made = [SiloFile(file, "0"), SiloFile(tmp_path / "odd.py", "0")]
    post, answers = Post({"0": lambda: Desk(made[0], tmp_path / "at", lambda text: None)}), list[Report]()
    fed = met(post, recipe())
    (tmp_path / "odd.py").write_text(odd.format(name="0"))
    made[0] = made[1]

    def seen(task: Task, answer: bytes) -> bytes:
        answers.append(unpack(answer, Report))
        return answer

    post.spoil = seen
    with pytest.warns(DescantWarning):
        fed.fit(1, progress=False)
    assert answers[0].reason == f"{kind}. The party's own log says more."


@pytest.mark.parametrize("lie", [{"x": [2**28]}, {"y": [2**28]}], ids=str)
def test_nobody_makes_room_for_rows_as_large_as_a_party_may_claim(lie: dict[str, object]) -> None:
    said = {"x": [6], "x_dtype": "float32", "y": [], "y_dtype": "int64", "samples": 3, "tested": 1}
    with pytest.raises(PartyError, match="is not understood"):
        elsewhere({"a": {**said, **lie}})


def test_a_party_whose_introduction_cannot_be_taken_is_told_so_and_not_asked_again(tmp_path: Path) -> None:
    post, said, asked = Post(desks(tmp_path)), list[str](), list[str]()

    def spoil(task: Task, answer: bytes) -> bytes | Lost:
        asked.extend([task.party] if task.kind == "hello" else [])
        return Lost("its answer has more than 65536 bytes", final=True) if task.party == "0" else answer

    post.spoil = spoil
    loss = address_of(torch.nn.functional.cross_entropy)
    meeting = Meeting(post, recipe(), "lab", Net.made(network, 0), loss, say=said.append)
    for _ in range(3):
        assert meeting.here().keys() == {"1", "2", "3"}
    assert asked.count("0") == 1
    assert "0 has come, and cannot take part: its answer has more than 65536 bytes" in said


@pytest.mark.parametrize("method", ["fedavg", "fedgeomed+", "ditto"])
def test_a_team_has_its_model_and_is_told_whether_joining_helped(tmp_path: Path, method: str) -> None:
    """What the simulation's table says of each party, a team finds out by itself, and nobody else hears of it."""
    post = Post(desks(tmp_path))
    fed, twin = met(post, recipe(method)).fit(3, progress=False), simulated(recipe(method), 3)
    fed.scores()
    sent = post.count
    rows = {row["party"]: row for row in twin.table().plain()}
    for name in NAMES:
        table = judged(SiloFile(tmp_path / f"team{name}.py", name), tmp_path / f"at-{name}")
        [row] = table.plain()
        for column in ("own", "center", "alone", "majority", "gain", "rounds"):
            assert row[column] == rows[name][column]
        model = network()
        model.load_state_dict(load_file(tmp_path / f"at-{name}" / "own.safetensors"))
        whole = twin.models_[name].state_dict()
        assert all(torch.equal(tensor, whole[key]) for key, tensor in model.state_dict().items())
        assert f"{row['own']:.3f}" in table.verdict
        assert table.verdict.startswith("No difference that 3 test samples could show: ")  # three never can
    assert post.count == sent


@pytest.mark.parametrize(
    ("now", "told"),
    [
        (TEAM.format(name="1"), "The data of .* are not those that took part: majority class was"),
        (TEAM.format(name="0").replace("[:3]", "[:2]"), "test_samples was 3 on their test set, and is 2 on this one"),
        (TEAM.format(name="0").replace("return network()", "return network()[:1]"), "The model of .* took part"),
    ],
    ids=["rows of another", "another test set", "another model"],
)
def test_a_file_that_did_not_take_part_is_not_judged(tmp_path: Path, now: str, told: str) -> None:
    """Else a verdict would compare models on different rows, without a word."""
    met(Post(desks(tmp_path)), recipe("fedgeomed+")).fit(3, progress=False).scores()
    other = tmp_path / "other.py"
    other.write_text(now)
    with pytest.raises(StateError, match=rf"(?s){told}.*Give the file with which it joined"):
        judged(SiloFile(other, "0"), tmp_path / "at-0")


LONELY = """
import torch
from problems import network as model

def data():
    drawn = torch.Generator().manual_seed(7)
    y = torch.arange(400) % 2
    x = torch.randn(400, 6, generator=drawn) + 2.0 * y[:, None]
    mine = y == {label}
    return x[mine][:40], y[mine][:40], x[{tested}], y[{tested}]
"""


@pytest.mark.parametrize("loss", ["", "def loss(output, y): return torch.nn.functional.cross_entropy(output, y)\n"])
@pytest.mark.parametrize(
    ("tested", "told"),
    [
        ("100:400", "Joining helped: "),
        ("100:400:2", "Joining did not help: "),
        ("100:101", "No difference that 1 test sample could show: "),
    ],
    ids=["on labels that others have", "on labels of its own", "on a sample"],
)
def test_joining_helped_if_more_than_chance_says_so(tmp_path: Path, tested: str, told: str, loss: str) -> None:
    """Who has seen one label is better off together where both are asked for, and worse off where its own is."""
    people = desks(tmp_path, ("0", "1"))
    for name in ("0", "1"):
        (tmp_path / f"team{name}.py").write_text(LONELY.format(label=name, tested=tested) + loss)
    fed = met(Post(people), recipe("fedavg"))
    fed.fit(3, progress=False).scores()
    table = judged(SiloFile(tmp_path / "team0.py", "0"), tmp_path / "at-0")
    assert table.verdict.startswith(told), table.verdict


def test_two_models_that_fail_do_not_differ(tmp_path: Path) -> None:
    people = desks(tmp_path, ("0", "1"))
    failing = "def loss(output, y): return torch.nn.functional.cross_entropy(output, y) * (torch.nan if {} else 1)\n"
    for name in ("0", "1"):
        text = LONELY.format(label=name, tested="100:400") + failing.format("(y == 2).all()")
        (tmp_path / f"team{name}.py").write_text(text.replace("y[100:400]", "0 * y[100:400] + 2"))
    met(Post(people), recipe("fedavg")).fit(3, progress=False).scores()
    table = judged(SiloFile(tmp_path / "team0.py", "0"), tmp_path / "at-0")
    assert table.verdict.startswith("No difference that 300 test samples could show: loss inf"), table.verdict


@pytest.mark.parametrize(("won", "lost"), [(0, 0), (1, 0), (5, 0), (6, 0), (12, 5), (14, 3), (40, 40), (260, 200)])
def test_of_right_and_wrong_answers_what_chance_does_is_mcnemar_s_exact_test(won: int, lost: int) -> None:
    differences = torch.tensor([1.0] * won + [-1.0] * lost + [0.0] * 500)
    tail = sum(math.comb(won + lost, k) for k in range(max(won, lost), won + lost + 1)) / 2 ** (won + lost)
    exact = min(1.0, 2 * tail) if won != lost else 1.0
    assert abs(by_chance(differences) - exact) < 4 * math.sqrt(exact * (1 - exact) / 999) + 0.002
    assert by_chance(differences) == by_chance(0.25 * differences) == by_chance(-differences)


def test_who_was_away_is_compared_with_training_alone_in_the_rounds_it_was_there(tmp_path: Path) -> None:
    post = Post(desks(tmp_path))
    fed = met(post, recipe("fedavg"))
    for round in fed.rounds(4):
        post.away = {"1"} if round.index in (1, 2) else set()
    fed.scores()
    there = Timetable.of([{"party": "1", "from": 1, "to": 1}, {"party": "1", "from": 4}])
    twin = simulated(recipe(), 4, attend=there, algorithm=algorithms.Local())
    [row] = judged(SiloFile(tmp_path / "team1.py", "1"), tmp_path / "at-1").plain()
    assert row["rounds"] == 2
    assert row["alone"] == twin.scores().own.values[1]


def test_rounds_that_were_answered_are_known_whatever_a_kill_has_left(tmp_path: Path) -> None:
    post = Post(desks(tmp_path, NAMES[:2]))
    met(post, recipe("fedavg")).fit(2, progress=False).scores()
    file = tmp_path / "at-0" / "worked.jsonl"
    file.write_text(file.read_text() + '\n{"round": 3, "l')
    result = Result(tmp_path / "at-0")
    assert list(result.worked()) == [1, 2]
    result.note(Task("0", 3, "train", {}, {"lr": 0.1, "work": 1, "way": "looped"}))
    assert list(result.worked()) == [1, 2, 3]


def team(folder: Path, policy: str, at: str = "at", log: Callable[[str], None] = len, vault: str = "") -> Desk:
    """A desk with a policy, introduced to a server that asks for coresets."""
    folder.mkdir(exist_ok=True)
    file = folder / "team0.py"
    file.write_text(TEAM.format(name="0") + f"policy = {policy}\n")
    desk = Desk(SiloFile(file, "0"), folder / at, log, vault=vault)
    tables = {**recipe("fedavg").tables, "wrap": [{"by": "stand-ins", "share": 0.2}]}
    hello = {"recipe": tables, "federation": "lab", "layout": LAYOUT.digest}
    assert unpack(desk.answer(pack(Task("0", 0, "hello", {}, hello))), Report).status == "ok"
    return desk


def training(
    round: int = 1, seed: int = 5, vault: Vault | None = None, accepted: int = 0, center: float = 0.0
) -> bytes:
    """A letter that asks for training and, where there is a vault, for a coreset."""
    settings = {"seed": seed, "way": "looped", "layout": LAYOUT.digest, "lr": 0.1, "work": 1, "accepted": accepted}
    if vault is not None:
        public, generation = vault.invite("0")
        settings["coreset"] = {"public": public.hex(), "generation": generation, "run": "r"}
    return pack(Task("0", round, "train", {"center": torch.full((LAYOUT.width,), center)}, settings))


@pytest.mark.parametrize("center", [0.0, math.nan], ids=["by a model", "by one that no work comes of"])
def test_a_server_cannot_have_more_rows_than_the_teams_policy_lets_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, center: float
) -> None:
    desk, vault = team(tmp_path, '{"share": 0.3}'), Vault.create(tmp_path / "vault", PrivateKey.new(), "r")
    own, seen = classes(5)["0"].x, set[int]()

    def noted(rows: Rows) -> bytes:
        seen.update(k for row in rows.x for k in range(len(own)) if torch.equal(own[k], row))
        return packed(rows)

    packed = proxy_training.pack
    monkeypatch.setattr(proxy_training, "pack", noted)
    sealed = 0
    for seed in range(20):
        report = unpack(desk.answer(training(seed=seed, vault=vault, center=center)), Report)
        assert report.status == "ok"
        sealed += bool(report.sealed)
    rows = desk.keeping.left()
    assert sealed and rows is not None
    assert 0 < len(rows) <= math.ceil(0.3 * len(own)) and seen == set(rows.tolist())


def test_columns_that_a_team_drops_are_0_in_what_it_seals_and_nothing_else_is(tmp_path: Path) -> None:
    own, opened = classes(5)["0"], list[Rows]()
    for name, policy in {"all": '{"share": 1}', "some": '{"share": 1, "columns_dropped": [4, 1]}'}.items():
        desk, vault = team(tmp_path / name, policy), Vault.create(tmp_path / name / "vault", PrivateKey.new(), "r")
        report = unpack(desk.answer(training(vault=vault)), Report)
        expected = Expected(Form((6,), torch.float32, (), torch.int64), own.samples, 3)
        vault.store("0", report.sealed, expected)
        opened.append(vault.open("0", 1, expected))
    whole, held = opened
    assert whole.x[:, [1, 4]].all() and not held.x[:, [1, 4]].any()
    kept = [0, 2, 3, 5]
    assert torch.equal(whole.x[:, kept], held.x[:, kept])
    assert torch.equal(whole.y, held.y) and torch.equal(whole.weights, held.weights)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets the day of all parties' clocks."""

    def show(day: int, year: int = 2026) -> None:
        monkeypatch.setattr("descant.deployment.silo.silo_state.today_in_utc", lambda: date(year, 2, day))

    show(27)
    return show


def test_a_team_trains_so_many_rounds_a_day_whatever_its_clock_does(tmp_path: Path, clock: Callable[..., None]) -> None:
    def said(letter: bytes) -> str:
        report = unpack(team(tmp_path, '{"rounds_a_day": 2}').answer(letter), Report)
        assert (report.status == "ok") != bool(report.reason) and (report.status == "ok") == bool(report.arrays)
        return report.reason

    for letter in (training(1), training(1), training(2), training(2)):
        assert not said(letter)
    assert "2 rounds a day" in said(training(3)) and "2026-02-28" in said(training(2, seed=6))
    clock(26)
    assert "2026-02-28" in said(training(3))
    clock(28)
    assert not said(training(3)) and not said(training(4))
    clock(27)
    assert "2026-03-01" in said(training(5)) and not said(training(4))


@pytest.mark.parametrize("before", [True, False], ids=["after rounds of its own day", "from the first round on"])
def test_a_clock_that_was_a_year_ahead_keeps_a_team_away_for_a_day_at_most(
    tmp_path: Path, clock: Callable[..., None], before: bool
) -> None:
    """Each day that the clock shows has its rounds once, in whatever order they come."""
    rounds = iter(range(1, 100))

    def trains() -> int:
        """How many rounds it trains before it rests."""
        desk = team(tmp_path, '{"rounds_a_day": 2}')
        letters = [training(next(rounds)) for _ in range(4)]
        return [unpack(desk.answer(letter), Report).status for letter in letters].count("ok")

    assert not before or trains() == 2
    clock(27, 2027)
    assert trains() == 2
    clock(27)
    assert trains() == 0
    clock(28)
    assert trains() == 2 and trains() == 0
    clock(26)
    assert trains() == 0
    clock(27, 2027)
    assert trains() == 0


def test_a_round_goes_on_without_a_team_that_has_had_its_rounds(tmp_path: Path, clock: Callable[..., None]) -> None:
    post = Post(desks(tmp_path))
    with (tmp_path / "team1.py").open("a") as file:
        file.write('policy = {"rounds_a_day": 1}\n')
    fed = met(post, recipe("fedavg"))
    with pytest.warns(DescantWarning, match="It goes on at 2026-02-28"):
        fed.fit(2, progress=False)
    clock(28)
    fed.fit(1, progress=False)
    assert [(refusal.party, refusal.round) for refusal in fed.refusals_] == [("1", 2)]


@pytest.mark.parametrize("torn", [False, True])
def test_a_death_while_a_letter_is_counted_neither_wins_nor_loses_a_round(
    tmp_path: Path, clock: Callable[..., None], torn: bool
) -> None:
    for at in range(200):
        desk = team(tmp_path / str(at), '{"rounds_a_day": 1}')
        with faults(at, torn) as found, suppress(Death):
            desk.answer(training(1))
        again = Desk(desk.file, desk.keeping.folder, lambda text: None)
        assert [unpack(again.answer(training(round)), Report).status for round in (1, 2)] == ["ok", "refused"]
        if not found.reached:
            break
    assert at > 10


def trained(
    folder: Path,
    post: Post,
    method: str,
    invited: Collection[str],
    at: Callable[[str], None],
    more: str = "",
    patience: Patience = Patience(gather=3, farewell=0),  # noqa: B008
    barred: Callable[[], Mapping[str, str]] = dict,
) -> dict[str, object]:
    """A training of four rounds, from its folder; `at` hears what the server says."""
    chosen = read(RECIPE.format(method=method).replace("seed = 5", "seed = 5\nrounds = 4\npoints = 1") + more)
    net = Net.made(network, seeds.torch_seed(5, 0, seeds.EVERYBODY, "model"))
    meeting = Meeting(post, chosen, "lab", net, address_of(torch.nn.functional.cross_entropy), say=at)
    return Training(folder, chosen, meeting, patience, at, barred).until_done(lambda: list(invited))


def test_the_line_of_a_round_says_who_counted_and_what_did_not_count(tmp_path: Path) -> None:
    [found] = met(Post(desks(tmp_path)), recipe("fedavg")).rounds(1)
    told = f"Round 1: loss {found.round.loss:.4f}, "
    assert in_words(found.round) == f"{told}4 parties"
    lost, kept = Refusal("2", 1, "lost: it has left"), Refusal("0", 1, "It left no coreset.", "coreset")
    round = replace(found.round, accepted=("0",), refusals=(lost, kept))
    assert in_words(round) == f"{told}1 party; without 2: lost: it has left; 0: It left no coreset"


@pytest.mark.parametrize("method", ["fedavg", "fedgeomed+"])
def test_a_server_tells_the_hash_that_the_simulation_tells(tmp_path: Path, method: str) -> None:
    """As `descant run` prints it for the same rounds: the memories that a server does not have are no part of it."""
    atomic.make(tmp_path / "run")
    done = trained(tmp_path / "run", Post(desks(tmp_path)), method, NAMES, lambda text: None, patience=QUORUM[None])
    data = {name: (p.x, p.y, p.x[:3], p.y[:3]) for name, p in classes(5).subset(NAMES).items()}
    chosen = recipe(method)
    twin = Federation(network, from_arrays(data), chosen.algorithm(), solver=chosen.solver(), seed=5)
    assert done["hash"] == models_digest(twin.fit(4, progress=False).state)


def test_a_training_that_is_resumed_has_begun(tmp_path: Path) -> None:
    post, said = Post(desks(tmp_path)), list[str]()
    listen = listening(said)

    def dies(text: str) -> None:
        listen(text)
        if text.startswith("Round 2:"):
            post.away = {"1"}
            raise Killed

    atomic.make(tmp_path / "run")
    with suppress(Killed):
        trained(tmp_path / "run", post, "fedavg", NAMES, dies, patience=QUORUM[3])
    trained(tmp_path / "run", post, "fedavg", NAMES, listen, patience=QUORUM[3])
    assert "Round 3 begins without 1." in said and recorded(tmp_path / "run" / "training").round == 4


def test_who_is_invited_later_counts_while_a_round_cannot_begin(tmp_path: Path) -> None:
    """Two of the three who are to gather are there, and one more is, who is no part of the training yet."""
    post, said = Post(desks(tmp_path)), list[str]()
    post.away = {"3"}

    def hears(text: str) -> None:
        said.append(text)
        if text.startswith("Round 2:"):
            post.away = {"2", "3"}
        if "Waiting for 2" in text and "3" not in post.away:
            raise Waits(text)
        if "Waiting for 2" in text:
            post.away = {"2"}

    atomic.make(tmp_path / "run")
    trained(tmp_path / "run", post, "fedgeomed+", NAMES[:3], hears)
    assert "2 of 3 parties are there. Waiting for 2." in said
    assert first_rounds(tmp_path / "run") == {"0": 1, "1": 1, "2": 1, "3": 3}
    held = recorded(tmp_path / "run" / "training").numbers
    assert held.accepted[:, 2].tolist() == [True, True, False, False]
    assert held.accepted[:, 3].tolist() == [False, False, True, True]


def test_who_is_invited_while_all_gather_is_part_of_it_from_the_beginning(tmp_path: Path) -> None:
    post, invited = Post(desks(tmp_path)), [*NAMES[:3]]
    post.away = {"2", "3"}

    def hears(text: str) -> None:
        if "Waiting" in text and "3" in invited:
            raise Waits(text)
        if "Waiting" in text:
            invited.append("3")
            post.away = {"2"}

    atomic.make(tmp_path / "run")
    trained(tmp_path / "run", post, "fedavg", invited, hears)
    assert recorded(tmp_path / "run" / "training").numbers.accepted[0].tolist() == [True, True, False, True]
    assert first_rounds(tmp_path / "run") == dict.fromkeys(NAMES, 1)


@pytest.mark.parametrize("again", [False, True], ids=["it comes in time", "the server is started again"])
def test_who_is_away_at_the_end_comes_for_its_models_and_hears_that_it_is_over(tmp_path: Path, again: bool) -> None:
    post, said, folder = Post(desks(tmp_path)), list[str](), tmp_path / "run"

    def hears(text: str) -> None:
        said.append(text)
        if text.startswith("Round 2:"):
            post.away = {"1"}
        if text.startswith("The training is over."):
            post.away -= set(NAMES) if again else {"1"}

    patience = replace(QUORUM[3], farewell=0 if again else 20)
    atomic.make(folder)
    trained(folder, post, "fedgeomed+", NAMES, hears, patience=patience)
    if again:
        assert post.away == set(NAMES) and not (tmp_path / "at-1" / "own.safetensors").exists()
        trained(folder, post, "fedgeomed+", NAMES, hears, patience=replace(patience, farewell=20))
    assert Result(tmp_path / "at-1").scores()["round"] == 4 and post.away == set(NAMES)
    held = [load_file(tmp_path / f"at-{name}" / "center.safetensors") for name in ("0", "1")]
    assert all(torch.equal(held[0][key], held[1][key]) for key in held[0])
    own = simulated(recipe(), 4, attend=without("1", 3)).state.own.get("1")["model"]
    mine = load_file(tmp_path / "at-1" / "own.safetensors")
    assert all(torch.equal(mine[key], part) for key, part in LAYOUT.split(own).items())


def test_a_server_that_is_started_again_waits_only_for_those_who_were_not_told(tmp_path: Path) -> None:
    post, said, folder = Post(desks(tmp_path)), list[str](), tmp_path / "run"

    def hears(text: str) -> None:
        said.append(text)
        if text.startswith("Round 3:"):
            post.away = {"1"}

    def again(farewell: float) -> list[str]:
        said.clear()
        patience = replace(QUORUM[3], farewell=farewell)
        trained(folder, post, "fedavg", NAMES, hears, patience=patience)
        return [text for text in said if text.startswith("The training is over.")]

    atomic.make(folder)
    again(0)
    waits = "The training is over. Waiting 0.5 s for 1 to come for their models."
    assert post.away == set(NAMES) and again(0.5) == [waits]  # though nobody else is there any more
    post.away -= {"1"}
    assert again(600) == [] == again(600) and Result(tmp_path / "at-1").scores()["round"] == 4


class Silent(Post):
    """Some letters are fetched and never answered: their parties have gone, or hang."""

    def __init__(self, desks: dict[str, Callable[[], Desk]], swallows: Callable[[Task], Lost | None]) -> None:
        super().__init__(desks)
        self.swallows = swallows

    def fetch(self, numbers: Collection[str], most: int) -> dict[str, Letter | Lost]:
        for number in [number for number in numbers if number in self.letters]:
            if why := self.swallows(unpack(self.letters[number][1], Task)):
                del self.letters[number]
                return {number: why} if why.args[0] else {}
        return super().fetch(numbers, most)


def test_who_goes_while_the_last_models_are_judged_comes_for_them(tmp_path: Path) -> None:
    went: list[str] = []

    def goes(task: Task) -> Lost | None:
        if went or (task.party, task.kind, task.round) != ("1", "evaluate", 4):
            return None
        post.away = {"1"}
        went.append(task.party)
        return Lost("it has gone")

    post, folder = Silent(desks(tmp_path), goes), tmp_path / "run"
    atomic.make(folder)
    comes = lambda text: post.away.discard("1") if text.startswith("The training is over.") else None  # noqa: E731
    with pytest.warns(DescantWarning, match="'1' could not be evaluated"):
        trained(folder, post, "fedgeomed+", NAMES, comes, patience=replace(QUORUM[3], farewell=20))
    assert went and Result(tmp_path / "at-1").scores()["round"] == 4


def test_who_hangs_at_the_end_keeps_nobody_from_its_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one is waited for to be shown its models another comes: it is in time."""
    monkeypatch.setattr(training_session, "_SHOWING", 0.1)
    over: list[str] = []

    def hangs(task: Task) -> Lost | None:
        if not over or (task.party, task.kind) != ("0", "evaluate"):
            return None
        post.away.discard("1")
        return Lost("")

    def hears(text: str) -> None:
        if text.startswith("Round 3:"):
            post.away = {"0", "1"}
        if text.startswith("The training is over."):
            post.away.discard("0")
            over.append(text)

    post, folder = Silent(desks(tmp_path), hangs), tmp_path / "run"
    atomic.make(folder)
    patience = Patience(gather=2, quorum=2, deadline=60, farewell=1)
    with pytest.warns(DescantWarning, match="'0' could not be evaluated"):
        trained(folder, post, "fedgeomed+", NAMES, hears, patience=patience)
    assert Result(tmp_path / "at-1").scores()["round"] == 4 and post.away == set(NAMES)


def test_who_cannot_be_told_that_it_is_over_is_told_when_it_is_back(tmp_path: Path) -> None:
    """Its line is down at the moment of the goodbye."""
    post, folder, down = Post(desks(tmp_path)), tmp_path / "run", [1]
    true = post.send

    def send(party: str, letter: Letter, seconds: float) -> str:
        if party == "1" and unpack(letter, Task).kind == "goodbye" and down.pop():
            down.append(0)
            raise Lost("it is not there")
        return true(party, letter, seconds)

    post.send = send  # type: ignore[method-assign]
    atomic.make(folder)
    trained(folder, post, "fedavg", NAMES, lambda text: None, patience=replace(QUORUM[None], farewell=20))
    assert post.away == set(NAMES)


def test_who_is_revoked_while_all_gather_is_not_waited_for(tmp_path: Path) -> None:
    post, revoked = Post(desks(tmp_path)), dict[str, str]()
    post.away = {"1"}

    def revoking(text: str) -> None:
        if "Waiting" in text and revoked:
            raise Waits(text)
        if "Waiting" in text:
            revoked["1"] = "it was revoked"

    atomic.make(tmp_path / "run")
    trained(tmp_path / "run", post, "fedavg", NAMES, revoking, "", QUORUM[None], lambda: revoked)
    assert revoked and recorded(tmp_path / "run" / "training").round == 4


TOTAL = 'normalise = "total"'
LATE = {
    "fedavg": ("fedavg", ""),
    "own models": ("fedgeomed+", ""),
    "Ditto": ("ditto", ""),
    "over all": ("fedavg+", 'over = "all"'),
    "of all samples": ("fedavg", TOTAL),
}


@pytest.mark.parametrize("late", ["1", "3"])
@pytest.mark.parametrize("case", LATE)
def test_who_comes_late_counts_as_in_a_simulation_by_timetable(tmp_path: Path, case: str, late: str) -> None:
    """How many samples it has is known from then on. Before, nobody can know: it is taken to have one."""
    method, more = LATE[case]
    post, folder = Post(desks(tmp_path)), tmp_path / "run"
    post.away = {late}
    atomic.make(folder)
    trained(folder, post, method, NAMES, lambda said: post.away.clear() if said.startswith("Round 2:") else None, more)
    chosen = read(RECIPE.format(method=method) + more)
    settings = {"attend": Timetable.of([{"party": late, "from": 3}]), "solver": chosen.solver(), "seed": 5}
    data = {name: (p.x, p.y, p.x[:3], p.y[:3]) for name, p in classes(5).subset(NAMES).items()}
    people = from_arrays(data)
    if more == TOTAL:
        x, y, x_test, y_test = data[late]
        one = from_arrays({**data, late: (x[:1], y[:1], x_test[:0], y_test[:0])})
        known = People(map(people._source, NAMES), since={late: 2}, before={late: one._source(late)})
        Federation(network, one, chosen.algorithm(), **settings).fit(2, progress=False).save(tmp_path / "two")
        twin = Federation(network, known, chosen.algorithm(), **settings).load(tmp_path / "two")
        twin.fit(2, progress=False)
    else:
        twin = Federation(network, people, chosen.algorithm(), **settings).fit(4, progress=False)
    [center] = (folder / "training" / "models" / f"{4:08}").glob("center*")
    assert torch.equal(load_file(center)["center"], twin.state.center)
    held = recorded(folder / "training").numbers
    np.testing.assert_array_equal(held.scores["own"][-1], twin.scores().own.values)
    assert dict(zip(held.parties, held.samples, strict=True)) == people.samples


@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize("method", ["fedavg", "fedgeomed+", "ditto"])
def test_who_is_invited_later_trains_as_one_that_was_invited_first_and_came_late(
    tmp_path: Path, method: str, killed: bool
) -> None:
    hashes = []
    for case, invited in {"first": NAMES, "later": NAMES[:3]}.items():
        post, folder = Post(desks(tmp_path / case)), tmp_path / case / "run"
        post.away = {"3"}
        atomic.make(folder)

        def comes(said: str, post: Post = post) -> None:
            if said.startswith("Round 2:"):
                post.away.clear()
            if killed and said.endswith("part of it from now on: 3."):
                raise Killed

        with suppress(Killed):
            trained(folder, post, method, invited, comes)
        hashes.append(trained(folder, post, method, invited, comes)["hash"])
    assert hashes[0] == hashes[1]
    assert first_rounds(folder) == {"0": 1, "1": 1, "2": 1, "3": 3}
    held = recorded(folder / "training").numbers
    assert held.parties == NAMES and held.accepted[:, 3].tolist() == [False, False, True, True]


def test_a_private_training_stays_with_those_whom_it_began_with(tmp_path: Path) -> None:
    post, said, private = (
        Post(desks(tmp_path)),
        list[str](),
        'wrap = [{by = "central_privacy", clip = 1.0, noise = 1.0}]',
    )
    trained(tmp_path, post, "fedavg", NAMES[:3], said.append, private)
    assert first_rounds(tmp_path).keys() == {"0", "1", "2"} and "4 parties" not in "".join(said)


AFTER_4 = f"ε={epsilon(4.0, 4, 1e-5):.3g}"
SPENT = {
    "of a budget": (
        'wrap = [{by = "central_privacy", noise = 4.0, budget = 8.0}]',
        f"{AFTER_4} of a budget of 8 at δ=1e-05",
    ),
    "without one": ('wrap = [{by = "local_privacy", noise = 8.0}]', f"{AFTER_4} at δ=1e-05"),
    "without noise": ('wrap = [{by = "central_privacy", noise = 0}]', "no noise: nothing is hidden"),
}


@pytest.mark.parametrize("case", SPENT)
def test_every_round_and_the_status_say_what_was_given_away(tmp_path: Path, case: str) -> None:
    more, last = SPENT[case]
    said = list[str]()
    assert outcome(tmp_path)["spent"] is None
    trained(tmp_path, Post(desks(tmp_path)), "fedavg", NAMES, said.append, more, QUORUM[None])
    rounds = [text for text in said if text.startswith("Round ")]
    assert len(rounds) == 4 and all("at δ" in text or "no noise" in text for text in rounds)
    assert rounds[-1].endswith(f"4 parties, {last}")
    assert outcome(tmp_path)["spent"]["told"] == f"Privacy of a party: {last}"


def test_a_training_that_its_budget_ends_is_judged_where_it_ends(tmp_path: Path) -> None:
    """After two rounds of four, of which only the last was to be judged."""
    more = f'wrap = [{{by = "central_privacy", noise = 4.0, budget = {epsilon(4.0, 2, 1e-5) + 1e-6}}}]'
    for _ in range(2):  # the same command, given again, does no round more
        post = Post(desks(tmp_path))
        with pytest.warns(DescantWarning, match="ends the run after 2 rounds"):
            done = trained(tmp_path, post, "fedavg", NAMES, lambda text: None, more, QUORUM[None])
        assert done["rounds"] == 2 and post.away == set(NAMES)
        assert [row["judged"] for row in outcome(tmp_path)["scores"].values()] == [2] * 4
        assert {Result(tmp_path / f"at-{name}").scores()["round"] for name in NAMES} == {2}
    table, _ = write_report(tmp_path / "training")
    assert "After round 2, as judged by 4 of 4 parties" in table.verdict


def test_a_training_that_promises_nothing_says_nothing_of_it(tmp_path: Path) -> None:
    said = list[str]()
    trained(tmp_path, Post(desks(tmp_path)), "fedavg", NAMES, said.append, "", QUORUM[None])
    assert "ε" not in "".join(said) and outcome(tmp_path)["spent"] is None


def test_samples_that_are_hidden_count_by_the_solver(tmp_path: Path) -> None:
    said, solver = list[str](), 'solver = "private_sgd"\nlr = 0.05\nsteps = 1\nbatch = 1\nbudget = 99.0'
    text = RECIPE.format(method="fedavg").replace("seed = 5", "seed = 5\nrounds = 2").replace(WORK.strip(), solver)
    chosen, post = read(text), Post(desks(tmp_path))
    net = Net.made(network, seeds.torch_seed(5, 0, seeds.EVERYBODY, "model"))
    meeting = Meeting(post, chosen, "lab", net, address_of(torch.nn.functional.cross_entropy), say=said.append)
    Training(tmp_path, chosen, meeting, Patience(gather=4, farewell=0), said.append).until_done(lambda: NAMES)
    spent = outcome(tmp_path)["spent"]
    assert (
        0 < spent["epsilon"] < spent["budget"] == 99.0
        and spent["told"].removeprefix("Privacy of a sample: ") in said[-1]
    )


def test_a_private_training_stays_with_what_was_known_of_those_who_came_late(tmp_path: Path) -> None:
    """One sample is the least that a party has: of nobody is more told than was reckoned with."""
    post = Post(desks(tmp_path))
    post.away = {"0"}
    more = 'wrap = [{by = "local_privacy", clip = 1.0, noise = 1.0}]'
    trained(tmp_path, post, "fedavg", NAMES, lambda said: post.away.clear() if "Round 2:" in said else None, more)
    assert met_in(tmp_path)["0"]["samples"] == 1
    assert recorded(tmp_path / "training").numbers.accepted[:, 0].tolist() == [False, False, True, True]
