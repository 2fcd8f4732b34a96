"""A run is an iterator of rounds: recording is the loop's body, stopping is `break`, resuming is starting from a state.

for round in run(plan, engine, begin(plan), rounds=50):
    print(round.index, round.accepted, round.gap)
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from . import seeds
from .core import Engine, Hyper, Kind, Report, Store, Task
from .gate import Gate, Refusal
from .piece import Plan
from .settings import check
from .store import PartyStore


@dataclass(frozen=True)
class State:
    """All that a run needs to go on, beside the parties' memories, which the engine keeps."""

    round: int
    center: Tensor  # [width] w̃
    initial: Tensor  # [width] the model that everybody began with
    way: str  # how stacks are computed: chosen once, and kept on resume
    own: Store  # w_k of the parties that ever trained, where the algorithm keeps them


@dataclass(frozen=True)
class Round:
    """What happened in one round, and the state after it."""

    index: int
    state: State
    present: Mapping[str, Hyper]
    accepted: tuple[str, ...]
    refusals: tuple[Refusal, ...]
    loss: float  # mean training loss over the accepted reports
    gap: float  # the centre's distance from optimality
    change: float  # ‖w̃ after - w̃ before‖₂
    seconds: float
    note: str = ""  # why the model did not change, if it did not


def begin(plan: Plan, budget: int | None = None) -> State:
    """The state before the first round; a model, a loss or a setting that cannot work is an error here."""
    check(plan.algorithm, plan.algorithm.name)
    first = next(iter(plan.people.values()))
    base = plan.solver.hyper
    present = plan.algorithm.attend(tuple(plan.people), base, seeds.stream(plan.seed, 1, seeds.EVERYBODY, "attend"))
    way = plan.solver.choose(plan.net, plan.loss, plan.algorithm.terms, first, len(present))
    row = plan.net.row()
    return State(0, row, row, way, PartyStore() if budget is None else PartyStore(budget))


def run(plan: Plan, engine: Engine, state: State, rounds: int) -> Iterator[Round]:
    """The rounds that follow a state, one at a time."""
    gate = Gate(plan.net.layout, plan.private, plan.algorithm.max_staleness)
    for index in range(state.round + 1, state.round + rounds + 1):
        began = time.perf_counter()
        engine.memory.rollback()  # of a round that was broken off
        hyper = plan.algorithm.tune(index, plan.solver.hyper, seeds.stream(plan.seed, index, seeds.EVERYBODY, "tune"))
        rng = seeds.stream(plan.seed, index, seeds.EVERYBODY, "attend")
        present = plan.algorithm.attend(engine.members(), hyper, rng)
        tasks = tasks_for(plan, state, present, "train", index)
        gate.forget_before(index)
        accepted, refusals = _hear(engine, gate, tasks, index, plan.people)
        outcome = _settle(plan, state, hyper, accepted)
        engine.memory.commit()
        state.own.commit()
        state = replace(state, round=index, center=outcome.center)
        yield Round(
            index,
            state,
            present,
            tuple(report.party for report in accepted),
            tuple(refusals),
            _mean_loss(accepted),
            outcome.gap,
            outcome.change,
            time.perf_counter() - began,
            outcome.note + (f" ({refusals[0]})" if refusals and not accepted else ""),
        )


def tasks_for(
    plan: Plan, state: State, present: Mapping[str, Hyper] | Sequence[str], kind: Kind, index: int
) -> list[Task]:
    """One task a party: the centre, its own model where it has one, and the numbers of the round."""
    settings: dict[str, Any] = {"seed": plan.seed, "way": state.way, "layout": plan.net.layout.digest}
    tasks = []
    for party in present:
        arrays = {"center": state.center}
        if plan.algorithm.keep is not None:
            arrays["own"] = own_row(plan, state, party, training=kind == "train")
        if isinstance(present, Mapping):
            settings = {**settings, "lr": present[party].lr, "work": present[party].work}
        tasks.append(Task(party, index, kind, arrays, settings))
    return tasks


def own_row(plan: Plan, state: State, party: str, training: bool) -> Tensor:
    """w_k. A party that never trained begins as the algorithm's `newcomer` says, and is judged by w̃ (ERRATA 15)."""
    row = state.own.get(party).get("model")
    if row is not None:
        return row
    return state.initial if training and plan.algorithm.newcomer == "initial" else state.center


def gather(engine: Engine, tasks: Sequence[Task]) -> Iterator[Report]:
    """The answers to tasks as they come; a party that does not answer before its deadline is reported lost."""
    engine.submit(tasks)
    waiting = {task.party: task for task in tasks}
    while waiting:
        reports = engine.collect(max(task.deadline for task in waiting.values()))
        if not reports:
            for task in waiting.values():
                yield Report(task.party, task.round, task.kind, "lost", reason="no answer before the deadline")
            return
        for report in reports:
            waiting.pop(report.party, None)
            yield report


def _hear(
    engine: Engine, gate: Gate, tasks: Sequence[Task], index: int, known: Mapping[str, Any]
) -> tuple[list[Report], list[Refusal]]:
    asked = {task.party: task.round for task in tasks}
    accepted, refusals = [], []
    for report in gather(engine, tasks):
        refusal = gate.admit(report, index, asked, known)
        if refusal is None:
            accepted.append(report)
        else:
            refusals.append(refusal)
    order = {party: i for i, party in enumerate(asked)}
    return sorted(accepted, key=lambda report: order[report.party]), refusals


@dataclass(frozen=True)
class _Outcome:
    center: Tensor
    gap: float = 0.0
    change: float = 0.0
    note: str = ""


def _settle(plan: Plan, state: State, hyper: Hyper, accepted: Sequence[Report]) -> _Outcome:
    """aggregate -> keep: the new centre, and what each party keeps (staged)."""
    algorithm, size = plan.algorithm, plan.net.layout.size
    state.own.rollback()
    if not accepted:
        return _Outcome(state.center, note="no report was accepted: the model is unchanged")
    models = _models(plan, state, accepted)  # [K, width]
    weights = algorithm.weigh([report.metrics for report in accepted])
    everybody, all_weights = _with_absent(plan, state, accepted, models, weights)
    aggregated = algorithm.aggregate(everybody[:, :size], all_weights)
    share = (all_weights / all_weights.sum()).to(models.dtype)
    center = torch.cat([aggregated.point, share @ everybody[:, size:]])
    if algorithm.server_step != 1.0:
        center = torch.lerp(state.center, center, algorithm.server_step)
    if not torch.isfinite(center).all():
        return _Outcome(state.center, note="the aggregate is not finite: the model is unchanged")
    if algorithm.keep is not None:
        for report, row in zip(accepted, algorithm.keep(models, center, hyper), strict=True):
            state.own.stage(report.party, {"model": row})
    return _Outcome(center, aggregated.gap, float(torch.linalg.vector_norm(center - state.center)))


def _models(plan: Plan, state: State, accepted: Sequence[Report]) -> Tensor:
    """The reported models as rows; columns that are private to their party keep the centre's values."""
    models = state.center.repeat(len(accepted), 1)
    for row, report in zip(models, accepted, strict=True):
        for name, tensor in report.arrays.items():
            begin, end = plan.net.layout.range_of(name)
            if plan.algorithm.report == "change":
                row[begin:end] += tensor.reshape(-1)
            else:
                row[begin:end] = tensor.reshape(-1)
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


def _mean_loss(accepted: Sequence[Report]) -> float:
    losses = [float(report.metrics["loss"]) for report in accepted if "loss" in report.metrics]
    return math.fsum(losses) / len(losses) if losses else math.nan
