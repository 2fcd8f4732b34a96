"""Failing environments: in step, at random, or by invalid results; the agent is named and recovers."""

from __future__ import annotations

import gc
import re
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from bytes_engine import BytesEngine
from descant import DescantWarning, Dqn, Federation, PolicyGradient, algorithms, models, parties
from descant.engines import InProcess
from descant.errors import PartyError

NET = partial(models.mlp, 4, 2, (8,))
DQN = Dqn(steps=6, learning_starts=3, batch=4)
PG = PolicyGradient(episodes=2, gradient_steps=2, batch=8)
SOLVERS = {"dqn": DQN, "policy gradient": PG}


class Frail(gymnasium.Env[Any, Any]):
    """An environment of twenty steps per episode; a share of the episodes fails at the seventh step."""

    def __init__(self, share: float = 0.0) -> None:
        self.share = share
        self.t = 0
        self.steps = 0
        self.observation_space = spaces.Box(-2, 2, (4,))
        self.action_space = spaces.Discrete(2)

    def reset(self, **keywords: Any) -> Any:
        super().reset(**keywords)
        self.t = 0
        self.failing = self.np_random.random() < self.share
        return self._observe(), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        if self.failing and self.t == 7:
            raise ValueError("the motor is on fire")
        return self._observe(), float(self.np_random.random()), self.t == 20, False, {}

    def _observe(self) -> Any:
        return np.append(self.np_random.random(3), self.t / 10).astype(np.float32)


gymnasium.register("Frail-v0", entry_point=Frail, disable_env_checker=True, order_enforce=False)


def frail_federation(solver: Any, share: float, count: int = 1, **rest: Any) -> Federation:
    population = partial(parties.agents, "Frail-v0", count=count, options={"share": share}, test_episodes=0)
    return Federation(NET, population, algorithms.FedRL(), solver=solver, **rest)


def fit(fed: Federation, rounds: int) -> Federation:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DescantWarning)
        return fed.fit(rounds, progress=False)


def rounds_trained(fed: Federation) -> list[int]:
    counts: list[int] = fed.state.rounds_trained(fed.plan_).tolist()
    return counts


@pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)
@pytest.mark.parametrize(("share", "count"), [(1.0, 1), (0.5, 3)])
def test_continuing_after_a_failure_equals_resuming(solver: Any, share: float, count: int, tmp_path: Path) -> None:
    whole = fit(frail_federation(solver, share, count), 4)
    for rounds in (1, 2, 3):
        fit(frail_federation(solver, share, count), rounds).save(tmp_path / f"{rounds}")
        assert (
            fit(frail_federation(solver, share, count).load(tmp_path / f"{rounds}"), 4 - rounds).hash() == whole.hash()
        )


@pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)
def test_a_failure_changes_no_other_agent_and_does_not_depend_on_batches(solver: Any) -> None:
    hashes = {
        fit(frail_federation(solver, 0.3, 4, engine=engine), 4).hash()
        for engine in (InProcess, partial(BytesEngine, batch_count=2))
    }
    assert hashes == {fit(frail_federation(solver, 0.3, 4, engine=partial(InProcess, max_parties=1)), 4).hash()}


@pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)
def test_an_agent_that_fails_at_random_is_named_and_continues(solver: Any) -> None:
    """One episode in five fails: training continues in other episodes, in the same and in the next round."""
    fed = fit(frail_federation(solver, 0.2, 6), 15)
    assert min(rounds_trained(fed)) >= 5 and sum(rounds_trained(fed)) >= 60
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        frail_federation(solver, 0.5, 3).fit(4, progress=False)
    assert any(
        re.search(r"of agent '\d' failed in step.*continued in other episodes", str(one.message)) for one in caught
    )
    assert rounds_trained(fit(frail_federation(solver, 0.0, 3), 3)) == [3, 3, 3]


def test_an_agent_that_always_fails_is_rejected_and_named() -> None:
    fed = fit(frail_federation(Dqn(steps=30, learning_starts=3, batch=4), 1.0, 2), 3)
    assert rounds_trained(fed) == [0, 0] and len(fed.rejections_) == 6
    assert "The environment Frail-v0 of agent '0' failed in step: ValueError: the motor" in fed.rejections_[0].reason


def test_an_abandoned_episode_is_truncated_in_the_replay_buffer() -> None:
    """No reward of the next episode is counted for a step of the one that failed."""
    fed = fit(frail_federation(DQN, 1.0), 2)
    log = fed.engine_.party_states.get("0")["log.replay"]
    assert log[:, -1].tolist() == [0] * 5 + [1] + [0] * 6 and not log[:, -2].any()
    assert torch.equal(fed.engine_.party_states.get("0")["agent.environment"][:6], log[6:, -4].long())


class Wrong(gymnasium.Env[Any, Any]):
    """An environment with invalid results."""

    def __init__(self, fault: str) -> None:
        self.fault = fault
        self.restarts = 0
        self.observation_space = spaces.Box(-2, 2, (4,))
        self.action_space = spaces.Discrete(2)

    def reset(self, **keywords: Any) -> Any:
        self.restarts += 1
        return np.full(4, self.restarts if self.fault == "fickle" else 0.0), {}

    def step(self, action: Any) -> Any:
        observation = np.zeros(3 if self.fault == "shape" else 4)
        reward = {"none": None, "text": "much"}.get(self.fault, 1.0)
        if self.fault == "old":
            return observation, reward, False, {}
        return observation, reward, False, False, {}


gymnasium.register("Wrong-v0", entry_point=Wrong, disable_env_checker=True, order_enforce=False)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("none", r"gave the reward None: it must be a finite number \(after 1 steps"),
        ("text", r"gave the reward 'much': it must be a finite number"),
        ("shape", r"gave an observation that is not in its Box.*cannot reshape array of size 3"),
        ("old", r"returned from step 4 values; gymnasium returns 5"),
    ],
)
def test_invalid_results_are_reported_with_the_agent_and_the_step(fault: str, message: str) -> None:
    population = parties.agents("Wrong-v0", count=2, options={"fault": fault}, test_episodes=0)
    fed = fit(Federation(NET, population, algorithms.FedRL(), solver=DQN), 1)
    assert re.search(f"The environment Wrong-v0 of agent '0' {message}", fed.rejections_[0].reason)


def test_an_environment_that_is_not_deterministic_is_reported() -> None:
    environment: Any = parties.agents("Wrong-v0", count=1, options={"fault": "fickle"})["0"].environment
    original, copy = (environment.make_vector([environment], "a") for _ in range(2))
    original.reset(0, 5)
    copy.restore(0, 5, original.get_state(0))
    original.reset(0, 5)
    original.reset(0, 5)
    with pytest.raises(PartyError, match="is not deterministic: the same seed and actions gave different observations"):
        copy.restore(0, 6, original.get_state(0))


def test_environments_are_created_once_and_closed() -> None:
    created = []
    closed = []

    class Counted(Frail):
        def __init__(self) -> None:
            super().__init__()
            created.append(self)

        def close(self) -> None:
            closed.append(self)

    gymnasium.register("Counted-v0", entry_point=Counted, disable_env_checker=True, order_enforce=False)
    wide = partial(models.mlp, 4, 2, (600, 600))  # one agent fills the cache, so every agent is its own stack
    population = parties.agents("Counted-v0", count=3, test_episodes=2)
    fed = Federation(wide, population, algorithms.FedRL(), solver=DQN).fit(1, progress=False)
    fed.scores()
    once = len(created)
    fed.fit(2, progress=False).scores()
    assert len(created) == once and len(closed) == 1  # the one created to read its spaces
    del fed, population
    gc.collect()
    assert len(closed) == len(created)
