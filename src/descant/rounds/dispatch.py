"""Send the tasks of a round and collect the replies, each validated."""

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
"""The metric with the arrival time of a reply, in seconds of the engine's clock."""


def make_tasks(
    plan: Plan,
    state: State,
    participants: Mapping[str, Hyper] | Sequence[str],
    kind: TaskKind,
    index: int,
    party_settings: Mapping[str, Mapping[str, Any]] | None = None,
) -> Iterator[Task]:
    """Yield one task a party: the global model, the personal model if there is one, and the round's settings.

    ``party_settings`` are further settings by party.
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
    """Return w_k in a round; a party that never trained starts by `newcomer_model` and is evaluated with w̃ (ERRATA 15).

    A party marked for a reset has w̃.
    """
    if rollback.needs_reset(plan, state, party, index):
        return state.global_model
    row = state.personal_models.get(party).get("model")
    if row is not None:
        return row
    return state.initial_model if training and plan.algorithm.newcomer_model == "initial" else state.global_model


def never_enough() -> bool:
    """Wait for all replies."""
    return False


def iterate_replies(
    engine: Engine, tasks: Sequence[Task], has_enough: Callable[[], bool] = never_enough
) -> Iterator[Reply]:
    """Yield replies until every task is answered; a party that misses its deadline is reported lost.

    It ends earlier once ``has_enough`` is true: other parties then continue their tasks. Coreset proxies are awaited.
    """
    engine.submit(tasks)
    outstanding = {(task.party, task.round, task.kind): task for task in tasks}
    started = time.monotonic()
    while outstanding and not (has_enough() and all(kind == "train" for _, _, kind in outstanding)):
        remaining = started + max(task.deadline for task in outstanding.values()) - time.monotonic()
        replies = engine.collect(remaining) if remaining > 0 else []
        if not replies:
            for task in outstanding.values():
                yield Reply(task.party, task.round, task.kind, status="lost", reason="no reply before the deadline")
            return
        for received in replies:
            reply = received if isinstance(received, Reply) else _invalid_reply(received)
            if isinstance(reply.party, str) and isinstance(reply.round, int) and isinstance(reply.kind, str):
                outstanding.pop((reply.party, reply.round, reply.kind), None)
            yield reply


def _invalid_reply(received: object) -> Reply:
    reason = f"the engine returned {type(received).__name__} instead of a reply"
    return Reply("", -1, "train", status="error", reason=reason)


@dataclass(frozen=True)
class CollectedReplies:
    """The replies to the tasks of a round."""

    accepted: list[Reply]  # in the order of the tasks
    rejections: list[Rejection]
    pending: list[Task]  # tasks without a reply when the quorum was reached
    clock: float  # arrival of the last reply, if the engine has a clock


def collect_replies(
    engine: Engine, validator: UpdateValidator, tasks: Sequence[Task], index: int, quorum: int | None
) -> CollectedReplies:
    """Send tasks and collect the replies that pass validation."""
    validator.expect(tasks, index)
    accepted: dict[str, Reply] = {}
    rejections = list[Rejection]()
    finished = set[tuple[str, int]]()
    clock = 0.0

    def enough() -> bool:
        return quorum is not None and sum(reply.kind == "train" for reply in accepted.values()) >= quorum

    for reply in iterate_replies(engine, tasks, enough):
        rejection = validator.validate(reply, index)
        clock = max(clock, _arrival_time(reply))
        if rejection is not None:
            rejections.append(rejection)
            finished.add((rejection.party, rejection.round))
            continue
        finished.add((reply.party, reply.round))
        if reply.party not in accepted or accepted[reply.party].round < reply.round:
            accepted[reply.party] = reply  # of a late reply and one in time, the newer counts
    order = {task.party: i for i, task in enumerate(tasks)}
    in_order = sorted(accepted.values(), key=lambda r: (order.get(r.party, len(order)), r.party))
    pending = [task for task in tasks if (task.party, task.round) not in finished]
    return CollectedReplies(in_order, rejections, pending, clock=clock)


def _arrival_time(reply: Reply) -> float:
    arrival = reply.metrics.get(ARRIVAL_TIME, 0.0) if isinstance(reply.metrics, Mapping) else 0.0
    return arrival if isinstance(arrival, float) and math.isfinite(arrival) else 0.0
