"""Agents: environments, losses, scores, and errors."""

from __future__ import annotations

import math
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from descant import (
    DescantWarning,
    Dqn,
    Federation,
    Metric,
    PolicyGradient,
    algorithms,
    compare,
    models,
    parties,
    rl,
)
from descant.core.algorithm import APPEND_ONLY
from descant.errors import ModelError, PartyError, SettingError
from descant.training.policy_gradient import compute_advantages
from descant.training.replay_buffer import ReplayBuffer
from descant.training.rl_losses import ClippedSurrogate, TemporalDifference

DQN = Dqn(steps=40, learning_starts=20, batch=8, epsilon_steps=60)
PG = PolicyGradient(iterations=2, episodes=3, gradient_steps=3, batch=16)


def net(outputs: int = 2) -> Any:
    return partial(models.mlp, 4, outputs, (8,))


def federation(solver: Any = DQN, algorithm: Any = None, count: int = 4, **rest: Any) -> Federation:
    population = parties.agents(count=count, test_episodes=3)
    return Federation(net(), population, algorithm or algorithms.FedRL(), solver=solver, **rest)


@pytest.mark.filterwarnings("ignore:.*CartPole-v0 is out of date:DeprecationWarning")
@pytest.mark.parametrize("name", ["CartPole-v0", "CartPole-v1"])
def test_cartpole_equals_gymnasiums_bit_for_bit(name: str) -> None:
    physics = [{}, {"gravity": 3.7}, {"length": 0.9, "force_mag": 7.0}, {"masspole": 0.3, "masscart": 0.7, "tau": 0.01}]
    environments = [rl.make_environment(name, **values) for values in physics]
    ours = environments[0].make_vector(environments, "abcd")
    theirs = []
    for k, values in enumerate(physics):
        ours.reset(k, 17 + k)
        env = gymnasium.make(name, disable_env_checker=True)
        env.reset()
        base: Any = env.unwrapped
        for key, value in values.items():
            setattr(base, key, value)
        base.total_mass = base.masspole + base.masscart
        base.polemass_length = base.masspole * base.length
        base.state = ours.get_state(k)[:4].numpy()
        theirs.append(env)
    rng = np.random.default_rng(0)
    active = np.ones(4, dtype=bool)
    lengths = np.zeros(4)
    while active.any():
        lean = ours.observations[:, 2] + ours.observations[:, 3] > 0
        actions = np.where(rng.random(4) < 0.1, rng.integers(2, size=4), lean)
        result = ours.step(actions, active)
        for k in np.flatnonzero(active):
            observation, reward, terminated, truncated, _ = theirs[k].step(int(actions[k]))
            assert (observation == result.observations[k]).all() and reward == result.rewards[k]
            assert (terminated, truncated) == (result.terminated[k], result.truncated[k])
        lengths += active
        active &= ~(result.terminated | result.truncated)
    assert lengths.min() > 20


def test_the_time_limit_truncates_and_does_not_terminate() -> None:
    environment = rl.make_environment("CartPole-v0", gravity=1e-6, force_mag=1e-6)
    pole = environment.make_vector([environment], "a")
    pole.reset(0, 1)
    pole.restore(0, 1, torch.zeros(5).double())
    results = [pole.step(np.array([0])) for _ in range(200)]
    assert not any(result.terminated[0] for result in results)
    assert [result.truncated[0] for result in results] == [False] * 199 + [True]


@pytest.mark.parametrize("name", ["CartPole-v1", "MountainCar-v0", "FrozenLake-v1"])
def test_a_restored_environment_continues_like_the_original(name: str) -> None:
    environment = rl.make_environment(name)

    def run(vector: rl.VectorEnvironment, steps: range) -> list[Any]:
        results = [vector.step(np.array([step % environment.actions])) for step in steps]
        return [(one.observations.tolist(), one.rewards.tolist(), one.terminated.tolist()) for one in results]

    original, copy = (environment.make_vector([environment], "a") for _ in range(2))
    original.reset(0, 5)
    copy.reset(0, 99)
    run(original, range(3))
    state = original.get_state(0)
    copy.restore(0, 5, state)
    assert original.observations.shape == (1, *environment.observation_shape)
    assert (copy.observations == original.observations).all()
    assert run(original, range(3, 7)) == run(copy, range(3, 7))


def test_agents_may_have_different_physics() -> None:
    population = parties.agents(count=3, gravity=[1.0, 2.0, 3.0], force_mag=5.0)
    assert [(agent.environment.gravity, agent.environment.force_mag) for agent in population.values()] == [
        (1, 5),
        (2, 5),
        (3, 5),
    ]
    varied = parties.agents(count=20, heterogeneity=0.5, seed=3)
    lengths = [agent.environment.length for agent in varied.values()]
    assert len(set(lengths)) == 20 and 0.5 / 1.5 <= min(lengths) < 0.4 < 0.6 < max(lengths) <= 0.5 * 1.5
    assert "CartPole-v1" in population.describe() and population.subset(["1"])["1"].environment.gravity == 2


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.booleans(), st.sampled_from(["td", "clipped"]))
def test_the_analytic_gradient_equals_autograds(seed: int, critic: bool, kind: str) -> None:
    rng = torch.Generator().manual_seed(seed)
    output = 2 * torch.randn(3, 5, 2 + critic, generator=rng, dtype=torch.float64)
    columns = torch.randn(3, 5, 4, generator=rng, dtype=torch.float64)
    columns[..., 0] = torch.randint(0, 2, (3, 5), generator=rng)
    columns[..., 2] = -columns[..., 2].abs()
    loss = (
        TemporalDifference(0.8)
        if kind == "td"
        else ClippedSurrogate(2, clip_ratio=0.3, entropy_coefficient=0.1, value_coefficient=0.7)
    )
    leaf = output.clone().requires_grad_()
    means = torch.stack([loss(one, y).mean() for one, y in zip(leaf, columns, strict=True)])
    (expected,) = torch.autograd.grad(means.sum(), leaf)
    slope, values = loss.output_gradient(output.numpy(), columns.numpy())
    np.testing.assert_allclose(slope, expected.numpy(), atol=1e-12)
    np.testing.assert_allclose(values, means.detach().numpy(), atol=1e-12)


def filled_buffer(rewards: list[float], terminated: list[bool], ended: list[bool]) -> ReplayBuffer:
    """Two agents whose t-th observation is t, and 100 + t after the step."""
    replay = ReplayBuffer([None, None], (1,), 100, steps=len(rewards))
    for t, (reward, terminal, end) in enumerate(zip(rewards, terminated, ended, strict=True)):
        two = [np.full(2, value) for value in (t % 2, reward, terminal, end)]
        replay.add(np.full((2, 1), t), np.full((2, 1), 100 + t), *two)
    return replay


def test_n_step_rewards_stop_at_the_end_of_the_episode() -> None:
    """By hand, γ = 0.5: termination removes the bootstrap value, truncation does not."""
    replay = filled_buffer([1, 2, 4, 8, 16], [False, True, False, False, False], [False, True, False, True, False])
    sample = replay.sample(np.array([[0.0, 0.2, 0.4, 0.6, 0.8]] * 2), n_step=3, gamma=0.5)
    for k in range(2):
        assert sample.x[k, :, 0].tolist() == [0, 1, 2, 3, 4]
        assert sample.actions[k].tolist() == [0, 1, 0, 1, 0]
        assert sample.rewards[k].tolist() == [1 + 1, 2, 4 + 4, 8, 16]
        assert sample.next_x[k, :, 0].tolist() == [101, 101, 103, 103, 104]
        assert sample.discount[k].tolist() == [0, 0, 0.25, 0.5, 0.5]  # 1 terminated; 3 was truncated; 4 is the newest
    one = replay.sample(np.array([[0.0, 0.2]] * 2), n_step=1, gamma=0.5)
    assert one.rewards[0].tolist() == [1, 2] and one.discount[0].tolist() == [0.5, 0]


def test_advantages_are_discounted_td_errors() -> None:
    """By hand, γ = λ = 0.5: rewards 1, 1 with values 2, 4; the episode is truncated at value 8, or terminates."""
    solver = PolicyGradient(gamma=0.5, gae_lambda=0.5, normalize_advantages=False)

    def steps(value: tuple[float, float]) -> list[Any]:
        one = np.ones(1)
        return [(np.array([[t]]), one, -one, np.array([value[t]]), one, one.astype(bool)) for t in range(2)]

    last = 1 + 0.5 * 8 - 4
    (truncated,) = compute_advantages(solver, steps((2.0, 4.0)), np.array([8.0]), count=1)
    assert truncated.y[:, 1].tolist() == [1 + 0.5 * 4 - 2 + 0.25 * last, last]
    assert truncated.y[:, 3].tolist() == [truncated.y[0, 1] + 2, truncated.y[1, 1] + 4]
    (terminated,) = compute_advantages(solver, steps((2.0, 4.0)), np.array([0.0]), count=1)
    assert terminated.y[1, 1] == 1 - 4 and terminated.returns.tolist() == [2.0]
    (plain,) = compute_advantages(
        PolicyGradient(gamma=0.5, gae_lambda=1, normalize_advantages=False), steps((0.0, 0.0)), np.array([0.0]), count=1
    )
    assert plain.y[:, 1].tolist() == [1.5, 1.0]  # without values: the reward-to-go
    (scaled,) = compute_advantages(PolicyGradient(gamma=0.5, gae_lambda=1), steps((0.0, 0.0)), np.array([0.0]), count=1)
    np.testing.assert_allclose(scaled.y[:, 1], [1, -1], atol=1e-6)


def test_the_replay_buffer_is_not_copied_between_rounds_and_drops_the_oldest() -> None:
    fed = federation(Dqn(steps=60, learning_starts=10_000, buffer_size=100))
    fed.fit(1, progress=False)
    logs = [fed.engine_.party_states.get(name)[f"{APPEND_ONLY}replay"] for name in fed.population]
    before = [log.clone() for log in logs]
    fed.fit(1, progress=False)
    after = [fed.engine_.party_states.get(name)[f"{APPEND_ONLY}replay"] for name in fed.population]
    for old, kept, new in zip(logs, before, after, strict=True):
        assert len(old) == 60 and len(new) == 100
        assert new.data_ptr() == old.data_ptr() + 20 * old.shape[1] * 4  # the same memory, 20 rows on
        assert torch.equal(old, kept) and torch.equal(new[:40], kept[20:])


@pytest.mark.parametrize("solver", [DQN, PG], ids=["dqn", "policy gradient"])
def test_results_compare_with_local_and_the_random_policy(solver: Any, tmp_path: Path) -> None:
    study = compare(
        [algorithms.FedRL(), algorithms.FedAvgPlus()],
        net(),
        parties.agents(count=3, test_episodes=3),
        rounds=2,
        solver=solver,
        progress=False,
    )
    assert [row["method"] for row in study.table().rows] == ["random policy", "Local", "FedRL", "FedAvgPlus"]
    assert "random policy" in (study.save(tmp_path / "study") / "report.html").read_text().lower()
    fed = federation(solver).fit(2, progress=False)
    assert "random" in str(fed.table()) and "majority" not in str(fed.table())
    assert fed.history_[-1]["reward"] > 8 and fed.scores().after.mean > 0


def test_progress_shows_reward_and_speed_and_omits_a_missing_loss() -> None:
    (early,) = federation(Dqn(steps=60, learning_starts=1000)).rounds(1)
    assert re.fullmatch(r"reward [\d.]+, [\d,]+ steps/s", early.round.summary)
    (round,) = federation().rounds(1)
    assert re.fullmatch(r"loss \d+\.\d{4}, reward [\d.]+, [\d,]+ steps/s", round.round.summary)
    data = Federation(partial(models.mlp, 64, 10), parties.digits(count=2), algorithms.FedAvg(), lr=0.1)
    (other,) = data.rounds(1)
    assert re.fullmatch(r"loss \d\.\d{4}", other.round.summary)


def test_scores_are_mean_returns_of_the_greedy_policy_in_fixed_episodes() -> None:
    """A policy that pushes against the fall beats the random policy, and gymnasium gives the same lengths."""

    class Against(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2, bias=False)
            with torch.no_grad():
                self.layer.weight.copy_(torch.tensor([[0.0, 0, -1, -1], [0, 0, 1, 1]]))

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = self.layer(x)
            return output

    population = parties.agents(count=2, test_episodes=4)
    fed = Federation(Against(), population, algorithms.FedRL(), solver=DQN)
    scores = fed.scores()
    lengths = []
    for agent in population.values():
        vector = agent.environment.make_vector([agent.environment], "a")
        for number in range(4):
            env = gymnasium.make("CartPole-v1", disable_env_checker=True)
            env.reset()
            vector.reset(0, agent.test_episode_key(number))
            base: Any = env.unwrapped
            base.state = vector.get_state(0)[:4].numpy()
            done = False
            steps = 0
            while not done:
                _, _, terminated, truncated, _ = env.step(
                    int(np.float32(base.state[2]) + np.float32(base.state[3]) > 0)
                )
                done = terminated or truncated
                steps = steps + 1
            lengths.append(steps)
    assert scores.personal.values.tolist() == [np.mean(lengths[:4]), np.mean(lengths[4:])]
    assert 10 < scores.majority.mean < 40 < 100 < scores.personal.mean and scores.metric == "return"
    solved = Federation(Against(), population, algorithms.FedRL(), solver=DQN, metric=Metric("long", _long))
    assert solved.scores().personal.mean == np.mean(np.array(lengths) >= 150)


def _long(returns: Tensor, lengths: Tensor) -> Tensor:
    return (lengths >= 150).double()


class Odd(gymnasium.Env[Any, Any]):
    """An environment of ten steps per episode; it may fail in step, or give a NaN reward."""

    def __init__(self, fault: str = "") -> None:
        self.fault = fault
        self.t = 0
        self.observation_space = spaces.Box(-1, 1, (4,))
        self.action_space = spaces.Discrete(2, start=5)

    def reset(self, **keywords: Any) -> Any:
        super().reset(**keywords)
        self.t = 0
        return np.zeros(4), {}

    def step(self, action: Any) -> Any:
        assert action in (5, 6)
        self.t += 1
        if self.fault == "crash" and self.t == 7:
            raise ValueError("the motor is on fire")
        reward = math.nan if self.fault == "nan" else -1.0
        return np.full(4, self.t / 10), reward, self.t == 10, False, {}


gymnasium.register("Odd-v0", entry_point=Odd, disable_env_checker=True, order_enforce=False)


@pytest.mark.parametrize("solver", [DQN, PG], ids=["dqn", "policy gradient"])
@pytest.mark.parametrize(("fault", "message"), [("crash", "the motor is on fire"), ("nan", "the reward nan")])
def test_an_agent_with_a_failing_environment_is_named_and_the_others_continue(
    solver: Any, fault: str, message: str
) -> None:
    population = parties.agents("Odd-v0", count=3, options=[{}, {"fault": fault}, {}], test_episodes=2)
    fed = Federation(net(), population, algorithms.FedRL(mode="softmax"), solver=solver)
    with pytest.warns(DescantWarning, match=rf"{message}.*[^.]\. All are in rejections_\."):
        fed.fit(1, progress=False)
    assert [rejection.party for rejection in fed.rejections_] == ["1"] and "agent '1'" in fed.rejections_[0].reason
    assert fed.state.rounds_trained(fed.plan_).tolist() == [1, 0, 1] and fed.history_[-1]["reward"] == -10


def test_models_and_environments_that_do_not_fit_are_rejected_before_training() -> None:
    def start(population: Any, model: Any = net(), solver: Any = DQN) -> None:  # noqa: B008
        Federation(model, population, algorithms.FedRL(), solver=solver).state  # noqa: B018

    agents = parties.agents(count=2)
    with pytest.raises(SettingError, match=r"actions of Pendulum-v1 are Box.*need discrete"):
        start(parties.agents("Pendulum-v1", count=2))
    with pytest.raises(SettingError, match=r"has no environment 'CartPole-v9'"):
        start(parties.agents("CartPole-v9", count=2))
    with pytest.raises(SettingError, match=r"There is no setting of CartPole-v1 'gravty'. Did you mean 'gravity'"):
        parties.agents(count=2, options={"gravty": 2})
    with pytest.raises(SettingError, match=r"The 'length' of CartPole-v1 must be > 0. Got -1.0"):
        parties.agents(count=2, length=-1)
    for gravity in ([1.0, 2.0, 3.0], "heavy", [1.0, None, "x"], [[1.0], [2.0]]):
        with pytest.raises(PartyError, match=r"'gravity' of agents must be one number, or 2"):
            parties.agents(count=2, gravity=gravity)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=r"2 actions, Dqn needs outputs \[8, 2\]. Sequential gives \[8, 3\]"):
        start(agents, net(3))
    with pytest.raises(ModelError, match=r"fails on observations of CartPole-v1, \(8, 4\)"):
        start(agents, nn.Linear(5, 2))
    with pytest.raises(ModelError, match="draws random numbers"):
        start(agents, nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 2)))
    with pytest.raises(ModelError, match="running statistics"):
        start(agents, nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)))
    with pytest.raises(ModelError, match=r"is torch\.float64; agents see torch\.float32"):
        start(agents, nn.Linear(4, 2).double())
    with pytest.raises(PartyError, match="Dqn trains agents"):
        start(parties.digits(count=2))
    with pytest.raises(PartyError, match=r"has no data\. Use Dqn"):
        Federation(net(), agents, algorithms.FedAvg(), lr=0.1).state  # noqa: B018
    with pytest.raises(SettingError, match="'gamma' of Dqn must be"):
        start(agents, solver=Dqn(gamma=1.5))
    with pytest.raises(SettingError, match=r"'double_q' of Dqn must be one of True, False. Got 'no'"):
        start(agents, solver=Dqn(double_q="no"))  # type: ignore[arg-type]
    with pytest.raises(SettingError, match="'normalize_advantages' of PolicyGradient must be one of"):
        start(agents, solver=PolicyGradient(normalize_advantages="no"))  # type: ignore[arg-type]
    with pytest.raises(SettingError, match="the solver's own 'lr': leave it out of 'options'"):
        start(agents, solver=Dqn(options={"lr": 1.0}))
    with pytest.raises(ModelError, match=r"gives other outputs for an observation in a batch.*nn\.LayerNorm"):
        start(agents, nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2, track_running_stats=False)))


def test_overflowing_physics_are_reported_for_the_agent_and_not_for_the_model() -> None:
    population = parties.agents(count=3, length=[0.5, 1e-150, 0.5], test_episodes=0)
    fed = Federation(net(), population, algorithms.FedRL(), solver=DQN)
    with pytest.warns(DescantWarning, match="physics of CartPole-v1 of agent '1'"):
        fed.fit(1, progress=False)
    assert [rejection.party for rejection in fed.rejections_] == ["1"]


def test_without_gymnasium_the_extra_is_named_and_cartpole_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(SettingError, match=r"pip install 'descant\[rl\]'"):
        parties.agents("LunarLander-v3", count=1)["0"].environment.actions  # noqa: B018
    federation().fit(1, progress=False)


class Shaped(gymnasium.Env[Any, Any]):
    """An environment with given spaces."""

    def __init__(self, n: int = 2, see: int = 4, many: bool = False) -> None:
        box = spaces.Box(-1, 1, (see,))
        self.observation_space = spaces.Sequence(box) if many else box
        self.action_space = spaces.Discrete(n)


gymnasium.register("Shaped-v0", entry_point=Shaped, disable_env_checker=True, order_enforce=False)


def test_agents_with_different_spaces_are_rejected_by_name() -> None:
    """One model acts for all agents, so their spaces must agree."""
    shaped_agents = partial(parties.agents, "Shaped-v0", count=3)
    with pytest.raises(PartyError, match=r"Agent '2' is in Shaped-v0, .* 3 actions, and agent '0' in .* 2 actions"):
        shaped_agents(options=[{}, {"n": 2}, {"n": 3}])
    with pytest.raises(PartyError, match=r"Agent '1' is in Shaped-v0, observations \(5,\)"):
        shaped_agents(options=[{}, {"see": 5}, {"see": 5}])
    with pytest.raises(SettingError, match=r"observations of Shaped-v0 are Sequence.*wrap the environment"):
        Federation(net(), shaped_agents(options={"many": True}), algorithms.FedRL(), solver=DQN).state  # noqa: B018


def test_options_may_be_lists_and_tables() -> None:
    population = parties.agents(
        "FrozenLake-v1", count=2, options={"desc": ["SF", "FG"], "is_slippery": False}, test_episodes=2
    )
    fed = Federation(partial(models.mlp, 4, 4, (8,)), population, algorithms.FedRL(), solver=DQN)
    assert (
        population["0"].environment.observation_shape == (4,) and fed.fit(1, progress=False).scores().personal.mean >= 0
    )


def test_any_environment_with_discrete_actions_works() -> None:
    population = parties.agents("FrozenLake-v1", count=2, test_episodes=2)
    fed = Federation(partial(models.mlp, 16, 4, (8,)), population, algorithms.FedRL(), solver=DQN)
    assert (
        fed.fit(2, progress=False).scores().personal.mean >= 0
    )  # all rewards are 0 at first, so all weights are equal
