"""A run is an iterator of rounds: recording is the loop's body, stopping is `break`, resuming is starting from a state.

for round in run(plan, engine, begin(plan), rounds=50):
    print(round.index, round.accepted, round.gap)
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from . import seeds
from .algorithms.pieces import fixed
from .core import Engine, Hyper, Kind, Memory, Report, Task, Tuned, Tuning
from .errors import DescantError, SettingError
from .flat import ONE_AT_A_TIME
from .gate import Gate, Refusal, finite
from .gauges import Gauges, gauged, reach
from .piece import VALIDATION, Plan, check_labels, loss_on
from .settings import check
from .state import Judged, Round, State, feedback_of, judgements_of
from .store import PartyStore

__all__ = ["Judged", "Round", "State", "begin", "gather", "models_of", "own_row", "possible_ways", "run", "tasks_for"]


@torch.inference_mode(False)
@torch.enable_grad()
def begin(plan: Plan) -> State:
    """The state before the first round; a model, a loss or a setting that cannot work is an error here."""
    check(plan.algorithm, plan.algorithm.name)
    if plan.budget < 0:
        raise SettingError(f"The budget for party state must be >= 0 bytes. Got {plan.budget}.")
    way = next(way for way, reason in possible_ways(plan).items() if not reason)
    check_labels(plan)
    row = plan.net.row()
    first = State(0, row, row, way, PartyStore(plan.budget))
    first = replace(first, feedback=_validated(plan, first, row))
    with torch.no_grad():
        _rehearse(plan, row, plan.solver.hyper)
        _tuned(plan, first, 1)
    return first


@torch.inference_mode(False)
@torch.enable_grad()
def possible_ways(plan: Plan) -> dict[str, str]:
    """The solver's ways to compute a stack of as many parties as the first round has; a bad model is an error here."""
    sizes = plan.people.samples
    rng = seeds.stream(plan.seed, 1, seeds.EVERYBODY, "attend")
    present = plan.algorithm.attend(plan.people.names, plan.solver.hyper, rng)
    with ONE_AT_A_TIME:
        largest = plan.people[max(sizes, key=sizes.__getitem__)]
        return plan.solver.ways(plan.net, plan.loss, plan.terms, largest, len(present))


def _rehearse(plan: Plan, row: Tensor, hyper: Hyper) -> None:
    """Every answer once, on two copies of the first model: what does not fit the model is found before the work."""
    algorithm, size = plan.algorithm, plan.net.layout.size
    names = [term.name for term in plan.terms]
    if len(set(names)) < len(names):
        raise SettingError(f"The terms of {algorithm.name} must have names of their own. Got {names}.")
    if set(plan.private) >= set(plan.net.layout.layers):
        raise SettingError(f"All layers of the model are private in {algorithm.name}: nothing is left to share.")
    if algorithm.over == "all" and algorithm.keep is None:
        raise SettingError(f"{algorithm.name} aggregates over all, but its parties keep no models of their own.")
    rows = row.repeat(2, 1)
    try:
        algorithm.start(rows, rows)
        if algorithm.pull is not None:
            algorithm.pull.anchor(rows[:, :size], rows[:, :size], 1, ["", ""])
        point = algorithm.aggregate(rows[:, :size], torch.ones(2)).point
        algorithm.advance(row[:size], point, {}, 1.0)
        if algorithm.keep is not None:
            algorithm.keep(rows, row, hyper)
    except DescantError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise SettingError(f"{algorithm.name} does not fit a model of {size} parameters: {reason}") from error


def run(plan: Plan, engine: Engine, state: State, rounds: int, judge: Collection[int] = ()) -> Iterator[Round]:
    """The rounds that follow a state, one at a time; in those of ``judge`` parties judge their own local work."""
    gate = Gate(plan.net.layout, plan.people, plan.private, plan.algorithm.max_staleness)
    for index in range(state.round + 1, state.round + rounds + 1):
        began = time.perf_counter()
        engine.memory.rollback(state.round)  # of a round that was broken off
        state.own.rollback(state.round)
        found = _round(plan, engine, gate, state, index, index in judge)
        engine.memory.commit(index, found.accepted)
        state.own.commit(index, found.accepted)
        state = found.state
        yield replace(found, seconds=time.perf_counter() - began)


def _round(plan: Plan, engine: Engine, gate: Gate, state: State, index: int, judge: bool) -> Round:
    """tune -> attend -> tasks -> reports -> outcome; what parties keep of it is staged."""
    algorithm, d = plan.algorithm, plan.net.layout.size
    tuned, state = _tuned(plan, state, index)
    rng = seeds.stream(plan.seed, index, seeds.EVERYBODY, "attend")
    present = algorithm.attend(engine.members(), tuned.hyper, rng)
    tasks = list(tasks_for(plan, state, present, "train", index, judge))
    gate.changes_from = state.center if algorithm.report == "change" else None
    accepted, refusals = _hear(engine, gate, tasks, index)
    outcome = _settled(plan, state, tuned.hyper, accepted)
    counted = tuple([] if outcome.note else [report.party for report in accepted])
    came = reach(algorithm, [task.arrays["own"] for task in tasks if "own" in task.arrays], state.center, d)
    attended = state.attended(plan).clone()
    attended.numpy()[[plan.places[party] for party in counted]] += 1
    judged = judgements_of(accepted, index) if judge and counted else {}
    after = replace(
        state,
        round=index,
        center=outcome.center,
        memories={"tune": tuned.memory, "advance": outcome.memory, "attend": {"rounds": attended}},
        feedback={**feedback_of(accepted), **_validated(plan, state, outcome.center)},
        judged={**state.judged, **judged} if judged else state.judged,
    )
    change = float(torch.linalg.vector_norm(outcome.center - state.center))
    norm = float(torch.linalg.vector_norm(outcome.center))
    note = outcome.note + (f" ({refusals[0]})" if refusals and not accepted else "")
    gauges = Gauges()
    if outcome.models is not None and outcome.kept is not None:
        gauges = gauged(algorithm, outcome.models, outcome.kept, outcome.center, d)
    gauges = gauges.reaching(came)
    tuning = {} if algorithm.tune is fixed else {**vars(tuned.hyper), **tuned.numbers}
    told = (outcome.gap, change, 0.0, note, norm, gauges, tuple(judged), tuning, tuned.note)
    return Round(index, after, present, counted, tuple(refusals), *told)


def _tuned(plan: Plan, state: State, index: int) -> tuple[Tuned, State]:
    """What the tuner says before a round, and the state to go on from: it may go back to another centre.

    What the server remembers of its moves is then forgotten: they led away from there.
    """
    rng = seeds.stream(plan.seed, index, seeds.EVERYBODY, "tune")
    memory = state.memories.get("tune", {})
    tuned = plan.algorithm.tune(Tuning(index, plan.solver.hyper, memory, state.feedback, state.center, rng))
    if tuned.center is None:
        return tuned, state
    memories = {answer: memory for answer, memory in state.memories.items() if answer != "advance"}
    return tuned, replace(state, center=tuned.center, memories=memories, feedback={})


def _validated(plan: Plan, before: State, center: Tensor) -> dict[str, float]:
    """The loss of the new centre on the server's own set, where there is one; a centre that stayed keeps its loss."""
    if plan.people.validation is None:
        return {}
    known = before.feedback.get(VALIDATION)
    if known is None or not torch.equal(center, before.center):
        known = loss_on(plan, center, *plan.people.validation)
    return {VALIDATION: known}


def tasks_for(
    plan: Plan,
    state: State,
    present: Mapping[str, Hyper] | Sequence[str],
    kind: Kind,
    index: int,
    judge: bool = False,
) -> Iterator[Task]:
    """One task a party: the centre, its own model where it has one, and the numbers of the round."""
    common: dict[str, Any] = {"seed": plan.seed, "way": state.way, "layout": plan.net.layout.digest}
    if judge:
        common["judge"] = True
    for party in present:
        arrays = {"center": state.center}
        if plan.algorithm.keep is not None:
            arrays["own"] = own_row(plan, state, party, training=kind == "train")
        hyper: dict[str, Any] = {}
        if isinstance(present, Mapping):
            hyper = {"lr": float(present[party].lr), "work": int(present[party].work)}
        yield Task(party, index, kind, arrays, {**common, **hyper})


def own_row(plan: Plan, state: State, party: str, training: bool) -> Tensor:
    """w_k. A party that never trained begins as the algorithm's `newcomer` says, and is judged by w̃ (ERRATA 15)."""
    row = state.own.get(party).get("model")
    if row is not None:
        return row
    return state.initial if training and plan.algorithm.newcomer == "initial" else state.center


def gather(engine: Engine, tasks: Sequence[Task]) -> Iterator[Report]:
    """What comes while answers to these tasks are owed; a party that misses its deadline is reported lost."""
    engine.submit(tasks)
    waiting = {(task.party, task.round, task.kind): task for task in tasks}
    began = time.monotonic()
    while waiting:
        left = began + max(task.deadline for task in waiting.values()) - time.monotonic()
        reports = engine.collect(left) if left > 0 else []
        if not reports:
            break
        for found in reports:
            report = found if isinstance(found, Report) else _no_report(found)
            if isinstance(report.party, str) and isinstance(report.round, int) and isinstance(report.kind, str):
                waiting.pop((report.party, report.round, report.kind), None)
            yield report
    for task in waiting.values():
        yield Report(task.party, task.round, task.kind, "lost", reason="no answer before the deadline")


def _no_report(found: object) -> Report:
    reason = f"the engine handed over {type(found).__name__} in place of a report"
    return Report("", -1, "train", "error", reason=reason)


def _hear(engine: Engine, gate: Gate, tasks: Sequence[Task], index: int) -> tuple[list[Report], list[Refusal]]:
    gate.expect(tasks, index)
    accepted: dict[str, Report] = {}
    refusals = []
    for report in gather(engine, tasks):
        refusal = gate.admit(report, index)
        if refusal is not None:
            refusals.append(refusal)
        elif report.party not in accepted or accepted[report.party].round < report.round:
            accepted[report.party] = report  # of a late answer and one in time, the newer counts
    order = {task.party: i for i, task in enumerate(tasks)}
    return sorted(accepted.values(), key=lambda r: (order.get(r.party, len(order)), r.party)), refusals


@dataclass(frozen=True)
class _Outcome:
    center: Tensor
    memory: Memory
    gap: float = 0.0
    note: str = ""
    models: Tensor | None = None  # [K, width] as they were reported
    kept: Tensor | None = None  # [K, width] what their parties keep


def _settled(plan: Plan, state: State, hyper: Hyper, accepted: Sequence[Report]) -> _Outcome:
    """What came of the reports; a centre that fails on them (numbers that overflow, say) leaves the model unchanged.

    What can only be a mistake in the code (a TypeError, say) ends the run.
    """
    try:
        with torch.inference_mode(False), torch.no_grad():
            return _settle(plan, state, hyper, accepted)
    except (DescantError, ArithmeticError, RuntimeError, ValueError) as error:
        state.own.rollback(state.round)
        reason = f"{type(error).__name__}: {error}"
        return _Outcome(state.center, state.memories.get("advance", {}), note=f"the model is unchanged: {reason}")


def _settle(plan: Plan, state: State, hyper: Hyper, accepted: Sequence[Report]) -> _Outcome:
    """aggregate -> advance -> keep: the new centre, and what each party keeps (staged)."""
    algorithm, size, memory = plan.algorithm, plan.net.layout.size, state.memories.get("advance", {})
    if not accepted:
        return _Outcome(state.center, memory, note="no report was accepted: the model is unchanged")
    models = models_of(plan, state, accepted)  # [K, width]
    weights = algorithm.weigh([report.metrics for report in accepted])
    everybody, all_weights = _with_absent(plan, state, accepted, models, weights)
    aggregated = algorithm.aggregate(everybody[:, :size], all_weights)
    share = min(1.0, sum(report.metrics["samples"] for report in accepted) / plan.samples)
    point, remembered = algorithm.advance(state.center[:size], aggregated.point, memory, share)
    center = point
    if everybody.shape[1] > size:
        center = torch.cat([point, algorithm.statistics(everybody[:, size:], all_weights).point])
    if not finite(center):
        return _Outcome(state.center, memory, note="the aggregate is not finite: the model is unchanged")
    kept = center.expand_as(models)
    if algorithm.keep is not None:
        kept = algorithm.keep(models, center, hyper)
        for report, row in zip(accepted, kept, strict=True):
            state.own.stage(report.party, {"model": row})
    return _Outcome(center, remembered, aggregated.gap, models=models, kept=kept)


def models_of(plan: Plan, state: State, accepted: Sequence[Report]) -> Tensor:
    """The reported models as rows; columns that are private to their party keep the centre's values."""
    models = state.center.new_empty(len(accepted), len(state.center))
    if plan.private:
        models[:] = state.center
    for name in accepted[0].arrays:  # the gate lets only whole models through: all have the same names
        begin, end = plan.net.layout.range_of(name)
        columns = models[:, begin:end]
        torch.stack([report.arrays[name].detach().reshape(-1) for report in accepted], out=columns)
        if plan.algorithm.report == "change":
            columns += state.center[begin:end]
    return models


def _with_absent(
    plan: Plan, state: State, accepted: Sequence[Report], models: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """A over all W^t instead of S_t (ERRATA 14): absent parties count with their last model, and with weight 1."""
    if plan.algorithm.over == "active":
        return models, weights
    heard = {report.party: i for i, report in enumerate(accepted)}
    rows = [models[heard[p]] if p in heard else own_row(plan, state, p, training=True) for p in plan.people]
    return torch.stack(rows), torch.ones(len(rows), dtype=weights.dtype)
