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
from descant.config import Recipe, read_recipe
from descant.core import seeds
from descant.core.timeouts import WaitLimits
from descant.deployment.flower.flower_connection import PeerUnavailable
from descant.deployment.server import HandshakeTransport
from descant.deployment.server.training_session import TrainingSession
from descant.deployment.silo import SiloFile, TaskHandler
from descant.deployment.silo.silo_state import SiloState
from descant.engines import remote
from descant.engines.remote import UndeliveredError
from descant.models.flat import Net
from descant.serialization.references import address_of
from descant.serialization.wire import MessageBytes
from descant.storage import atomic
from descant.tracking import read_run as recorded
from recipe_matrix import SILO_CASES
from silo_file_templates import simulated_population
from test_server_silo_protocol import InMemoryTransport, SimulatedKill, silo_handlers
from write_faults import SimulatedCrash, write_half

NAMES = ("0", "1", "2")
ROUNDS = 3
KILLS = 5
METHODS = ("FedAvg", "FedAvgPlus", "RFA", "matching", "FedRep", "Ditto", "FedRL, DQN", "FedGeoMedPlus, desks")


class Fate:
    """Decides at each point whether somebody dies there, and who: whoever is at work."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.kills = 0
        self.working = ""
        self.dead = False
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
            raise PeerUnavailable(self.told[-1])
        if when == "after":
            change(*arguments)
        elif when == "in":
            write_half(change, arguments)
        self.dead = True
        raise self._death()

    def _death(self) -> BaseException:
        return SimulatedKill() if self.working else SimulatedCrash()


class Mortal(InMemoryTransport):
    """Desks that live on from letter to letter until they are killed; then they come again, and have another mark."""

    def __init__(self, makers: dict[str, Callable[[], TaskHandler]], fate: Fate) -> None:
        super().__init__({name: lambda name=name: self._desk(name) for name in makers})  # type: ignore[misc]
        self.makers = makers
        self.fate = fate
        self.alive = dict[str, TaskHandler]()
        self.came = 0

    def _desk(self, name: str) -> TaskHandler:
        if name not in self.alive:
            self.alive[name] = self.makers[name]()
        return self.alive[name]

    def send(self, party: str, payload: bytes, ttl: float) -> str:
        return str(self.fate("a letter is sent", super().send, party, payload, ttl))

    def fetch_replies(self, message_ids: Collection[str], max_bytes: int) -> dict[str, MessageBytes | UndeliveredError]:
        found: dict[str, MessageBytes | UndeliveredError] = self.fate(
            "answers are fetched", self._fetched, message_ids, max_bytes
        )
        return found

    def _fetched(self, numbers: Collection[str], most: int) -> dict[str, MessageBytes | UndeliveredError]:
        return {number: answer for one in numbers for number, answer in self._answered(one, most).items()}

    def _answered(self, number: str, most: int) -> dict[str, MessageBytes | UndeliveredError]:
        party = self.messages.get(number, ("",))[0]
        self.fate.working = party
        try:
            return dict(self.fate("a letter is answered", super().fetch_replies, [number], most)) if party else {}
        except SimulatedKill:
            self.fate.dead = False
            self.alive.pop(party, None)
            self.messages.pop(number, None)
            self.came += 1
            self.session_ids[party] = f"{self.came} times"
            return {}
        finally:
            self.fate.working = ""

    def left_over(self) -> None:
        """Letters of a driver that is gone are answered, and nobody hears of it; or they are gone with it."""
        if self.fate.draw.random() < 0.5:
            self._fetched(tuple(self.messages), 2**30)
        self.messages.clear()


def recipe(name: str) -> Recipe:
    return read_recipe(f"[run]\nseed = 5\nrounds = {ROUNDS}\npoints = {ROUNDS}\n" + SILO_CASES[name].recipe_text)


def trained(folder: Path, chosen: Recipe, post: InMemoryTransport) -> dict[str, Any]:
    """As `descant server start` does it."""
    net = Net.from_model(chosen.model(), seeds.torch_seed(5, 0, seeds.ALL_PARTIES, "model"))
    loss = address_of(torch.nn.functional.cross_entropy)
    meeting = HandshakeTransport(post, chosen, "lab", net=net, loss=loss, log=len)
    patience = WaitLimits(min_parties=len(NAMES), grace=0)
    return TrainingSession(folder, chosen, meeting, limits=patience, log=len).run_to_completion(lambda: NAMES)


def disturbed(folder: Path, name: str, seed: int) -> Fate:
    """A training in which the same command is given again after each death of the driver."""
    fate = Fate(seed)
    post = Mortal(silo_handlers(folder / "silos", NAMES, silo_file_template=SILO_CASES[name].silo_file_template), fate)
    atomic.make_folder(folder / "run")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(atomic, "_do", fate.write)
        while True:
            try:
                trained(folder / "run", recipe(name), post)
                return fate
            except (SimulatedCrash, PeerUnavailable):
                fate.dead = False
                post.left_over()


def simulated(name: str, folder: Path) -> tuple[Federation, dict[str, np.ndarray]]:
    """The same without any machines, and its scores of every round."""
    people = simulated_population([SiloFile(folder / "silos" / f"team{party}.py", party) for party in NAMES])
    chosen = recipe(name)
    fed = Federation(chosen.model(), people, chosen.algorithm(), solver=chosen.solver(), seed=5)
    scores = [round.scores for round in fed.rounds(ROUNDS)]
    return fed, {
        "personal": np.stack([one.personal.values for one in scores]),
        "global_model": np.stack([one.global_model.values for one in scores]),
    }


def alike(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name


def same(folder: Path, name: str) -> None:
    """What driver and silos have on their disks is what the simulation came to."""
    twin, scores = simulated(name, folder)
    found = recorded(folder / "run" / "training")
    assert found.state == "finished" and found.numbers.rounds.tolist() == list(range(1, ROUNDS + 1))
    assert found.numbers.accepted.all() and not [event for event in found.events if event["event"] == "rejected"]
    for column, values in scores.items():
        np.testing.assert_array_equal(found.numbers.scores[column], values, column)
    [center] = (folder / "run" / "training" / "models" / f"{ROUNDS:08}").glob("center*")
    assert torch.equal(load_file(center)["global_model"], twin.state.global_model)
    for party in NAMES:
        state = folder / "silos" / f"at-{party}"
        alike(load_file(state / "personal_model.safetensors"), twin.models_[party].state_dict())
        alike(SiloState(state).load_party_state(ROUNDS), twin.engine_.party_states.get(party))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is waited for: a process that is killed, unlike a machine, loses nothing that was written."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(remote, "_MIN_POLL", 0.0005)
    monkeypatch.setattr(remote, "_MAX_POLL", 0.001)


@pytest.mark.parametrize("seed", range(64))
def test_a_training_with_random_kills_equals_the_simulation(tmp_path: Path, seed: int) -> None:
    name = METHODS[seed % len(METHODS)]
    fate = disturbed(tmp_path, name, seed)
    print(*fate.told, sep="\n")  # it is shown if this fails
    assert fate.kills >= 3
    same(tmp_path, name)
