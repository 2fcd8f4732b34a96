"""Environments that fail: in step, now and then, or in what they give; the agent is named, and comes back."""

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
    """Twenty steps a time; at its seventh step it breaks in a share of the episodes."""

    def __init__(self, share: float = 0.0) -> None:
        self.share = share
        self.t = 0
        self.steps = 0
        self.observation_space = spaces.Box(-2, 2, (4,))
        self.action_space = spaces.Discrete(2)

    def reset(self, **keywords: Any) -> Any:
        super().reset(**keywords)
        self.t, self.doomed = 0, self.np_random.random() < self.share
        return self._seen(), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        if self.doomed and self.t == 7:
            raise ValueError("the motor is on fire")
        return self._seen(), float(self.np_random.random()), self.t == 20, False, {}

    def _seen(self) -> Any:
        return np.append(self.np_random.random(3), self.t / 10).astype(np.float32)


gymnasium.register("Frail-v0", entry_point=Frail, disable_env_checker=True, order_enforce=False)


def made(solver: Any, share: float, count: int = 1, **rest: Any) -> Federation:
    people = partial(parties.agents, "Frail-v0", count=count, options={"share": share}, test_episodes=0)
    return Federation(NET, people, algorithms.FedRL(), solver=solver, **rest)


def fitted(fed: Federation, rounds: int) -> Federation:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DescantWarning)
        return fed.fit(rounds, progress=False)


def attended(fed: Federation) -> list[int]:
    found: list[int] = fed.state.rounds_trained(fed.plan_).tolist()
    return found


@pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)
@pytest.mark.parametrize(("share", "count"), [(1.0, 1), (0.5, 3)])
def test_going_on_after_a_failure_is_what_resuming_is(solver: Any, share: float, count: int, tmp_path: Path) -> None:
    whole = fitted(made(solver, share, count), 4)
    for rounds in (1, 2, 3):
        fitted(made(solver, share, count), rounds).save(tmp_path / f"{rounds}")
        assert fitted(made(solver, share, count).load(tmp_path / f"{rounds}"), 4 - rounds).hash() == whole.hash()


@pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)
def test_a_failure_in_a_stack_changes_no_other_agent_and_no_cut_changes_it(solver: Any) -> None:
    hashes = {
        fitted(made(solver, 0.3, 4, engine=engine), 4).hash()
        for engine in (InProcess, partial(BytesEngine, batch_count=2))
    }
    assert hashes == {fitted(made(solver, 0.3, 4, engine=partial(InProcess, max_parties=1)), 4).hash()}


@pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)
def test_who_fails_now_and_then_is_named_and_comes_back(solver: Any) -> None:
    """One episode in five fails: what is refused today is tried in other episodes, today and in the next round."""
    fed = fitted(made(solver, 0.2, 6), 15)
    assert min(attended(fed)) >= 5 and sum(attended(fed)) >= 60
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        made(solver, 0.5, 3).fit(4, progress=False)
    assert any(re.search(r"of agent '\d' failed in step.*went on in other episodes", str(one.message)) for one in told)
    assert attended(fitted(made(solver, 0.0, 3), 3)) == [3, 3, 3]


def test_who_always_fails_is_refused_and_named() -> None:
    fed = fitted(made(Dqn(steps=30, learning_starts=3, batch=4), 1.0, 2), 3)
    assert attended(fed) == [0, 0] and len(fed.rejections_) == 6
    assert "The environment Frail-v0 of agent '0' failed in step: ValueError: the motor" in fed.rejections_[0].reason


def test_an_episode_that_is_left_is_broken_off_in_the_replay() -> None:
    """No reward of the next episode is counted for a step of the one that failed."""
    fed = fitted(made(DQN, 1.0), 2)
    log = fed.engine_.party_states.get("0")["log.replay"]
    assert log[:, -1].tolist() == [0] * 5 + [1] + [0] * 6 and not log[:, -2].any()
    assert torch.equal(fed.engine_.party_states.get("0")["agent.environment"][:6], log[6:, -4].long())


# ── what they give ────────────────────────────────────────────────────────────────────────────────────────────────────


class Wrong(gymnasium.Env[Any, Any]):
    """It gives what no environment may give."""

    def __init__(self, fault: str) -> None:
        self.fault = fault
        self.restarts = 0
        self.observation_space = spaces.Box(-2, 2, (4,))
        self.action_space = spaces.Discrete(2)

    def reset(self, **keywords: Any) -> Any:
        self.restarts += 1
        return np.full(4, self.restarts if self.fault == "fickle" else 0.0), {}

    def step(self, action: Any) -> Any:
        seen = np.zeros(3 if self.fault == "shape" else 4)
        reward = {"none": None, "text": "much"}.get(self.fault, 1.0)
        return (seen, reward, False, {}) if self.fault == "old" else (seen, reward, False, False, {})


gymnasium.register("Wrong-v0", entry_point=Wrong, disable_env_checker=True, order_enforce=False)


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("none", r"gave the reward None: it must be a finite number \(after 1 steps"),
        ("text", r"gave the reward 'much': it must be a finite number"),
        ("shape", r"gave an observation that is not in its Box.*cannot reshape array of size 3"),
        ("old", r"gave in step 4 things, where gymnasium has 5"),
    ],
)
def test_what_no_environment_may_give_is_told_with_the_agent_and_the_step(fault: str, told: str) -> None:
    people = parties.agents("Wrong-v0", count=2, options={"fault": fault}, test_episodes=0)
    fed = fitted(Federation(NET, people, algorithms.FedRL(), solver=DQN), 1)
    assert re.search(f"The environment Wrong-v0 of agent '0' {told}", fed.rejections_[0].reason)


def test_an_environment_that_does_not_do_the_same_again_is_noticed() -> None:
    world = parties.agents("Wrong-v0", count=1, options={"fault": "fickle"})["0"].world
    here, there = (world.beside([world], "a") for _ in range(2))
    here.begin(0, 5)
    there.restore(0, 5, here.state(0))
    here.begin(0, 5)
    here.begin(0, 5)
    with pytest.raises(PartyError, match="shows other things than before, though seeded and acted in the same"):
        there.restore(0, 6, here.state(0))


def test_environments_are_made_once_and_closed() -> None:
    made = []
    closed = []

    class Counted(Frail):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

        def close(self) -> None:
            closed.append(self)

    gymnasium.register("Counted-v0", entry_point=Counted, disable_env_checker=True, order_enforce=False)
    wide = partial(models.mlp, 4, 2, (600, 600))  # one at a time fills the cache: every agent is a stack
    people = parties.agents("Counted-v0", count=3, test_episodes=2)
    fed = Federation(wide, people, algorithms.FedRL(), solver=DQN).fit(1, progress=False)
    fed.scores()
    once = len(made)
    fed.fit(2, progress=False).scores()
    assert len(made) == once and len(closed) == 1  # the one that was asked for its form
    del fed, people
    gc.collect()
    assert len(closed) == len(made)
