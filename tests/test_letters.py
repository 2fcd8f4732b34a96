"""Parties on machines of their own, without the machines: a post in memory, desks with folders, and what dies."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from descant import Federation
from descant.address import address_of
from descant.config import Recipe, read
from descant.core import Report, Task
from descant.engines.silos import Lost, Patience, Silos
from descant.parties import from_arrays
from descant.parties.elsewhere import elsewhere
from descant.piece import Plan
from descant.server import Meeting
from descant.silo import Desk, SiloFile
from descant.silo.worker import Worker
from descant.store import disk
from descant.wire import pack, unpack
from problems import classes, network

NAMES = ("0", "1", "2", "3")
TEAM = """
from problems import classes, network

def model():
    return network()

def data():
    party = classes(5)[{name!r}]
    return party.x, party.y, party.x[:3], party.y[:3]
"""
RECIPE = """
[run]
seed = 5
[parties]
population = "problems:classes"
[model]
net = "problems:network"
[work]
lr = 0.05
epochs = 1
batch = 4
optimizer = "Adam"
[method]
algorithm = "{method}"
"""


class Post:
    """Letters are answered when they are asked for, by desks that are made anew for every letter, as after a kill."""

    def __init__(self, desks: dict[str, Callable[[], Desk]]) -> None:
        self.desks, self.away = desks, set[str]()
        self.letters: dict[str, tuple[str, bytes]] = {}
        self.spoil: Callable[[Task, bytes], bytes | Lost | None] = lambda task, answer: answer
        self.count = 0

    def here(self) -> Collection[str]:
        return [name for name in self.desks if name not in self.away]

    def send(self, party: str, letter: bytes, seconds: float) -> str:
        if party in self.away:
            raise Lost("nobody is there")
        self.count += 1
        self.letters[str(self.count)] = (party, letter)
        return str(self.count)

    def fetch(self, numbers: Collection[str]) -> dict[str, bytes | Lost]:
        found: dict[str, bytes | Lost] = {}
        for number in numbers:
            party, letter = self.letters.pop(number, ("", b""))
            if party:
                answer = self.spoil(unpack(letter, Task), self.desks[party]().answer(letter))
                if answer is not None:
                    found[number] = answer
        return found


class Killed(BaseException):
    """What dies here does not tidy up behind itself."""


class Restarting(Post):
    """Desks that live on from letter to letter; one that is killed over a letter is made anew, and given it again."""

    def __init__(self, makers: dict[str, Callable[[], Desk]]) -> None:
        self.alive: dict[str, Desk] = {}
        super().__init__({name: partial(self._desk, name, make) for name, make in makers.items()})

    def _desk(self, name: str, make: Callable[[], Desk]) -> Desk:
        return self.alive.setdefault(name, make()) if name not in self.alive else self.alive[name]

    def fetch(self, numbers: Collection[str]) -> dict[str, bytes | Lost]:
        before = dict(self.letters)
        try:
            return super().fetch(numbers)
        except Killed:
            self.alive, self.letters = {}, before
            return super().fetch(numbers)


def desks(folder: Path, names: Collection[str] = NAMES) -> dict[str, Callable[[], Desk]]:
    folder.mkdir(exist_ok=True)
    found: dict[str, Callable[[], Desk]] = {}
    for name in names:
        file = folder / f"team{name}.py"
        file.write_text(TEAM.format(name=name))
        found[name] = lambda file=file, name=name: Desk(SiloFile(file, name), folder / f"at-{name}", lambda text: None)  # type: ignore[misc]
    return found


def recipe(method: str = "fedgeomed+") -> Recipe:
    return read(RECIPE.format(method=method))


def met(post: Post, chosen: Recipe, patience: Patience = Patience()) -> Federation:  # noqa: B008
    """A federation of whoever is there."""
    net = network()
    digest = Federation(
        lambda: net, classes(5), chosen.algorithm(), solver=chosen.solver(), seed=5
    )._plan.net.layout.digest
    loss = address_of(torch.nn.functional.cross_entropy)
    meeting = Meeting(post, chosen, "lab", digest, loss, say=lambda text: None)
    people = elsewhere(meeting.gather(len(post.here())))
    engine = Silos(meeting, patience, say=lambda text: None)
    return Federation(network, people, chosen.algorithm(), solver=chosen.solver(), seed=5, engine=engine)


def simulated(chosen: Recipe, rounds: int, names: Collection[str] = NAMES) -> Federation:
    people = from_arrays({name: (p.x, p.y, p.x[:3], p.y[:3]) for name, p in classes(5).subset(names).items()})
    return Federation(network, people, chosen.algorithm(), solver=chosen.solver(), seed=5).fit(rounds, progress=False)


def same(one: Federation, other: Federation, names: Collection[str] = NAMES) -> None:
    assert torch.equal(one.state.center, other.state.center)
    for name in names:
        mine, yours = (fed.state.own.get(name) for fed in (one, other))
        assert mine.keys() == yours.keys() and all(torch.equal(mine[key], yours[key]) for key in mine)


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "fedgeomed+", "fedavg+", "rfa"])
def test_deployment_is_the_simulation_bit_for_bit(tmp_path: Path, method: str) -> None:
    fed, twin = met(Post(desks(tmp_path)), recipe(method)).fit(3, progress=False), simulated(recipe(method), 3)
    same(fed, twin)
    np.testing.assert_array_equal(fed.scores().own.values, twin.scores().own.values)


def test_what_is_killed_at_any_moment_goes_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    """Desks die at each of their writes, in turn; they are asked again, and nothing differs."""
    two = NAMES[:2]
    twin, deaths = simulated(recipe(), 2, two), 0
    for at in range(200):
        left = [at]

        def dying(change: Callable[..., object], *arguments: object, left: list[int] = left) -> object:
            left[0] -= 1
            if left[0] == -1:
                raise Killed
            return change(*arguments)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(disk, "_do", dying)
            fed = met(Restarting(desks(tmp_path / str(at), two)), recipe()).fit(2, progress=False)
        same(fed, twin, two)
        if left[0] >= 0:
            break
        deaths += 1
    assert deaths > 50


SLY = """
import os, time
from problems import classes, network

def model():
    return network()

def data():
    party = classes(5)["0"]
    return party.x, party.y

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
    ],
    ids=["raises", "exits", "is killed", "hangs"],
)
def test_what_a_teams_code_does_costs_it_one_round_and_shows_nothing(tmp_path: Path, does: str, told: str) -> None:
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
        assert unpack(worker.answer(pack(train)), Report).status == "ok"
    finally:
        worker.close()


def _rest() -> dict[str, object]:
    return {"solver": recipe().solver(), "loss": torch.nn.functional.cross_entropy, "metric": None}
