"""What a round asks of its parties, and what it hears: tasks out, reports in, each past the gate."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..core.algorithm import Hyper
from ..core.interfaces import Engine
from ..core.messages import Kind, Report, Task
from . import rollback
from .plan import ANEW, Plan
from .state import State
from .validation import Gate, Refusal

CLOCK = "clock"
"""The metric by which an engine with a clock says when a report came, in its own seconds."""


def tasks_for(
    plan: Plan,
    state: State,
    present: Mapping[str, Hyper] | Sequence[str],
    kind: Kind,
    index: int,
    more: Mapping[str, Mapping[str, Any]] | None = None,
) -> Iterator[Task]:
    """One task a party: the centre, its own model where it has one, and the numbers of the round.

    ``more`` are settings by party.
    """
    common: dict[str, Any] = {"seed": plan.seed, "way": state.way, "layout": plan.net.layout.digest}
    for party in present:
        arrays = {"center": state.center}
        if plan.algorithm.keep is not None:
            arrays["own"] = own_row(plan, state, party, index, training=kind in ("train", "stand_in"))
        said: dict[str, Any] = {ANEW: True} if rollback.is_owed(plan, state, party, index) else {}
        if isinstance(present, Mapping):
            said |= {"lr": float(present[party].lr), "work": int(present[party].work)}
        yield Task(party, index, kind, arrays, {**common, **said, **(more or {}).get(party, {})}, plan.deadline)


def own_row(plan: Plan, state: State, party: str, index: int, training: bool) -> Tensor:
    """w_k in a round. A party that never trained begins as the algorithm's `newcomer` says, and is judged by w̃.

    (ERRATA 15.) One that is to begin anew does so at w̃.
    """
    if rollback.is_owed(plan, state, party, index):
        return state.center
    row = state.own.get(party).get("model")
    if row is not None:
        return row
    return state.initial if training and plan.algorithm.newcomer == "initial" else state.center


def never() -> bool:
    """Not before all have answered."""
    return False


def gather(engine: Engine, tasks: Sequence[Task], enough: Callable[[], bool] = never) -> Iterator[Report]:
    """What comes while answers to these tasks are owed; a party that misses its deadline is reported lost.

    It ends before all is answered when it is told that there is enough: then others are still at work. Stand-ins are
    waited for.
    """
    engine.submit(tasks)
    waiting = {(task.party, task.round, task.kind): task for task in tasks}
    began = time.monotonic()
    while waiting and not (enough() and all(kind == "train" for _, _, kind in waiting)):
        left = began + max(task.deadline for task in waiting.values()) - time.monotonic()
        reports = engine.collect(left) if left > 0 else []
        if not reports:
            for task in waiting.values():
                yield Report(task.party, task.round, task.kind, "lost", reason="no answer before the deadline")
            return
        for found in reports:
            report = found if isinstance(found, Report) else _no_report(found)
            if isinstance(report.party, str) and isinstance(report.round, int) and isinstance(report.kind, str):
                waiting.pop((report.party, report.round, report.kind), None)
            yield report


def _no_report(found: object) -> Report:
    reason = f"the engine handed over {type(found).__name__} in place of a report"
    return Report("", -1, "train", "error", reason=reason)


@dataclass(frozen=True)
class Heard:
    """What came of the tasks of a round."""

    accepted: list[Report]  # in the order of the tasks
    refusals: list[Refusal]
    owed: list[Task]  # those whose answer did not come, because others were a quorum
    clock: float  # when the last report came, if the engine has a clock


def hear(engine: Engine, gate: Gate, tasks: Sequence[Task], index: int, quorum: int | None) -> Heard:
    """Hand out tasks, and take in what passes the gate."""
    gate.expect(tasks, index)
    accepted: dict[str, Report] = {}
    refusals, answered, clock = list[Refusal](), set[tuple[str, int]](), 0.0

    def enough() -> bool:
        return quorum is not None and sum(report.kind == "train" for report in accepted.values()) >= quorum

    for report in gather(engine, tasks, enough):
        refusal, clock = gate.admit(report, index), max(clock, _time(report))
        if refusal is not None:
            refusals.append(refusal)
            answered.add((refusal.party, refusal.round))
            continue
        answered.add((report.party, report.round))
        if report.party not in accepted or accepted[report.party].round < report.round:
            accepted[report.party] = report  # of a late answer and one in time, the newer counts
    order = {task.party: i for i, task in enumerate(tasks)}
    found = sorted(accepted.values(), key=lambda r: (order.get(r.party, len(order)), r.party))
    return Heard(found, refusals, [t for t in tasks if (t.party, t.round) not in answered], clock)


def _time(report: Report) -> float:
    came = report.metrics.get(CLOCK, 0.0) if isinstance(report.metrics, Mapping) else 0.0
    return came if isinstance(came, float) and math.isfinite(came) else 0.0
