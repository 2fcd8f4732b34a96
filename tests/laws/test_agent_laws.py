"""Laws of reinforcement-learning agents: batching, resume, stacking, merging, local training.

They cover FedRL's Algorithm 1, its "Independent" (figure 2) and "Max" (figure 3), and the errata: row 36 (negative
rewards) and row 37 (state that merging does not change).
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


def make_federation(solver: Any = DQN, algorithm: Any = None, count: int = 5, **rest: Any) -> Federation:
    population = partial(parties.agents, count=count, heterogeneity=0.3, test_episodes=2)
    return Federation(NET, population, algorithm or algorithms.FedRL(), solver=solver, **{"seed": 3, **rest})


def models(fed: Federation) -> Tensor:
    rows = [fed.global_model_, *fed.models_.values()]
    return torch.stack([nn.utils.parameters_to_vector(module.parameters()).detach() for module in rows])


@pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)
@pytest.mark.parametrize("algorithm", [algorithms.FedRL, algorithms.FedAvgPlus], ids=lambda method: method.__name__)
def test_batching_never_changes_a_bit(solver: Any, algorithm: Any) -> None:
    def run_hash(engine: Any) -> str:
        fed = make_federation(solver, algorithm(), engine=engine)
        assert fed.state.execution_mode == "stacked"
        return fed.fit(3, progress=False).hash()

    whole = run_hash(InProcess)
    assert all(
        run_hash(engine) == whole for engine in (partial(InProcess, max_parties=1), partial(BytesEngine, batch_count=2))
    )


def test_batching_and_memory_budget_change_nothing_under_partial_participation() -> None:
    """With 3 of 5 agents per round, their clocks differ. With a memory budget of 0, party states are on disk."""

    def run_hash(**rest: Any) -> str:
        return make_federation(replace(DQN, steps=30), participation=3, **rest).fit(3, progress=False).hash()

    assert run_hash() == run_hash(engine=partial(BytesEngine, batch_count=3)) == run_hash(memory_budget=0)


def test_worker_processes_give_the_same_hash() -> None:
    processes = Processes(workers=2, threads=1)
    try:
        fed = make_federation(engine=processes)
        fed.engine_.wait()  # type: ignore[attr-defined]
        assert fed.fit(2, progress=False).hash() == make_federation().fit(2, progress=False).hash()
    finally:
        processes.close()


@pytest.mark.parametrize("execution_mode", ["single", "vectorized", "looped"])
@pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)
def test_every_execution_mode_matches_stacked_training(solver: Any, execution_mode: str) -> None:
    """One update on the same random transitions agrees to 1e-5 in every execution mode."""
    once = (
        replace(solver, steps=20, epsilon_end=1.0) if solver is DQN else replace(solver, iterations=1, gradient_steps=1)
    )

    def rows(execution_mode: str) -> Tensor:
        fed = make_federation(once)
        fed.state = replace(fed.state, execution_mode=execution_mode)
        return models(fed.fit(1, progress=False))

    start = make_federation(once).state.global_model
    assert not torch.equal(rows("stacked")[0], start)
    torch.testing.assert_close(rows(execution_mode), rows("stacked"), rtol=0, atol=1e-5)


@pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)
def test_local_training_does_not_depend_on_the_round_length(solver: Any) -> None:
    """Four rounds equal one round of four times the work, replay buffer and environment included."""
    often = make_federation(solver, algorithms.Local()).fit(4, progress=False)
    work = "steps" if solver is DQN else "iterations"
    longer = replace(solver, **{work: 4 * getattr(solver, work)})
    never = make_federation(longer, algorithms.FedRL())
    next(iter(never.rounds(1)))
    differing = ("agent.progress", "loss")
    for name in often.population:
        mine, theirs = (fed.engine_.party_states.get(name) for fed in (often, never))
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[key], theirs[key]) for key in mine if key not in differing), name
        assert torch.equal(
            mine["agent.progress"][:3], theirs["agent.progress"][:3]
        )  # the mean reward is that of another round


@pytest.mark.parametrize("moments", ["keep", "reset"])
@pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)
def test_a_federation_of_one_agent_equals_local_training(solver: Any, moments: Any) -> None:
    one = replace(solver, moments=moments)
    federated, alone = (
        make_federation(one, algorithm, count=1).fit(3, progress=False) for algorithm in (None, algorithms.Local())
    )
    assert torch.equal(models(federated)[1], models(alone)[1])
    memory, other = (fed.engine_.party_states.get("0") for fed in (federated, alone))
    assert all(torch.equal(memory[key], other[key]) for key in memory.keys() | other.keys())


@pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)
def test_resuming_from_a_checkpoint_equals_an_uninterrupted_run(solver: Any, tmp_path: Path) -> None:
    whole = make_federation(solver).fit(4, progress=False).hash()
    make_federation(solver).fit(2, progress=False).save(tmp_path / "run")
    again = make_federation(solver).load(tmp_path / "run")
    assert again.fit(2, progress=False).hash() == whole
    with pytest.raises(Exception, match="saved by another federation"):
        make_federation(replace(solver, gamma=0.5)).load(tmp_path / "run")


def test_an_interrupted_round_leaves_no_trace_in_the_replay_buffer() -> None:
    fed = make_federation().fit(2, progress=False)
    before = fed.hash()
    whole = make_federation().fit(4, progress=False).hash()
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
@pytest.mark.parametrize("name", [name for name, make in METHODS.items() if not make().loss_samples])
def test_every_method_merges_agents(name: str, solver: Any) -> None:
    def model() -> nn.Module:  # with the layer names that the methods refer to
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))

    fed = Federation(model, parties.agents(count=3, test_episodes=2), METHODS[name](), solver=solver).fit(
        2, progress=False
    )
    rows = models(fed)
    assert not fed.rejections_ and rows.isfinite().all()
    if name not in ("Local", "L2GD"):
        assert not torch.equal(rows[0], fed.state.initial_model)


def test_the_fed_plus_penalty_draws_agents_together() -> None:
    def spread(alpha: float) -> float:
        fed = make_federation(DQN, algorithms.FedAvgPlus(alpha=alpha, rho=1000.0)).fit(3, progress=False)
        return float(models(fed)[1:].std(0).norm())

    assert spread(1000.0) < 0.5 * spread(0.0)


def test_merging_syncs_or_keeps_the_target_network() -> None:
    """The paper leaves it open (row 37): the target is the merged model, unless `target_network` is "keep"."""
    never = replace(DQN, target_every=10**6)
    fed = {
        name: make_federation(replace(never, target_network=name)).fit(2, progress=False) for name in ("sync", "keep")
    }
    first = make_federation(never).fit(1, progress=False).state
    for party in fed["sync"].population:
        assert torch.equal(fed["sync"].engine_.party_states.get(party)["agent.target_network"], first.global_model)
        assert torch.equal(fed["keep"].engine_.party_states.get(party)["agent.target_network"], first.initial_model)


@pytest.mark.parametrize("mode", ["normalize", "shift", "softmax"])
@pytest.mark.parametrize("reward", [20.0, 0.0, -3.0])
def test_equal_rewards_give_equal_weights(mode: Any, reward: float) -> None:
    assert RewardWeights(mode)([{"reward": reward}] * 3).tolist() == [1, 1, 1]


def test_reward_weights_handle_negative_and_missing_rewards() -> None:
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
    ]  # an agent without a reward is never the best
    assert best_agent_weights([{}, {"reward": -5.0}]).tolist() == [0, 1] and best_agent_weights([{}, {}]).tolist() == [
        1,
        1,
    ]
    assert RewardWeights("shift")([{"reward": -5.0}, {"reward": -1.0}]).tolist() == [0, 4]
    with pytest.raises(SettingError, match=r"No reward is above 0 .*-5 to -1.*mode='shift'"):
        RewardWeights("normalize")([{"reward": -5.0}, {"reward": -1.0}])
    assert RewardWeights()([{"reward": float("nan")}, {"reward": 4.0}]).tolist() == [1, 1]


def test_max_weights_copy_the_best_agent() -> None:
    fed = make_federation(DQN, algorithms.FedRL("max"))
    (scored,) = fed.rounds(1)
    best = max(scored.round.metrics, key=lambda name: scored.round.metrics[name]["reward"])
    alone = make_federation(DQN, algorithms.Local()).fit(1, progress=False)
    assert torch.equal(models(fed)[0], models(alone)[1 + list(fed.population).index(best)])


def test_periods_are_constant_decay_or_grow_within_the_total() -> None:
    period = algorithms.Period
    assert period(100, total=350).lengths() == [100, 100, 100, 50]
    assert period(100, 0.5, 175).lengths() == [100, 50, 25]
    fed = make_federation(DQN, algorithms.FedRL(period=10, factor=2.0, total=60))
    samples = [scored.round.metrics["0"]["samples"] for scored in fed.rounds(3)]
    assert samples == [10, 20, 30]
    final_models = models(fed)
    with pytest.warns(DescantWarning, match=r"Round 4: the total of 60 is reached"):
        fed.fit(3, progress=False)
    assert [entry["work"] for entry in fed.history_] == [10, 20, 30, 0, 0, 0]
    assert torch.allclose(models(fed), final_models, rtol=1e-6)
    assert sum(period(58, 1.05, 12000).lengths()) == 12000 and period(1, 10.0, 10**6).lengths()[-1] == 888_889
    far = TuneContext(20_000, Hyper(0.1, 5), {}, feedback={}, global_model=torch.zeros(1), rng=np.random.default_rng(0))
    assert period(100, 1.05, total=500)(far).hyper.work == 0 and period(100, 0.9)(far).hyper.work == 1
    with pytest.raises(SettingError, match=r"each round exceeds .* in round 20000. Give a 'total'"):
        period(100, 1.05)(far)
    with pytest.raises(SettingError, match=r"A period of 100 is longer than the run of 50"):
        list(make_federation(DQN, algorithms.FedRL(period=100, total=50)).rounds(1))
    with pytest.raises(SettingError, match="'weights' of FedRL must be one of"):
        algorithms.FedRL("best")  # type: ignore[arg-type]
    with pytest.raises(SettingError, match="need a 'period'"):
        algorithms.FedRL(factor=2.0)
    with pytest.raises(SettingError, match=r"The 'period' of FedRL must be a whole number >= 1. Got 0"):
        algorithms.FedRL(period=0)
    with pytest.raises(SettingError, match="'mode' and 'beta' of FedRL are for weights='reward'"):
        algorithms.FedRL("max", mode="shift", beta=3.0)
    with pytest.raises(SettingError, match="'beta' of FedRL must be >= 0"):
        algorithms.FedRL(mode="softmax", beta=-3)


def poisoned(reply: Reply) -> list[Reply]:
    """Let one agent of five claim a huge reward and send a huge model."""
    if reply.party != "2" or reply.kind != "train":
        return [reply]
    huge = {name: torch.full_like(tensor, 1000.0) for name, tensor in reply.arrays.items()}
    return [replace(reply, arrays=huge, metrics={**reply.metrics, "reward": 1e6})]


@pytest.mark.parametrize("name", ["CoordinateMedian", "RFA", "FedRL", "max"])
def test_medians_resist_a_poisoned_reply_and_weighted_means_do_not(name: str) -> None:
    method = {"FedRL": algorithms.FedRL(), "max": algorithms.FedRL("max")}.get(name) or METHODS[name]()
    fed = make_federation(DQN, method, engine=partial(BytesEngine, tamper=poisoned)).fit(2, progress=False)
    largest = float(fed.state.global_model.abs().max())
    assert largest < 3 if name in ("CoordinateMedian", "RFA") else largest > 900


def negative_reward(reply: Reply) -> list[Reply]:
    return [replace(reply, metrics={**reply.metrics, "reward": -1.0 - int(reply.party)})]


def test_methods_that_measure_a_sample_loss_reject_agents() -> None:
    with pytest.raises(SettingError, match="agents and desks have none"):
        make_federation(DQN, algorithms.AdaptiveHyper(reward="clients")).fit(1, progress=False)


def test_all_negative_rewards_warn_and_leave_the_model_unchanged() -> None:
    fed = make_federation(engine=partial(BytesEngine, tamper=negative_reward))
    with pytest.warns(DescantWarning, match="mode='shift'"):
        fed.fit(1, progress=False)
    assert torch.equal(fed.state.global_model, fed.state.initial_model)
    make_federation(DQN, algorithms.FedRL(mode="shift"), engine=partial(BytesEngine, tamper=negative_reward)).fit(
        1, progress=False
    )
