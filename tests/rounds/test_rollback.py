"""Rollback to an earlier global model: party states from the rolled-back rounds are reset."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import torch

from bytes_engine import BytesEngine
from descant import Algorithm, DescantWarning, Federation, algorithms
from descant.core.algorithm import NamedTensors, TuneContext, TuneResult
from descant.core.messages import Task
from descant.engines import VirtualClock
from descant.rounds.dispatch import make_tasks
from descant.rounds.party_side import perform_tasks
from descant.rounds.plan import Plan
from test_adaptive_hyper import population_with_validation
from toy_problems import classification_parties, network

RUIN = 6  # the round whose work ruins everything


class Reckless(BytesEngine):
    """In one round all parties take one huge step: models and party states become useless but stay finite."""

    def __init__(self, plan: Plan, batch_count: int = 1) -> None:
        super().__init__(plan, batch_count)
        self.sent: dict[tuple[str, int], Task] = {}

    def submit(self, tasks: Sequence[Task]) -> None:
        self.sent |= {(task.party, task.round): task for task in tasks if task.kind == "train"}
        super().submit([self._large(t) if (t.kind, t.round) == ("train", RUIN) else t for t in tasks])

    def _large(self, task: Task) -> Task:
        return replace(task, settings={**task.settings, "lr": 300.0, "work": 1})


METHODS: dict[str, Algorithm] = {
    "matching": algorithms.RepresentationMatching(),
    "Fed+": algorithms.FedAvgPlus(alpha=0.003),
    "FedPer": algorithms.FedPer(),
    "matching of Fed+": algorithms.RepresentationMatching(algorithms.FedGeoMedPlus(alpha=0.003, rho=0.1)),
}


def federation(method: str, batch_count: int = 1, count: int = 5) -> Federation:
    """Return a tuned federation; FedPer is scored by clients, as its global model has no head to validate."""
    reward = {"reward": "clients", "loss_samples": 100} if method == "FedPer" else {}
    algorithm = algorithms.AdaptiveHyper(METHODS[method], lr=(0.05, 0.1, 0.2), work=(2, 4, 8), **reward)  # type: ignore[arg-type]
    engine = partial(Reckless, batch_count=batch_count)
    return Federation(
        network(),
        population_with_validation(),
        algorithm,
        lr=0.1,
        steps=3,
        batch=4,
        seed=2,
        engine=engine,
        participation=count,
    )


def largest_number(fed: Federation, party: str) -> float:
    """Return the largest absolute number in a party's model and state."""
    tensors = [*fed.models_[party].state_dict().values(), *fed.engine_.party_states.get(party).values()]
    return max(float(tensor.abs().max()) for tensor in tensors)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("count", [5, 3])
def test_training_recovers_from_an_injected_collapse(method: str, count: int) -> None:
    """A rollback of the global model alone would fail: θ and personal models would harm the next round."""
    fed = federation(method, count=count)
    late = method == "FedPer"
    with pytest.warns(DescantWarning, match=f"Round {RUIN + 1 + late}: it collapsed at round {RUIN}"):
        fed.fit(RUIN, progress=False)
        ruined = max(largest_number(fed, party) for party in fed.population)
        fed.fit(30, progress=False)
    losses = [entry["received_loss" if late else "validation"] for entry in fed.history_]
    assert losses[RUIN - 1 + late] > 3 * losses[RUIN - 2] and ruined > 20
    assert [entry["round"] for entry in fed.history_ if "rolled_back" in entry] == [RUIN + 1 + late]
    assert losses[-1] < 1.1 * min(losses[: RUIN - 1])
    assert max(largest_number(fed, party) for party in fed.population) < 5


@pytest.mark.parametrize("method", METHODS)
def test_every_party_resets_once_and_is_evaluated_with_the_global_model_until_then(method: str) -> None:
    fed = federation(method, count=3)
    resets: dict[str, list[bool]] = {party: [] for party in fed.population}
    with pytest.warns(DescantWarning, match="collapsed"):
        trained = {party for one in fed.rounds(RUIN + (method == "FedPer")) for party in one.round.accepted}
        for one in fed.rounds(10):
            for party in one.round.accepted:
                task = fed.engine_.sent[party, one.index]  # type: ignore[attr-defined]
                resets[party].append(task.settings.get("reset", False))
                begins = torch.equal(
                    task.arrays.get("personal", task.arrays["global_model"]), task.arrays["global_model"]
                )
                assert begins or not resets[party][-1]
            for party in trained:
                if not resets[party]:
                    assert torch.equal(
                        torch.cat([p.view(-1) for p in fed.models_[party].parameters()]), fed.state.global_model
                    )
    assert trained == {*fed.population}
    assert all(one == [True] + [False] * (len(one) - 1) for one in resets.values())
    assert "reset" not in fed.state.server_state


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("stop", [6, 7, 8])
def test_neither_batching_nor_a_resume_changes_a_rollback(method: str, stop: int, tmp_path: Path) -> None:
    with pytest.warns(DescantWarning, match="collapsed"):
        whole = federation(method, count=3).fit(11, progress=False)
        federation(method, count=3).fit(stop, progress=False).save(tmp_path / "run")
        again = federation(method, batch_count=3, count=3).load(tmp_path / "run").fit(11 - stop, progress=False)
    assert again.hash() == whole.hash()


@dataclass(frozen=True)
class Back:
    """A tuner that halves the global model before some rounds."""

    at: tuple[int, ...]

    def __call__(self, context: TuneContext) -> TuneResult:
        return TuneResult(
            context.hyper, {}, global_model=context.global_model / 2 if context.round in self.at else None
        )


def rolling_back(base: Algorithm, at: tuple[int, ...], engine: object = BytesEngine, **settings: object) -> Federation:
    algorithm = replace(base, tune=Back(at), **settings)  # type: ignore[arg-type]
    return Federation(network(), classification_parties(5), algorithm, lr=0.1, steps=3, batch=4, seed=7, engine=engine)  # type: ignore[arg-type]


class Repeating(BytesEngine):
    """Check that a task that is sent again is the same."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.asked: dict[tuple[str, int], Task] = {}

    def submit(self, tasks: Sequence[Task]) -> None:
        for task in tasks:
            first = self.asked.setdefault((task.party, task.round), task)
            assert {**first.settings} == {**task.settings}
            assert all(torch.equal(first.arrays[name], tensor) for name, tensor in task.arrays.items())
        super().submit(tasks)


@pytest.mark.parametrize("base", [algorithms.FedBuff(2), replace(algorithms.FedAvgPlus(), quorum=2, max_staleness=9)])
def test_pending_tasks_are_sent_again_unchanged(base: Algorithm, tmp_path: Path) -> None:
    """Parties with pending tasks during one or two rollbacks reset by their next task."""
    matched = algorithms.RepresentationMatching(base)
    clock = VirtualClock({"0": 0.2, "1": 3.0, "2": 0.4}, engine=Repeating)
    whole = rolling_back(matched, (4, 6), clock).fit(12, progress=False)
    for stop in range(3, 10):
        rolling_back(matched, (4, 6), clock).fit(stop, progress=False).save(tmp_path / f"{stop}")
        again = rolling_back(matched, (4, 6), clock).load(tmp_path / f"{stop}").fit(12 - stop, progress=False)
        assert again.hash() == whole.hash()


def test_a_deposited_coreset_survives_a_rollback() -> None:
    base = algorithms.CoresetProxies(algorithms.RepresentationMatching(), share=0.5)
    fed = rolling_back(base, (4,), participation=algorithms.Dropouts({"1": 3}))
    before = [{**fed.fit(1, progress=False).engine_.party_states.get("0")} for _ in range(4)]
    assert "coreset.rows" in before[0] and torch.equal(before[2]["coreset.rows"], before[3]["coreset.rows"])
    assert [entry["presence"][1] for entry in fed.history_] == ["p", "p", "p", "s"]  # and its proxy trains on it


def test_a_reset_party_trains_like_a_new_one_and_keeps_nothing_if_it_diverges() -> None:
    """It does not fall back to the state that was reset."""
    fed = rolling_back(algorithms.RepresentationMatching(), ()).fit(2, progress=False)
    plan = fed.plan_
    state = fed.engine_.party_states.get("0")
    (task,) = make_tasks(plan, fed.state, {"0": plan.solver.hyper}, kind="train", index=3)

    def next_state(before: NamedTensors, **settings: object) -> NamedTensors | None:
        ((reply, after),) = perform_tasks(plan, [replace(task, settings={**task.settings, **settings})], [before])
        assert reply.status == "ok"
        return after

    reset = next_state(state, reset=True)
    first = next_state({})
    again = next_state(state)
    assert reset and first and again
    assert torch.equal(reset["private.matching"], first["private.matching"])
    assert not torch.equal(again["private.matching"], first["private.matching"])
    assert next_state(state, lr=1e30, reset=True) == {} and next_state(state, lr=1e30) is None
