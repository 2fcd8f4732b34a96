"""Deep Q-learning and policy gradients of a federation compared with a textbook version of one agent in plain torch.

They produce the "locally trained model" of FedRL's Algorithm 1. The random draws are shared, since they are keyed; the
rest is written independently: replay, n-step returns, targets, advantages, optimizer. Every setting of a solver changes
the trained model.
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
from descant.training.agent_solver_helpers import MAX_EPISODE_STEPS
from descant.training.stacked_forward import KeyedUniform


class ShortWalk(gymnasium.Env[Any, Any]):
    """A random walk that may terminate at any step and is truncated after nine; some rewards are large."""

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


gymnasium.register("Short-v0", entry_point=ShortWalk, disable_env_checker=True, order_enforce=False)

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


def make_federation(solver: Any, algorithm: Any = None, outputs: int = 2, count: int = 1) -> Federation:
    population = parties.agents("Short-v0", count=count, test_episodes=0)
    net = partial(models.mlp, 4, outputs, (8,))
    return Federation(net, population, algorithm or algorithms.Local(), solver=solver, seed=5)


def parameter_vector(module: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(module.parameters()).detach()


def initial_module(fed: Federation) -> nn.Module:
    return fed.plan_.net.module_from_row(fed.state.initial_model)


def take_step(module: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor, max_norm: float) -> None:
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    norm = torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None]).norm()
    for parameter in module.parameters():
        assert parameter.grad is not None
        parameter.grad *= min(1.0, max_norm / float(norm))
    optimizer.step()


class TextbookDqn:
    """One agent trained as in Mnih et al. (2015) and van Hasselt et al. (2016)."""

    def __init__(self, solver: Dqn, q: nn.Module) -> None:
        self.solver = solver
        self.q = q
        self.target = copy.deepcopy(q)
        self.env = ShortWalk()
        self.optimizer = torch.optim.Adam(q.parameters(), lr=solver.lr)
        self.rows: list[tuple[Any, int, float, Any, bool, bool]] = []
        self.act, self.batch = (
            KeyedUniform(5, ["0"], name, shape=(n,)) for name, n in (("act", 2), ("batch", solver.batch))
        )
        self.episode = 0
        self.updates = 0
        self.truncated_count = 0
        self.begin_episode()

    def begin_episode(self) -> None:
        self.observation, _ = self.env.reset(seed=seeds.stream_key(5, self.episode, "0", "episode") % 2**31)

    def run(self, steps: int) -> None:
        s = self.solver
        for t in range(steps):
            explore_draw, action_draw = self.act[t][0]
            with torch.no_grad():
                action = int(self.q(torch.as_tensor(self.observation)[None])[0].argmax())
            share = min(1.0, t / s.epsilon_steps)
            if explore_draw < (1 - share) * s.epsilon_start + share * s.epsilon_end:
                action = int(action_draw * 2)
            after, reward, terminated, truncated, _ = self.env.step(action)
            self.rows.append((self.observation, action, reward, after, terminated, terminated or truncated))
            self.rows = self.rows[-s.buffer_size :]
            self.observation = after
            if terminated or truncated:
                self.truncated_count += truncated and not terminated
                self.episode += 1
                self.begin_episode()
            if t + 1 >= s.learning_starts and (t + 1) % s.train_every == 0:
                for number in range(s.gradient_steps):
                    self.learn(((t + 1) // s.train_every - 1) * s.gradient_steps + number)

    def learn(self, number: int) -> None:
        s = self.solver
        losses = []
        for position in self.batch[number][0]:
            at = int(position * len(self.rows))
            n_step_return = 0.0
            power = 1.0
            for i in range(at, min(at + s.n_step, len(self.rows))):
                n_step_return = n_step_return + power * self.rows[i][2]
                power = power * s.gamma
                last = self.rows[i]
                if last[5]:
                    break
            after = torch.as_tensor(last[3])[None]
            with torch.no_grad():
                best = (self.q if s.double_q else self.target)(after).argmax(1)
                target = n_step_return + power * (not last[4]) * self.target(after)[0, best]
            chosen = self.q(torch.as_tensor(self.rows[at][0])[None])[0, self.rows[at][1]]
            losses.append(functional.huber_loss(chosen, target[0], delta=s.huber_delta))
        take_step(self.q, self.optimizer, torch.stack(losses).mean(), s.max_grad_norm)
        if (number + 1) % s.target_every == 0:
            for parameter, source in zip(self.target.parameters(), self.q.parameters(), strict=True):
                parameter.data.lerp_(source.data, s.tau)


@pytest.mark.parametrize("solver", [DQN, replace(DQN, double_q=False, n_step=1, tau=1.0)], ids=["double_q", "plain"])
def test_deep_q_learning_matches_the_textbook(solver: Dqn) -> None:
    fed = make_federation(solver)
    textbook = TextbookDqn(solver, initial_module(fed))
    textbook.run(2 * solver.steps)
    assert textbook.truncated_count > 3 and textbook.episode > textbook.truncated_count, "both kinds of ends occur"
    fed.fit(2, progress=False)
    state = fed.engine_.party_states.get("0")
    torch.testing.assert_close(parameter_vector(fed.models_["0"]), parameter_vector(textbook.q), rtol=0, atol=1e-5)
    torch.testing.assert_close(state["agent.target_network"], parameter_vector(textbook.target), rtol=0, atol=1e-5)
    assert state["agent.progress"][:2].tolist() == [120, textbook.episode]


def play_episodes(solver: PolicyGradient, net: nn.Module, iteration: int) -> tuple[list[Tensor], int]:
    """Return columns of steps (observation, action, advantage, log-probability, return), and truncated episodes."""
    env = ShortWalk()
    act = KeyedUniform(5, ["0"], "act", shape=(solver.episodes,))
    critic = 0
    columns: list[list[Any]] = [[], [], [], [], []]
    truncated_count = 0
    for e in range(solver.episodes):
        observation, _ = env.reset(seed=seeds.stream_key(5, iteration * solver.episodes + e, "0", "episode") % 2**31)
        steps = []
        terminated = False
        truncated = False
        while not (terminated or truncated):
            with torch.no_grad():
                output = net(torch.as_tensor(observation)[None])[0]
            log_probabilities = functional.log_softmax(output[:2], 0)
            critic = len(output) - 2
            action = int(act[iteration * MAX_EPISODE_STEPS + len(steps)][0, e] >= float(log_probabilities[0].exp()))
            after, reward, terminated, truncated, _ = env.step(action)
            value = float(output[2]) if critic else 0.0
            steps.append((observation, action, float(log_probabilities[action]), value, reward))
            observation = after
        truncated_count += truncated and not terminated
        with torch.no_grad():
            value = float(net(torch.as_tensor(observation)[None])[0, 2]) if critic and not terminated else 0.0
        advantage = 0.0
        trace = solver.gae_lambda if critic else 1.0
        rows = []
        for before, action, log_probability, expected, reward in reversed(steps):
            advantage = reward + solver.gamma * value - expected + solver.gamma * trace * advantage
            rows.append((before, action, advantage, log_probability, advantage + expected))
            value = expected
        for step in reversed(rows):
            for column, value_of_step in zip(columns, step, strict=True):
                column.append(value_of_step)
    tensors = [torch.tensor(np.array(column)) for column in columns]
    if solver.normalize_advantages:
        tensors[2] = (tensors[2] - tensors[2].mean()) / (tensors[2].std(correction=0) + 1e-8)
    return tensors, truncated_count


@pytest.mark.parametrize("outputs", [2, 3], ids=["actor", "actor and critic"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"normalize_advantages": False, "max_grad_norm": 100.0, "clip_ratio": 10.0}],
    ids=["default", "plain"],
)
def test_policy_gradient_matches_the_textbook(outputs: int, changes: Mapping[str, Any]) -> None:
    solver = replace(PG, **changes)
    fed = make_federation(solver, outputs=outputs)
    net = initial_module(fed)
    optimizer = torch.optim.Adam(net.parameters(), lr=solver.lr)
    for iteration in range(2):
        (x, action, advantage, log_probability, target), truncated_count = play_episodes(solver, net, iteration)
        assert 0 < truncated_count < solver.episodes, "both kinds of ends occur"
        rng = seeds.stream(5, iteration, "0", "batch")
        needed = solver.gradient_steps * solver.batch
        order = np.concatenate([rng.permutation(len(x)) for _ in range(-(-needed // len(x)))])[:needed]
        for at in torch.from_numpy(order).reshape(solver.gradient_steps, solver.batch):
            output = net(x[at])
            new = functional.log_softmax(output[:, :2], 1)
            ratio = (new.gather(1, action[at][:, None])[:, 0] - log_probability[at].float()).exp()
            gain = torch.minimum(
                ratio * advantage[at], ratio.clip(1 - solver.clip_ratio, 1 + solver.clip_ratio) * advantage[at]
            )
            loss = -gain.mean() + solver.entropy_coefficient * (new.exp() * new).sum(1).mean()
            if outputs == 3:
                loss = loss + 0.5 * solver.value_coefficient * (output[:, 2] - target[at]).square().mean()
            take_step(net, optimizer, loss, solver.max_grad_norm)
    fed.fit(1, progress=False)
    torch.testing.assert_close(parameter_vector(fed.models_["0"]), parameter_vector(net), rtol=0, atol=1e-5)


OTHER_VALUES: dict[str, dict[str, Any]] = {
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
    "policy_gradient": {
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
SOLVERS = {"dqn": DQN, "policy_gradient": PG}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, values in OTHER_VALUES.items() for name in values])
def test_every_setting_changes_the_trained_model(kind: str, name: str) -> None:
    def trained(solver: Any) -> Tensor:
        fed = make_federation(solver, algorithms.FedRL(mode="shift"), 3 if kind != "dqn" else 2, count=2).fit(
            3, progress=False
        )
        return parameter_vector(fed.models_["0"])

    other = OTHER_VALUES[kind][name]
    assert getattr(SOLVERS[kind], name) != other
    assert not torch.equal(trained(SOLVERS[kind]), trained(replace(SOLVERS[kind], **{name: other})))


def test_no_setting_is_missing_from_the_test() -> None:
    for kind, solver in SOLVERS.items():
        assert {field.name for field in fields(solver)} == set(OTHER_VALUES[kind])


@pytest.mark.parametrize("kind", SOLVERS)
def test_moments_are_reset_only_after_aggregation_changed_the_model(kind: str) -> None:
    """ERRATA, row 37: reset moments count steps from 0; they persist if aggregation left the model unchanged."""

    def optimizer_steps(moments: Any, algorithm: Any) -> float:
        solver = replace(SOLVERS[kind], moments=moments)
        state = make_federation(solver, algorithm, count=2).fit(3, progress=False).engine_.party_states.get("0")
        (name,) = [name for name in state if name.startswith("moment.") and name.endswith("step")]
        return float(state[name].max())

    merging = algorithms.FedRL("uniform")
    steps_per_round = 60 if kind == "dqn" else PG.iterations * PG.gradient_steps
    alone = algorithms.Local()
    assert optimizer_steps("reset", merging) == steps_per_round
    assert optimizer_steps("keep", merging) == optimizer_steps("keep", alone) == optimizer_steps("reset", alone)
    assert optimizer_steps("keep", merging) > 2 * steps_per_round


def test_without_an_ended_episode_the_last_known_reward_is_reported() -> None:
    """§3: "the average reward of an agent over that round"; without an episode that ended there is none (row 38)."""
    fed = make_federation(Dqn(steps=4, learning_starts=1000))
    rewards = [scored.round.metrics["0"].get("reward") for scored in fed.rounds(12)]
    ended: list[list[float]] = [[] for _ in rewards]  # by round, the returns of the episodes that ended in it
    episode_return = 0.0
    for at, (*_, reward, _, end) in enumerate(fed.engine_.party_states.get("0")["log.replay"].tolist()):
        episode_return += reward
        if end:
            ended[at // 4].append(episode_return)
            episode_return = 0.0
    known: float | None = None
    for reported, returns in zip(rewards, ended, strict=True):
        known = float(np.mean(returns)) if returns else known
        assert reported is None if known is None else reported == pytest.approx(known, rel=1e-5)
    assert rewards[0] is None and any(
        reported and not returns for reported, returns in zip(rewards, ended, strict=True)
    )
