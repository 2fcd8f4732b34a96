"""Agents under the laws: cut, stopped, stacked, merged by any method, one agent and never merged.

They hold for FedRL's Algorithm 1, for its "Independent" (figure 2) and "Max" (figure 3), and for the errata: row 36
(what rewards may be) and row 37 (what merging leaves alone).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bytes_engine import BytesEngine
from descant import DescantWarning, Dqn, Federation, PolicyGradient, algorithms, parties
from descant import models as problems
from descant.algorithms.fedrl import RewardWeights, best_agent_weights
from descant.core.algorithm import Hyper, TuneContext
from descant.core.messages import Reply
from descant.engines import InProcess, Processes
from descant.errors import SettingError
from toy_problems import METHODS

NET = partial(problems.mlp, 4, 2, (8,))
DQN = Dqn(steps=50, learning_starts=20, batch=8, n_step=2, epsilon_steps=60, target_every=7, tau=0.5)
PG = PolicyGradient(iterations=2, episodes=3, gradient_steps=3, batch=16)
SOLVERS = {"dqn": DQN, "policy gradient": PG}


def made(solver: Any = DQN, algorithm: Any = None, count: int = 5, **rest: Any) -> Federation:
    people = partial(parties.agents, count=count, heterogeneity=0.3, test_episodes=2)
    return Federation(NET, people, algorithm or algorithms.FedRL(), solver=solver, **{"seed": 3, **rest})


def models(fed: Federation) -> Tensor:
    rows = [fed.global_model_, *fed.models_.values()]
    return torch.stack([nn.utils.parameters_to_vector(module.parameters()).detach() for module in rows])


@pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)
@pytest.mark.parametrize("algorithm", [algorithms.FedRL, algorithms.FedAvgPlus], ids=lambda made: made.__name__)
def test_the_cut_never_changes_a_bit(solver: Any, algorithm: Any) -> None:
    def hashed(engine: Any) -> str:
        fed = made(solver, algorithm(), engine=engine)
        assert fed.state.execution_mode == "stacked"
        return fed.fit(3, progress=False).hash()

    whole = hashed(InProcess)
    assert all(
        hashed(engine) == whole for engine in (partial(InProcess, max_parties=1), partial(BytesEngine, batch_count=2))
    )


def test_agents_of_unlike_age_and_on_disk_are_the_same() -> None:
    """Some take part in a round, so that their clocks differ; and what they remember does not fit in memory."""

    def hashed(**rest: Any) -> str:
        return made(replace(DQN, steps=30), participation=3, **rest).fit(3, progress=False).hash()

    assert hashed() == hashed(engine=partial(BytesEngine, batch_count=3)) == hashed(memory_budget=0)


def test_worker_processes_do_the_same() -> None:
    processes = Processes(workers=2, threads=1)
    try:
        fed = made(engine=processes)
        fed.engine_.wait()  # type: ignore[attr-defined]
        assert fed.fit(2, progress=False).hash() == made().fit(2, progress=False).hash()
    finally:
        processes.close()


@pytest.mark.parametrize("way", ["single", "vectorized", "looped"])
@pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)
def test_one_by_one_agents_learn_what_they_learn_in_a_stack(solver: Any, way: str) -> None:
    """Acting at random, and so on the same transitions, one update is the same to 1e-5 in any way."""
    once = (
        replace(solver, steps=20, epsilon_end=1.0) if solver is DQN else replace(solver, iterations=1, gradient_steps=1)
    )

    def rows(way: str) -> Tensor:
        fed = made(once)
        fed.state = replace(fed.state, execution_mode=way)
        return models(fed.fit(1, progress=False))

    start = made(once).state.global_model
    assert not torch.equal(rows("stacked")[0], start)
    torch.testing.assert_close(rows(way), rows("stacked"), rtol=0, atol=1e-5)


@pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)
def test_an_agent_alone_does_the_same_however_often_it_might_have_merged(solver: Any) -> None:
    """A period of never: four rounds are one of four times the work, replay and environment included."""
    often = made(solver, algorithms.Local()).fit(4, progress=False)
    work = "steps" if solver is DQN else "iterations"
    longer = replace(solver, **{work: 4 * getattr(solver, work)})
    never = made(longer, algorithms.FedRL())
    next(iter(never.rounds(1)))
    known = ("agent.progress", "loss")
    for name in often.population:
        mine, theirs = (fed.engine_.party_states.get(name) for fed in (often, never))
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[key], theirs[key]) for key in mine if key not in known), name
        assert torch.equal(
            mine["agent.progress"][:3], theirs["agent.progress"][:3]
        )  # the mean reward is of another round


@pytest.mark.parametrize("moments", ["keep", "reset"])
@pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)
def test_one_agent_in_a_federation_is_the_agent_alone(solver: Any, moments: Any) -> None:
    one = replace(solver, moments=moments)
    joined, alone = (made(one, algorithm, count=1).fit(3, progress=False) for algorithm in (None, algorithms.Local()))
    assert torch.equal(models(joined)[1], models(alone)[1])
    memory, other = (fed.engine_.party_states.get("0") for fed in (joined, alone))
    assert all(torch.equal(memory[key], other[key]) for key in memory.keys() | other.keys())


@pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)
def test_what_was_saved_goes_on_as_if_it_had_never_stopped(solver: Any, tmp_path: Path) -> None:
    whole = made(solver).fit(4, progress=False).hash()
    made(solver).fit(2, progress=False).save(tmp_path / "run")
    again = made(solver).load(tmp_path / "run")
    assert again.fit(2, progress=False).hash() == whole
    with pytest.raises(Exception, match="saved by another federation"):
        made(replace(solver, gamma=0.5)).load(tmp_path / "run")


def test_a_broken_round_leaves_no_trace_in_the_replay() -> None:
    fed = made().fit(2, progress=False)
    before = fed.hash()
    whole = made().fit(4, progress=False).hash()
    collect = fed.engine_.collect

    def interrupted(timeout: float) -> Any:
        collect(timeout)
        raise KeyboardInterrupt

    fed.engine_.collect = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        fed.fit(1, progress=False)
    assert fed.hash() == before
    fed.engine_.collect = collect  # type: ignore[method-assign]
    assert fed.fit(2, progress=False).hash() == whole


@pytest.mark.filterwarnings("ignore:.*:descant.DescantWarning")
@pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)
@pytest.mark.parametrize("name", [name for name, made in METHODS.items() if not made().loss_samples])
def test_every_method_merges_agents(name: str, solver: Any) -> None:
    def model() -> nn.Module:  # its layers are called as the methods call them
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))

    fed = Federation(model, parties.agents(count=3, test_episodes=2), METHODS[name](), solver=solver).fit(
        2, progress=False
    )
    found = models(fed)
    assert not fed.rejections_ and found.isfinite().all()
    if name not in ("Local", "L2GD"):
        assert not torch.equal(found[0], fed.state.initial_model)


def test_the_pull_of_fed_plus_draws_agents_together() -> None:
    def spread(alpha: float) -> float:
        fed = made(DQN, algorithms.FedAvgPlus(alpha=alpha, rho=1000.0)).fit(3, progress=False)
        return float(models(fed)[1:].std(0).norm())

    assert spread(1000.0) < 0.5 * spread(0.0)


def test_merging_moves_the_target_with_the_model_or_not() -> None:
    """The paper does not say (row 37): it is what the agents begin with, unless it is kept."""
    never = replace(DQN, target_every=10**6)
    fed = {name: made(replace(never, target_network=name)).fit(2, progress=False) for name in ("sync", "keep")}
    first = made(never).fit(1, progress=False).state
    for party in fed["sync"].population:
        assert torch.equal(fed["sync"].engine_.party_states.get(party)["agent.target_network"], first.global_model)
        assert torch.equal(fed["keep"].engine_.party_states.get(party)["agent.target_network"], first.initial_model)


@pytest.mark.parametrize("mode", ["normalize", "shift", "softmax"])
@pytest.mark.parametrize("reward", [20.0, 0.0, -3.0])
def test_equal_rewards_weigh_alike(mode: Any, reward: float) -> None:
    assert RewardWeights(mode)([{"reward": reward}] * 3).tolist() == [1, 1, 1]


def test_weights_are_rewards_of_any_sign() -> None:
    mixed = [{"reward": 30.0}, {"reward": -10.0}, {}]
    assert RewardWeights("normalize")(mixed).tolist() == [30, 0, 10]
    assert RewardWeights("shift")(mixed).tolist() == [40, 0, 20]
    torch.testing.assert_close(
        RewardWeights("softmax", 0.1)(mixed), torch.tensor([1, 0.018315639, 0.13533528], dtype=torch.float64)
    )
    assert best_agent_weights(mixed).tolist() == [1, 0, 0]
    assert best_agent_weights([{}, {"reward": 5.0}, {"reward": 5.0}]).tolist() == [
        0,
        1,
        0,
    ]  # who has no reward is not the best
    assert best_agent_weights([{}, {"reward": -5.0}]).tolist() == [0, 1] and best_agent_weights([{}, {}]).tolist() == [
        1,
        1,
    ]
    assert RewardWeights("shift")([{"reward": -5.0}, {"reward": -1.0}]).tolist() == [0, 4]
    with pytest.raises(SettingError, match=r"No reward is above 0 .*-5 to -1.*mode='shift'"):
        RewardWeights("normalize")([{"reward": -5.0}, {"reward": -1.0}])
    assert RewardWeights()([{"reward": float("nan")}, {"reward": 4.0}]).tolist() == [1, 1]


def test_max_is_a_copy_of_the_best() -> None:
    fed = made(DQN, algorithms.FedRL("max"))
    (scored,) = fed.rounds(1)
    best = max(scored.round.metrics, key=lambda name: scored.round.metrics[name]["reward"])
    alone = made(DQN, algorithms.Local()).fit(1, progress=False)
    assert torch.equal(models(fed)[0], models(alone)[1 + list(fed.population).index(best)])


def test_periods_are_constant_or_decay_or_grow_and_a_run_has_one_at_least() -> None:
    period = algorithms.Period
    assert period(100, total=350).lengths() == [100, 100, 100, 50]
    assert period(100, 0.5, 175).lengths() == [100, 50, 25]
    fed = made(DQN, algorithms.FedRL(period=10, factor=2.0, total=60))
    taken = [scored.round.metrics["0"]["samples"] for scored in fed.rounds(3)]
    assert taken == [10, 20, 30]
    at_the_end = models(fed)
    with pytest.warns(DescantWarning, match=r"Round 4: the total of 60 is done"):
        fed.fit(3, progress=False)
    assert [entry["work"] for entry in fed.history_] == [10, 20, 30, 0, 0, 0]
    assert torch.allclose(models(fed), at_the_end, rtol=1e-6)
    assert sum(period(58, 1.05, 12000).lengths()) == 12000 and period(1, 10.0, 10**6).lengths()[-1] == 888_889
    far = TuneContext(20_000, Hyper(0.1, 5), {}, feedback={}, global_model=torch.zeros(1), rng=np.random.default_rng(0))
    assert period(100, 1.05, total=500)(far).hyper.work == 0 and period(100, 0.9)(far).hyper.work == 1
    with pytest.raises(SettingError, match=r"has grown beyond .* in round 20000. Give a 'total'"):
        period(100, 1.05)(far)
    with pytest.raises(SettingError, match=r"A period of 100 is longer than the run of 50"):
        list(made(DQN, algorithms.FedRL(period=100, total=50)).rounds(1))
    with pytest.raises(SettingError, match="'weights' of FedRL must be one of"):
        algorithms.FedRL("best")  # type: ignore[arg-type]
    with pytest.raises(SettingError, match="go with a 'period'"):
        algorithms.FedRL(factor=2.0)
    with pytest.raises(SettingError, match=r"The 'period' of FedRL must be a whole number >= 1. Got 0"):
        algorithms.FedRL(period=0)
    with pytest.raises(SettingError, match="'mode' and 'beta' of FedRL are for weights='reward'"):
        algorithms.FedRL("max", mode="shift", beta=3.0)
    with pytest.raises(SettingError, match="'beta' of FedRL must be >= 0"):
        algorithms.FedRL(mode="softmax", beta=-3)


def liar(report: Reply) -> list[Reply]:
    """One agent of five boasts, and sends what would ruin everybody."""
    if report.party != "2" or report.kind != "train":
        return [report]
    poison = {name: torch.full_like(tensor, 1000.0) for name, tensor in report.arrays.items()}
    return [replace(report, arrays=poison, metrics={**report.metrics, "reward": 1e6})]


@pytest.mark.parametrize("name", ["CoordinateMedian", "RFA", "FedRL", "max"])
def test_medians_hold_against_a_liar_and_the_weighted_mean_does_not(name: str) -> None:
    method = {"FedRL": algorithms.FedRL(), "max": algorithms.FedRL("max")}.get(name) or METHODS[name]()
    fed = made(DQN, method, engine=partial(BytesEngine, tamper=liar)).fit(2, progress=False)
    far = float(fed.state.global_model.abs().max())
    assert far < 3 if name in ("CoordinateMedian", "RFA") else far > 900


def unlucky(report: Reply) -> list[Reply]:
    return [replace(report, metrics={**report.metrics, "reward": -1.0 - int(report.party)})]


def test_agents_have_no_samples_to_measure_a_loss_on() -> None:
    with pytest.raises(SettingError, match="agents and desks have none"):
        made(DQN, algorithms.AdaptiveHyper(reward="clients")).fit(1, progress=False)


def test_all_negative_rewards_are_told_and_the_model_stays() -> None:
    fed = made(engine=partial(BytesEngine, tamper=unlucky))
    with pytest.warns(DescantWarning, match="mode='shift'"):
        fed.fit(1, progress=False)
    assert torch.equal(fed.state.global_model, fed.state.initial_model)
    made(DQN, algorithms.FedRL(mode="shift"), engine=partial(BytesEngine, tamper=unlucky)).fit(1, progress=False)
