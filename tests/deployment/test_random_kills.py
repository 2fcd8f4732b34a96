"""Random kills of driver, silos and SuperLink, several per training: the result stays the simulation.

The kill points are every write (before, during, after) and every task that is sent, fetched or answered.
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
from descant.tracking import read_run
from recipe_matrix import SILO_CASES
from silo_file_templates import simulated_population
from test_deployment_in_memory import InMemoryTransport, SimulatedKill, silo_handlers
from write_faults import SimulatedCrash, write_half

NAMES = ("0", "1", "2")
ROUNDS = 3
KILLS = 5
METHODS = ("FedAvg", "FedAvgPlus", "RFA", "matching", "FedRep", "Ditto", "FedRL, DQN", "FedGeoMedPlus, desks")


class KillSchedule:
    """Decides at each kill point whether the working process dies there."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.kills = 0
        self.working = ""
        self.dead = False
        self.log: list[str] = []
        self._next()

    def _next(self) -> None:
        self.left = self.draw.randrange(1, 170) if self.kills < KILLS else -1

    def write(self, change: Callable[..., Any], *arguments: Any) -> Any:
        """Replace `atomic._do`."""
        return self("a write", change, *arguments)

    def __call__(self, what: str, change: Callable[..., Any], *arguments: Any) -> Any:
        if self.dead:  # a dead process does nothing more
            raise self._death()
        self.left -= 1
        if self.left:
            return change(*arguments)
        self.kills += 1
        self._next()
        when = self.draw.choice(("before", "in", "after"))
        self.log.append(f"{self.working or 'the driver'} died {when} {what}")
        if what != "a write" and not self.working and self.draw.random() < 0.4:
            self.log[-1] = f"the SuperLink died before {what}"
            raise PeerUnavailable(self.log[-1])
        if when == "after":
            change(*arguments)
        elif when == "in":
            write_half(change, arguments)
        self.dead = True
        raise self._death()

    def _death(self) -> BaseException:
        return SimulatedKill() if self.working else SimulatedCrash()


class KillingTransport(InMemoryTransport):
    """A transport whose handlers live until they are killed; then they return with a new session id."""

    def __init__(self, makers: dict[str, Callable[[], TaskHandler]], schedule: KillSchedule) -> None:
        super().__init__({name: lambda name=name: self._handler(name) for name in makers})  # type: ignore[misc]
        self.makers = makers
        self.schedule = schedule
        self.live_handlers = dict[str, TaskHandler]()
        self.restarts = 0

    def _handler(self, name: str) -> TaskHandler:
        if name not in self.live_handlers:
            self.live_handlers[name] = self.makers[name]()
        return self.live_handlers[name]

    def send(self, party: str, payload: bytes, ttl: float) -> str:
        return str(self.schedule("a task is sent", super().send, party, payload, ttl))

    def fetch_replies(self, message_ids: Collection[str], max_bytes: int) -> dict[str, MessageBytes | UndeliveredError]:
        found: dict[str, MessageBytes | UndeliveredError] = self.schedule(
            "replies are fetched", self._fetch, message_ids, max_bytes
        )
        return found

    def _fetch(self, numbers: Collection[str], most: int) -> dict[str, MessageBytes | UndeliveredError]:
        return {number: answer for one in numbers for number, answer in self._fetch_one(one, most).items()}

    def _fetch_one(self, number: str, most: int) -> dict[str, MessageBytes | UndeliveredError]:
        party = self.messages.get(number, ("",))[0]
        self.schedule.working = party
        try:
            return dict(self.schedule("a task is answered", super().fetch_replies, [number], most)) if party else {}
        except SimulatedKill:
            self.schedule.dead = False
            self.live_handlers.pop(party, None)
            self.messages.pop(number, None)
            self.restarts += 1
            self.session_ids[party] = f"{self.restarts} times"
            return {}
        finally:
            self.schedule.working = ""

    def discard_orphans(self) -> None:
        """Drop the tasks of a dead driver, or have them answered without a receiver."""
        if self.schedule.draw.random() < 0.5:
            self._fetch(tuple(self.messages), 2**30)
        self.messages.clear()


def make_recipe(name: str) -> Recipe:
    return read_recipe(f"[run]\nseed = 5\nrounds = {ROUNDS}\npoints = {ROUNDS}\n" + SILO_CASES[name].recipe_text)


def run_training(folder: Path, recipe: Recipe, transport: InMemoryTransport) -> dict[str, Any]:
    """Run a training as `descant server start` does."""
    net = Net.from_model(recipe.model(), seeds.torch_seed(5, 0, seeds.ALL_PARTIES, "model"))
    loss = address_of(torch.nn.functional.cross_entropy)
    handshakes = HandshakeTransport(transport, recipe, "lab", net=net, loss=loss, log=len)
    limits = WaitLimits(min_parties=len(NAMES), grace=0)
    return TrainingSession(folder, recipe, handshakes, limits=limits, log=len).run_to_completion(lambda: NAMES)


def run_with_kills(folder: Path, name: str, seed: int) -> KillSchedule:
    """Run a training; repeat the same command after each kill of the driver."""
    schedule = KillSchedule(seed)
    transport = KillingTransport(
        silo_handlers(folder / "silos", NAMES, silo_file_template=SILO_CASES[name].silo_file_template), schedule
    )
    atomic.make_folder(folder / "run")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(atomic, "_do", schedule.write)
        while True:
            try:
                run_training(folder / "run", make_recipe(name), transport)
                return schedule
            except (SimulatedCrash, PeerUnavailable):
                schedule.dead = False
                transport.discard_orphans()


def simulate(name: str, folder: Path) -> tuple[Federation, dict[str, np.ndarray]]:
    """Return the simulation of a training, and its scores in every round."""
    population = simulated_population([SiloFile(folder / "silos" / f"team{party}.py", party) for party in NAMES])
    recipe = make_recipe(name)
    fed = Federation(recipe.model(), population, recipe.algorithm(), solver=recipe.solver(), seed=5)
    scores = [round.scores for round in fed.rounds(ROUNDS)]
    return fed, {
        "personal": np.stack([one.personal.values for one in scores]),
        "global_model": np.stack([one.global_model.values for one in scores]),
    }


def assert_equal_tensors(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name


def assert_equals_simulation(folder: Path, name: str) -> None:
    """Assert that the files of driver and silos equal the simulation."""
    twin, scores = simulate(name, folder)
    found = read_run(folder / "run" / "training")
    assert found.state == "finished" and found.numbers.rounds.tolist() == list(range(1, ROUNDS + 1))
    assert found.numbers.accepted.all() and not [event for event in found.events if event["event"] == "rejected"]
    for column, values in scores.items():
        np.testing.assert_array_equal(found.numbers.scores[column], values, column)
    [center] = (folder / "run" / "training" / "models" / f"{ROUNDS:08}").glob("global_model*")
    assert torch.equal(load_file(center)["global_model"], twin.state.global_model)
    for party in NAMES:
        state = folder / "silos" / f"at-{party}"
        assert_equal_tensors(load_file(state / "personal_model.safetensors"), twin.models_[party].state_dict())
        assert_equal_tensors(SiloState(state).load_party_state(ROUNDS), twin.engine_.party_states.get(party))


@pytest.fixture(autouse=True)
def fast_io(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip fsync and long polls: a killed process, unlike a machine, loses nothing that was written."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(remote, "_MIN_POLL", 0.0005)
    monkeypatch.setattr(remote, "_MAX_POLL", 0.001)


@pytest.mark.parametrize("seed", range(64))
def test_a_training_with_random_kills_equals_the_simulation(tmp_path: Path, seed: int) -> None:
    name = METHODS[seed % len(METHODS)]
    schedule = run_with_kills(tmp_path, name, seed)
    print(*schedule.log, sep="\n")  # shown if the test fails
    assert schedule.kills >= 3
    assert_equals_simulation(tmp_path, name)
