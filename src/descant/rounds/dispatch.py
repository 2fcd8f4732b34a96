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
from ..core.messages import Reply, Task, TaskKind
from . import rollback
from .plan import RESET, Plan
from .state import State
from .validation import Rejection, UpdateValidator

ARRIVAL_TIME = "clock"
"""The metric by which an engine with a clock says when a report came, in its own seconds."""


def make_tasks(
    plan: Plan,
    state: State,
    participants: Mapping[str, Hyper] | Sequence[str],
    kind: TaskKind,
    index: int,
    party_settings: Mapping[str, Mapping[str, Any]] | None = None,
) -> Iterator[Task]:
    """One task a party: the centre, its own model where it has one, and the numbers of the round.

    ``more`` are settings by party.
    """
    common: dict[str, Any] = {
        "seed": plan.seed,
        "execution_mode": state.execution_mode,
        "layout": plan.net.layout.digest,
    }
    for party in participants:
        arrays = {"global_model": state.global_model}
        if plan.algorithm.personalize is not None:
            arrays["personal"] = personal_row(plan, state, party, index=index, training=kind in ("train", "proxy"))
        task_settings: dict[str, Any] = {RESET: True} if rollback.needs_reset(plan, state, party, index) else {}
        if isinstance(participants, Mapping):
            task_settings |= {"lr": float(participants[party].lr), "work": int(participants[party].work)}
        yield Task(
            party,
            index,
            kind,
            arrays=arrays,
            settings={**common, **task_settings, **(party_settings or {}).get(party, {})},
            deadline=plan.deadline,
        )


def personal_row(plan: Plan, state: State, party: str, index: int, training: bool) -> Tensor:
    """w_k in a round. A party that never trained begins as the algorithm's `newcomer` says, and is judged by w̃.

    (ERRATA 15.) One that is to begin anew does so at w̃.
    """
    if rollback.needs_reset(plan, state, party, index):
        return state.global_model
    row = state.personal_models.get(party).get("model")
    if row is not None:
        return row
    return state.initial_model if training and plan.algorithm.newcomer_model == "initial" else state.global_model


def never_enough() -> bool:
    """Not before all have answered."""
    return False


def iterate_replies(
    engine: Engine, tasks: Sequence[Task], has_enough: Callable[[], bool] = never_enough
) -> Iterator[Reply]:
    """What comes while answers to these tasks are owed; a party that misses its deadline is reported lost.

    It ends before all is answered when it is told that there is enough: then others are still at work. Stand-ins are
    waited for.
    """
    engine.submit(tasks)
    outstanding = {(task.party, task.round, task.kind): task for task in tasks}
    started = time.monotonic()
    while outstanding and not (has_enough() and all(kind == "train" for _, _, kind in outstanding)):
        remaining = started + max(task.deadline for task in outstanding.values()) - time.monotonic()
        reports = engine.collect(remaining) if remaining > 0 else []
        if not reports:
            for task in outstanding.values():
                yield Reply(task.party, task.round, task.kind, status="lost", reason="no answer before the deadline")
            return
        for found in reports:
            report = found if isinstance(found, Reply) else _invalid_reply(found)
            if isinstance(report.party, str) and isinstance(report.round, int) and isinstance(report.kind, str):
                outstanding.pop((report.party, report.round, report.kind), None)
            yield report


def _invalid_reply(received: object) -> Reply:
    reason = f"the engine handed over {type(received).__name__} in place of a report"
    return Reply("", -1, "train", status="error", reason=reason)


@dataclass(frozen=True)
class CollectedReplies:
    """What came of the tasks of a round."""

    accepted: list[Reply]  # in the order of the tasks
    rejections: list[Rejection]
    pending: list[Task]  # those whose answer did not come, because others were a quorum
    clock: float  # when the last report came, if the engine has a clock


def collect_replies(
    engine: Engine, validator: UpdateValidator, tasks: Sequence[Task], index: int, quorum: int | None
) -> CollectedReplies:
    """Hand out tasks, and take in what passes the gate."""
    validator.expect(tasks, index)
    accepted: dict[str, Reply] = {}
    rejections = list[Rejection]()
    finished = set[tuple[str, int]]()
    clock = 0.0

    def enough() -> bool:
        return quorum is not None and sum(report.kind == "train" for report in accepted.values()) >= quorum

    for report in iterate_replies(engine, tasks, enough):
        rejection = validator.validate(report, index)
        clock = max(clock, _arrival_time(report))
        if rejection is not None:
            rejections.append(rejection)
            finished.add((rejection.party, rejection.round))
            continue
        finished.add((report.party, report.round))
        if report.party not in accepted or accepted[report.party].round < report.round:
            accepted[report.party] = report  # of a late answer and one in time, the newer counts
    order = {task.party: i for i, task in enumerate(tasks)}
    found = sorted(accepted.values(), key=lambda r: (order.get(r.party, len(order)), r.party))
    return CollectedReplies(found, rejections, [t for t in tasks if (t.party, t.round) not in finished], clock=clock)


def _arrival_time(report: Reply) -> float:
    arrival = report.metrics.get(ARRIVAL_TIME, 0.0) if isinstance(report.metrics, Mapping) else 0.0
    return arrival if isinstance(arrival, float) and math.isfinite(arrival) else 0.0
