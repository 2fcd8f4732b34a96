"""Deep Q-learning and policy gradients as a textbook has them, one agent in plain torch, beside those of a federation.

They make the "locally trained model" of FedRL's Algorithm 1. The draws are the same (they have names), the rest is
written anew: replay, n steps, targets, advantages, optimiser. And every setting of a solver changes what is learned.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn import functional

from descant import Dqn, Federation, PolicyGradient, algorithms, models, parties
from descant.core import seeds
from descant.training.agent_training import MAX_EPISODE_STEPS
from descant.training.stacked_forward import KeyedUniform


class Short(gymnasium.Env[Any, Any]):
    """A walk: it may end at any step, and is broken off after nine; rewards differ, and some are large."""

    def __init__(self) -> None:
        self.observation_space = spaces.Box(-9, 9, (4,))
        self.action_space = spaces.Discrete(2)

    def reset(self, **keywords: Any) -> Any:
        super().reset(**keywords)
        self.t, self.at = 0, self.np_random.normal(size=4).astype(np.float32)
        return self.at, {}

    def step(self, action: Any) -> Any:
        self.t += 1
        self.at = (0.8 * self.at + self.np_random.normal(size=4) * (0.5 + action)).astype(np.float32)
        reward = float(self.at[0] + action + 3 * (self.t == 5))
        return self.at, reward, bool(self.np_random.random() < 0.08), self.t == 9, {}


gymnasium.register("Short-v0", entry_point=Short, disable_env_checker=True, order_enforce=False)

DQN = Dqn(
    steps=60,
    lr=1e-3,
    batch=16,
    gamma=0.9,
    n_step=3,
    train_every=2,
    gradient_steps=2,
    learning_starts=20,
    buffer_size=70,
    target_every=7,
    tau=0.5,
    epsilon_start=0.9,
    epsilon_end=0.3,
    epsilon_steps=50,
    huber_delta=1.5,
    max_grad_norm=1.0,
)
PG = PolicyGradient(
    iterations=2,
    episodes=6,
    gradient_steps=5,
    batch=16,
    gamma=0.9,
    gae_lambda=0.8,
    entropy_coefficient=0.05,
    value_coefficient=0.5,
)
PG = replace(PG, lr=0.02, clip_ratio=0.1)


def made(solver: Any, algorithm: Any = None, outputs: int = 2, count: int = 1) -> Federation:
    people = parties.agents("Short-v0", count=count, test_episodes=0)
    net = partial(models.mlp, 4, outputs, (8,))
    return Federation(net, people, algorithm or algorithms.Local(), solver=solver, seed=5)


def row(module: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(module.parameters()).detach()


def first(fed: Federation) -> nn.Module:
    return fed.plan_.net.module_from_row(fed.state.initial_model)


def step_down(module: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor, most: float) -> None:
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    norm = torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None]).norm()
    for parameter in module.parameters():
        assert parameter.grad is not None
        parameter.grad *= min(1.0, most / float(norm))
    optimizer.step()


# ── deep Q-learning ───────────────────────────────────────────────────────────────────────────────────────────────────


class Textbook:
    """One agent that learns as Mnih et al. (2015) and van Hasselt et al. (2016) say."""

    def __init__(self, solver: Dqn, q: nn.Module) -> None:
        self.solver = solver
        self.q = q
        self.target = copy.deepcopy(q)
        self.env = Short()
        self.optimizer = torch.optim.Adam(q.parameters(), lr=solver.lr)
        self.rows: list[tuple[Any, int, float, Any, bool, bool]] = []
        self.act, self.batch = (
            KeyedUniform(5, ["0"], name, shape=(n,)) for name, n in (("act", 2), ("batch", solver.batch))
        )
        self.episode = 0
        self.updates = 0
        self.broken_off = 0
        self.begin()

    def begin(self) -> None:
        self.seen, _ = self.env.reset(seed=seeds.stream_key(5, self.episode, "0", "episode") % 2**31)

    def live(self, steps: int) -> None:
        s = self.solver
        for t in range(steps):
            chance, which = self.act[t][0]
            with torch.no_grad():
                action = int(self.q(torch.as_tensor(self.seen)[None])[0].argmax())
            share = min(1.0, t / s.epsilon_steps)
            if chance < (1 - share) * s.epsilon_start + share * s.epsilon_end:
                action = int(which * 2)
            after, reward, terminated, truncated, _ = self.env.step(action)
            self.rows.append((self.seen, action, reward, after, terminated, terminated or truncated))
            self.rows = self.rows[-s.buffer_size :]
            self.seen = after
            if terminated or truncated:
                self.broken_off += truncated and not terminated
                self.episode += 1
                self.begin()
            if t + 1 >= s.learning_starts and (t + 1) % s.train_every == 0:
                for number in range(s.gradient_steps):
                    self.learn(((t + 1) // s.train_every - 1) * s.gradient_steps + number)

    def learn(self, number: int) -> None:
        s = self.solver
        losses = []
        for place in self.batch[number][0]:
            at = int(place * len(self.rows))
            told = 0.0
            power = 1.0
            for i in range(at, min(at + s.n_step, len(self.rows))):
                told = told + power * self.rows[i][2]
                power = power * s.gamma
                last = self.rows[i]
                if last[5]:
                    break
            after = torch.as_tensor(last[3])[None]
            with torch.no_grad():
                best = (self.q if s.double_q else self.target)(after).argmax(1)
                goal = told + power * (not last[4]) * self.target(after)[0, best]
            chosen = self.q(torch.as_tensor(self.rows[at][0])[None])[0, self.rows[at][1]]
            losses.append(functional.huber_loss(chosen, goal[0], delta=s.huber_delta))
        step_down(self.q, self.optimizer, torch.stack(losses).mean(), s.max_grad_norm)
        if (number + 1) % s.target_every == 0:
            for mine, theirs in zip(self.target.parameters(), self.q.parameters(), strict=True):
                mine.data.lerp_(theirs.data, s.tau)


@pytest.mark.parametrize("solver", [DQN, replace(DQN, double_q=False, n_step=1, tau=1.0)], ids=["double_q", "plain"])
def test_deep_q_learning_is_the_textbooks(solver: Dqn) -> None:
    fed = made(solver)
    textbook = Textbook(solver, first(fed))
    textbook.live(2 * solver.steps)
    assert textbook.broken_off > 3 and textbook.episode > textbook.broken_off, (
        "both ends of an episode were learned from"
    )
    fed.fit(2, progress=False)
    memory = fed.engine_.party_states.get("0")
    torch.testing.assert_close(row(fed.models_["0"]), row(textbook.q), rtol=0, atol=1e-5)
    torch.testing.assert_close(memory["agent.target_network"], row(textbook.target), rtol=0, atol=1e-5)
    assert memory["agent.progress"][:2].tolist() == [120, textbook.episode]


# ── policy gradient ───────────────────────────────────────────────────────────────────────────────────────────────────


def played(solver: PolicyGradient, net: nn.Module, iteration: int) -> tuple[list[Tensor], int]:
    """What one agent did, step by step: what it saw, its action, advantage, log-probability and return."""
    env = Short()
    act = KeyedUniform(5, ["0"], "act", shape=(solver.episodes,))
    critic = 0
    columns: list[list[Any]] = [[], [], [], [], []]
    broken_off = 0
    for e in range(solver.episodes):
        seen, _ = env.reset(seed=seeds.stream_key(5, iteration * solver.episodes + e, "0", "episode") % 2**31)
        steps = []
        over = False
        cut = False
        while not (over or cut):
            with torch.no_grad():
                told = net(torch.as_tensor(seen)[None])[0]
            chances = functional.log_softmax(told[:2], 0)
            critic = len(told) - 2
            action = int(act[iteration * MAX_EPISODE_STEPS + len(steps)][0, e] >= float(chances[0].exp()))
            after, reward, over, cut, _ = env.step(action)
            steps.append((seen, action, float(chances[action]), float(told[2]) if critic else 0.0, reward))
            seen = after
        broken_off += cut and not over
        with torch.no_grad():
            value = float(net(torch.as_tensor(seen)[None])[0, 2]) if critic and not over else 0.0
        advantage = 0.0
        trace = solver.gae_lambda if critic else 1.0
        mine = []
        for before, action, chance, expected, reward in reversed(steps):
            advantage = reward + solver.gamma * value - expected + solver.gamma * trace * advantage
            mine.append((before, action, advantage, chance, advantage + expected))
            value = expected
        for step in reversed(mine):
            for column, one in zip(columns, step, strict=True):
                column.append(one)
    found = [torch.tensor(np.array(column)) for column in columns]
    if solver.normalize_advantages:
        found[2] = (found[2] - found[2].mean()) / (found[2].std(correction=0) + 1e-8)
    return found, broken_off


@pytest.mark.parametrize("outputs", [2, 3], ids=["actor", "actor and critic"])
@pytest.mark.parametrize(
    "changes", [{}, {"normalize_advantages": False, "max_grad_norm": 100.0, "clip_ratio": 10.0}], ids=["default", "plain"]
)
def test_a_policy_gradient_is_the_textbooks(outputs: int, changes: Mapping[str, Any]) -> None:
    solver = replace(PG, **changes)
    fed = made(solver, outputs=outputs)
    net = first(fed)
    optimizer = torch.optim.Adam(net.parameters(), lr=solver.lr)
    for iteration in range(2):
        (x, action, advantage, chance, goal), broken_off = played(solver, net, iteration)
        assert 0 < broken_off < solver.episodes, "both ends of an episode were learned from"
        rng = seeds.stream(5, iteration, "0", "batch")
        needed = solver.gradient_steps * solver.batch
        order = np.concatenate([rng.permutation(len(x)) for _ in range(-(-needed // len(x)))])[:needed]
        for at in torch.from_numpy(order).reshape(solver.gradient_steps, solver.batch):
            told = net(x[at])
            chances = functional.log_softmax(told[:, :2], 1)
            ratio = (chances.gather(1, action[at][:, None])[:, 0] - chance[at].float()).exp()
            gain = torch.minimum(
                ratio * advantage[at], ratio.clip(1 - solver.clip_ratio, 1 + solver.clip_ratio) * advantage[at]
            )
            loss = -gain.mean() + solver.entropy_coefficient * (chances.exp() * chances).sum(1).mean()
            if outputs == 3:
                loss = loss + 0.5 * solver.value_coefficient * (told[:, 2] - goal[at]).square().mean()
            step_down(net, optimizer, loss, solver.max_grad_norm)
    fed.fit(1, progress=False)
    torch.testing.assert_close(row(fed.models_["0"]), row(net), rtol=0, atol=1e-5)


# ── every setting counts ──────────────────────────────────────────────────────────────────────────────────────────────

OTHERWISE: dict[str, dict[str, Any]] = {
    "dqn": {
        "lr": 2e-3,
        "steps": 61,
        "batch": 17,
        "gamma": 0.8,
        "n_step": 2,
        "train_every": 3,
        "gradient_steps": 1,
        "learning_starts": 30,
        "buffer_size": 50,
        "target_every": 9,
        "tau": 0.9,
        "epsilon_start": 0.5,
        "epsilon_end": 0.0,
        "epsilon_steps": 200,
        "huber_delta": 0.1,
        "double_q": False,
        "max_grad_norm": 0.1,
        "optimizer": "SGD",
        "options": {"weight_decay": 0.1},
        "moments": "reset",
        "target_network": "keep",
    },
    "policy gradient": {
        "lr": 2e-3,
        "iterations": 3,
        "episodes": 5,
        "gradient_steps": 4,
        "batch": 17,
        "gamma": 0.8,
        "gae_lambda": 0.2,
        "clip_ratio": 0.01,
        "entropy_coefficient": 0.5,
        "value_coefficient": 0.1,
        "normalize_advantages": False,
        "max_grad_norm": 0.01,
        "optimizer": "SGD",
        "options": {"weight_decay": 0.1},
        "moments": "reset",
    },
}
SOLVERS = {"dqn": DQN, "policy gradient": PG}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, known in OTHERWISE.items() for name in known])
def test_every_setting_changes_what_is_learned(kind: str, name: str) -> None:
    def learned(solver: Any) -> Tensor:
        fed = made(solver, algorithms.FedRL(mode="shift"), 3 if kind != "dqn" else 2, count=2).fit(3, progress=False)
        return row(fed.models_["0"])

    other = OTHERWISE[kind][name]
    assert getattr(SOLVERS[kind], name) != other
    assert not torch.equal(learned(SOLVERS[kind]), learned(replace(SOLVERS[kind], **{name: other})))


def test_no_setting_is_left_out() -> None:
    for kind, solver in SOLVERS.items():
        assert {field.name for field in fields(solver)} == set(OTHERWISE[kind])


# ── what outlives a round ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", SOLVERS)
def test_moments_are_reset_where_merging_changed_the_model_and_only_there(kind: str) -> None:
    """Errata, row 37: an optimiser that begins anew counts its steps from 0; one whose model nobody touched goes on."""

    def steps(moments: Any, algorithm: Any) -> float:
        solver = replace(SOLVERS[kind], moments=moments)
        memory = made(solver, algorithm, count=2).fit(3, progress=False).engine_.party_states.get("0")
        (name,) = [name for name in memory if name.startswith("moment.") and name.endswith("step")]
        return float(memory[name].max())

    merged = algorithms.FedRL("uniform")
    of_a_round = 60 if kind == "dqn" else PG.iterations * PG.gradient_steps
    assert steps("reset", merged) == of_a_round
    assert steps("keep", merged) == steps("keep", algorithms.Local()) == steps("reset", algorithms.Local())
    assert steps("keep", merged) > 2 * of_a_round


def test_where_no_episode_ends_the_last_reward_is_the_one_that_is_known() -> None:
    """§3: "the average reward of an agent over that round"; without an episode that ended there is none (row 38)."""
    fed = made(Dqn(steps=4, learning_starts=1000))
    rewards = [scored.round.metrics["0"].get("reward") for scored in fed.rounds(12)]
    ended: list[list[float]] = [[] for _ in rewards]  # by round, the returns of the episodes that ended in it
    so_far = 0.0
    for at, (*_, reward, _, end) in enumerate(fed.engine_.party_states.get("0")["log.replay"].tolist()):
        so_far += reward
        if end:
            ended[at // 4].append(so_far)
            so_far = 0.0
    known: float | None = None
    for told, returns in zip(rewards, ended, strict=True):
        known = float(np.mean(returns)) if returns else known
        assert told is None if known is None else told == pytest.approx(known, rel=1e-5)
    assert rewards[0] is None and any(told and not returns for told, returns in zip(rewards, ended, strict=True))
