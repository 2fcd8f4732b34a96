"""A return to an earlier centre: what parties keep for themselves came of the rounds that are given up, and goes."""

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
    """In one round all parties take one step, so large that models and memories are ruined, and stay finite."""

    def __init__(self, plan: Plan, pieces: int = 1) -> None:
        super().__init__(plan, pieces)
        self.told: dict[tuple[str, int], Task] = {}

    def submit(self, tasks: Sequence[Task]) -> None:
        self.told |= {(task.party, task.round): task for task in tasks if task.kind == "train"}
        super().submit([self._large(t) if (t.kind, t.round) == ("train", RUIN) else t for t in tasks])

    def _large(self, task: Task) -> Task:
        return replace(task, settings={**task.settings, "lr": 300.0, "work": 1})


METHODS: dict[str, Algorithm] = {
    "matching": algorithms.RepresentationMatching(),
    "Fed+": algorithms.FedAvgPlus(alpha=0.003),
    "FedPer": algorithms.FedPer(),
    "matching of Fed+": algorithms.RepresentationMatching(algorithms.FedGeoMedPlus(alpha=0.003, rho=0.1)),
}


def federation(method: str, pieces: int = 1, attend: int = 5) -> Federation:
    """FedPer is judged by clients: without a head of their own a centre cannot be validated."""
    reward = {"reward": "clients", "measure": 100} if method == "FedPer" else {}
    algorithm = algorithms.AdaptiveHyper(METHODS[method], lr=(0.05, 0.1, 0.2), work=(2, 4, 8), **reward)  # type: ignore[arg-type]
    engine = partial(Reckless, pieces=pieces)
    return Federation(
        network(),
        population_with_validation(),
        algorithm,
        lr=0.1,
        steps=3,
        batch=4,
        seed=2,
        engine=engine,
        participation=attend,
    )


def kept(fed: Federation, party: str) -> float:
    """The largest number that a party keeps for itself."""
    tensors = [*fed.models_[party].state_dict().values(), *fed.engine_.party_states.get(party).values()]
    return max(float(tensor.abs().max()) for tensor in tensors)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("attend", [5, 3])
def test_training_recovers_from_an_injected_collapse(method: str, attend: int) -> None:
    """Not the centre alone is brought back: θ and own models would ruin the next round, and so on."""
    fed = federation(method, attend=attend)
    late = method == "FedPer"
    with pytest.warns(DescantWarning, match=f"Round {RUIN + 1 + late}: it collapsed at round {RUIN}"):
        fed.fit(RUIN, progress=False)
        ruined = max(kept(fed, party) for party in fed.population)
        fed.fit(30, progress=False)
    losses = [entry["received_loss" if late else "validation"] for entry in fed.history_]
    assert losses[RUIN - 1 + late] > 3 * losses[RUIN - 2] and ruined > 20
    assert [entry["round"] for entry in fed.history_ if "rolled_back" in entry] == [RUIN + 1 + late]
    assert losses[-1] < 1.1 * min(losses[: RUIN - 1])
    assert max(kept(fed, party) for party in fed.population) < 5


@pytest.mark.parametrize("method", METHODS)
def test_everybody_is_told_once_whenever_it_comes_and_is_judged_by_the_centre_until_then(method: str) -> None:
    fed = federation(method, attend=3)
    told: dict[str, list[bool]] = {party: [] for party in fed.population}
    with pytest.warns(DescantWarning, match="collapsed"):
        trained = {party for one in fed.rounds(RUIN + (method == "FedPer")) for party in one.round.accepted}
        for one in fed.rounds(10):
            for party in one.round.accepted:
                task = fed.engine_.told[party, one.index]  # type: ignore[attr-defined]
                told[party].append(task.settings.get("reset", False))
                begins = torch.equal(
                    task.arrays.get("personal", task.arrays["global_model"]), task.arrays["global_model"]
                )
                assert begins or not told[party][-1]
            for party in trained:
                if not told[party]:
                    assert torch.equal(
                        torch.cat([p.view(-1) for p in fed.models_[party].parameters()]), fed.state.global_model
                    )
    assert trained == {*fed.population}
    assert all(one == [True] + [False] * (len(one) - 1) for one in told.values())
    assert "reset" not in fed.state.server_state


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("stop", [6, 7, 8])
def test_neither_the_cut_nor_a_resume_changes_a_return(method: str, stop: int, tmp_path: Path) -> None:
    with pytest.warns(DescantWarning, match="collapsed"):
        whole = federation(method, attend=3).fit(11, progress=False)
        federation(method, attend=3).fit(stop, progress=False).save(tmp_path / "run")
        again = federation(method, pieces=3, attend=3).load(tmp_path / "run").fit(11 - stop, progress=False)
    assert again.hash() == whole.hash()


# ── a return that any tuner may ask for ───────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Back:
    """Goes half of the way back to 0 before some rounds."""

    at: tuple[int, ...]

    def __call__(self, tuning: TuneContext) -> TuneResult:
        return TuneResult(tuning.hyper, {}, global_model=tuning.global_model / 2 if tuning.round in self.at else None)


def returning(base: Algorithm, at: tuple[int, ...], engine: object = BytesEngine, **settings: object) -> Federation:
    algorithm = replace(base, tune=Back(at), **settings)  # type: ignore[arg-type]
    return Federation(network(), classification_parties(5), algorithm, lr=0.1, steps=3, batch=4, seed=7, engine=engine)  # type: ignore[arg-type]


class Repeating(BytesEngine):
    """A task that comes again is the same."""

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
def test_work_that_is_on_its_way_is_asked_for_again_as_it_was(base: Algorithm, tmp_path: Path) -> None:
    """Whoever is at work when it goes back, once or twice, hears of it by the next task."""
    matched = algorithms.RepresentationMatching(base)
    clock = VirtualClock({"0": 0.2, "1": 3.0, "2": 0.4}, engine=Repeating)
    whole = returning(matched, (4, 6), clock).fit(12, progress=False)
    for stop in range(3, 10):
        returning(matched, (4, 6), clock).fit(stop, progress=False).save(tmp_path / f"{stop}")
        again = returning(matched, (4, 6), clock).load(tmp_path / f"{stop}").fit(12 - stop, progress=False)
        assert again.hash() == whole.hash()


def test_what_a_party_has_left_behind_is_kept() -> None:
    base = algorithms.CoresetProxies(algorithms.RepresentationMatching(), share=0.5)
    fed = returning(base, (4,), attend=algorithms.Dropouts({"1": 3}))
    before = [{**fed.fit(1, progress=False).engine_.party_states.get("0")} for _ in range(4)]
    assert "coreset.rows" in before[0] and torch.equal(before[2]["coreset.rows"], before[3]["coreset.rows"])
    assert [entry["presence"][1] for entry in fed.history_] == ["p", "p", "p", "s"]  # and serves its stand-in


def test_who_begins_anew_works_as_one_that_never_did_and_has_nothing_if_it_diverges() -> None:
    """It does not fall back on what was to be forgotten."""
    fed = returning(algorithms.RepresentationMatching(), ()).fit(2, progress=False)
    plan = fed.plan_
    memory = fed.engine_.party_states.get("0")
    (task,) = make_tasks(plan, fed.state, {"0": plan.solver.hyper}, kind="train", index=3)

    def kept(memory: NamedTensors, **said: object) -> NamedTensors | None:
        ((report, found),) = perform_tasks(plan, [replace(task, settings={**task.settings, **said})], [memory])
        assert report.status == "ok"
        return found

    anew = kept(memory, anew=True)
    first = kept({})
    again = kept(memory)
    assert anew and first and again
    assert torch.equal(anew["private.matching"], first["private.matching"])
    assert not torch.equal(again["private.matching"], first["private.matching"])
    assert kept(memory, lr=1e30, anew=True) == {} and kept(memory, lr=1e30) is None
