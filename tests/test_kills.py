"""Driver, silos and the SuperLink between them killed at random, several times a training: nothing comes of it.

The points are every write (before, in the middle of it, after it) and every letter that is sent, fetched or answered.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from descant import Federation
from descant.config import Recipe, read
from descant.core.algorithm import seeds
from descant.core.timeouts import Patience
from descant.deployment.flower.flower_connection import Away
from descant.deployment.server import Meeting
from descant.deployment.server.training_session import Training
from descant.deployment.silo import Desk, SiloFile
from descant.deployment.silo.silo_state import Keeping
from descant.engines import remote
from descant.engines.remote import Lost
from descant.models.flat import Net
from descant.serialization.references import address_of
from descant.serialization.wire import Letter
from descant.storage import atomic
from descant.tracking import read as recorded
from dying import Death, by_half
from teams import together
from test_letters import Killed, Post, desks
from ways import WAYS

NAMES = ("0", "1", "2")
ROUNDS = 3
KILLS = 5
METHODS = ("FedAvg", "FedAvgPlus", "RFA", "matching", "FedRep", "Ditto", "FedRL, DQN", "FedGeoMedPlus, desks")


class Fate:
    """Decides at each point whether somebody dies there, and who: whoever is at work."""

    def __init__(self, seed: int) -> None:
        self.draw, self.kills, self.working, self.dead = random.Random(seed), 0, "", False
        self.told: list[str] = []
        self._next()

    def _next(self) -> None:
        self.left = self.draw.randrange(1, 170) if self.kills < KILLS else -1

    def write(self, change: Callable[..., Any], *arguments: Any) -> Any:
        """In the place of `disk._do`."""
        return self("a write", change, *arguments)

    def __call__(self, what: str, change: Callable[..., Any], *arguments: Any) -> Any:
        if self.dead:  # nothing is done any more
            raise self._death()
        self.left -= 1
        if self.left:
            return change(*arguments)
        self.kills += 1
        self._next()
        when = self.draw.choice(("before", "in", "after"))
        self.told.append(f"{self.working or 'the driver'} died {when} {what}")
        if what != "a write" and not self.working and self.draw.random() < 0.4:
            self.told[-1] = f"the SuperLink died before {what}"
            raise Away(self.told[-1])
        if when == "after":
            change(*arguments)
        elif when == "in":
            by_half(change, arguments)
        self.dead = True
        raise self._death()

    def _death(self) -> BaseException:
        return Killed() if self.working else Death()


class Mortal(Post):
    """Desks that live on from letter to letter until they are killed; then they come again, and have another mark."""

    def __init__(self, makers: dict[str, Callable[[], Desk]], fate: Fate) -> None:
        super().__init__({name: lambda name=name: self._desk(name) for name in makers})  # type: ignore[misc]
        self.makers, self.fate, self.alive, self.came = makers, fate, dict[str, Desk](), 0

    def _desk(self, name: str) -> Desk:
        if name not in self.alive:
            self.alive[name] = self.makers[name]()
        return self.alive[name]

    def send(self, party: str, letter: bytes, seconds: float) -> str:
        return str(self.fate("a letter is sent", super().send, party, letter, seconds))

    def fetch(self, numbers: Collection[str], most: int) -> dict[str, Letter | Lost]:
        found: dict[str, Letter | Lost] = self.fate("answers are fetched", self._fetched, numbers, most)
        return found

    def _fetched(self, numbers: Collection[str], most: int) -> dict[str, Letter | Lost]:
        return {number: answer for one in numbers for number, answer in self._answered(one, most).items()}

    def _answered(self, number: str, most: int) -> dict[str, Letter | Lost]:
        party = self.letters.get(number, ("",))[0]
        self.fate.working = party
        try:
            return dict(self.fate("a letter is answered", super().fetch, [number], most)) if party else {}
        except Killed:
            self.fate.dead = False
            self.alive.pop(party, None)
            self.letters.pop(number, None)
            self.came += 1
            self.marks[party] = f"{self.came} times"
            return {}
        finally:
            self.fate.working = ""

    def left_over(self) -> None:
        """Letters of a driver that is gone are answered, and nobody hears of it; or they are gone with it."""
        if self.fate.draw.random() < 0.5:
            self._fetched(tuple(self.letters), 2**30)
        self.letters.clear()


def recipe(name: str) -> Recipe:
    return read(f"[run]\nseed = 5\nrounds = {ROUNDS}\npoints = {ROUNDS}\n" + WAYS[name].text)


def trained(folder: Path, chosen: Recipe, post: Post) -> dict[str, Any]:
    """As `descant server start` does it."""
    net = Net.made(chosen.model(), seeds.torch_seed(5, 0, seeds.EVERYBODY, "model"))
    loss = address_of(torch.nn.functional.cross_entropy)
    meeting = Meeting(post, chosen, "lab", net, loss, say=len)
    patience = Patience(gather=len(NAMES), farewell=0)
    return Training(folder, chosen, meeting, patience, len).until_done(lambda: NAMES)


def disturbed(folder: Path, name: str, seed: int) -> Fate:
    """A training in which the same command is given again after each death of the driver."""
    fate = Fate(seed)
    post = Mortal(desks(folder / "silos", NAMES, team=WAYS[name].team), fate)
    atomic.make(folder / "run")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(atomic, "_do", fate.write)
        while True:
            try:
                trained(folder / "run", recipe(name), post)
                return fate
            except (Death, Away):
                fate.dead = False
                post.left_over()


def simulated(name: str, folder: Path) -> tuple[Federation, dict[str, np.ndarray]]:
    """The same without any machines, and its scores of every round."""
    people = together([SiloFile(folder / "silos" / f"team{party}.py", party) for party in NAMES])
    chosen = recipe(name)
    fed = Federation(chosen.model(), people, chosen.algorithm(), solver=chosen.solver(), seed=5)
    scores = [round.scores for round in fed.rounds(ROUNDS)]
    return fed, {
        "own": np.stack([one.own.values for one in scores]),
        "center": np.stack([one.center.values for one in scores]),
    }


def alike(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name


def same(folder: Path, name: str) -> None:
    """What driver and silos have on their disks is what the simulation came to."""
    twin, scores = simulated(name, folder)
    found = recorded(folder / "run" / "training")
    assert found.state == "ended" and found.numbers.round.tolist() == list(range(1, ROUNDS + 1))
    assert found.numbers.accepted.all() and not [event for event in found.events if event["event"] == "refused"]
    for column, values in scores.items():
        np.testing.assert_array_equal(found.numbers.scores[column], values, column)
    [center] = (folder / "run" / "training" / "models" / f"{ROUNDS:08}").glob("center*")
    assert torch.equal(load_file(center)["center"], twin.state.center)
    for party in NAMES:
        state = folder / "silos" / f"at-{party}"
        alike(load_file(state / "own.safetensors"), twin.models_[party].state_dict())
        alike(Keeping(state).memory(ROUNDS), twin.engine_.memory.get(party))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is waited for: a process that is killed, unlike a machine, loses nothing that was written."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(remote, "_SHORTEST", 0.0005)
    monkeypatch.setattr(remote, "_LONGEST", 0.001)


@pytest.mark.parametrize("seed", range(64))
def test_whoever_is_killed_at_random_again_and_again_the_training_is_the_simulation(tmp_path: Path, seed: int) -> None:
    name = METHODS[seed % len(METHODS)]
    fate = disturbed(tmp_path, name, seed)
    print(*fate.told, sep="\n")  # it is shown if this fails
    assert fate.kills >= 3
    same(tmp_path, name)
