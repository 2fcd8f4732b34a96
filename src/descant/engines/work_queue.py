"""Pieces of a round's work for worker processes, and their retries after a worker has died."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from ..core.algorithm import NamedTensors
from ..core.interfaces import Store
from ..core.messages import Reply, Status, Task
from ..rounds.party_side import TaskResult
from ..serialization.wire import from_fields

next_id = partial(next, itertools.count())
"""Return a number that is unique in this process."""

_MAX_DEATHS = 2  # workers that may die on a piece before it is split
_ADVICE = "Use fewer workers, smaller batches or a smaller model, or leave the party out."


class TaskBatch(Protocol):
    """The tasks of one `submit` with their parties' states."""

    @property
    def tasks(self) -> Sequence[Task]: ...
    @property
    def party_states(self) -> Sequence[NamedTensors]: ...


BatchT = TypeVar("BatchT", bound=TaskBatch)


@dataclass(eq=False)
class WorkPiece(Generic[BatchT]):
    """Some of the tasks of one `submit`, for one worker."""

    batch: BatchT
    rows: range
    deaths: int = 0
    number: int = field(default_factory=next_id)
    started: float = field(default_factory=time.monotonic)

    @property
    def tasks(self) -> Sequence[Task]:
        return self.batch.tasks[self.rows.start : self.rows.stop]

    @property
    def party_states(self) -> Sequence[NamedTensors]:
        return self.batch.party_states[self.rows.start : self.rows.stop]

    def is_overdue(self) -> bool:
        """Return whether 95 % of the deadline have passed: a margin, because the round began to wait earlier."""
        return time.monotonic() - self.started > 0.95 * max(task.deadline for task in self.tasks)

    def renumbered(self, rows: range, deaths: int) -> WorkPiece[BatchT]:
        """Return these rows as a new piece, so that a late result of the old one is ignored."""
        return replace(self, rows=rows, deaths=deaths, number=next_id(), started=time.monotonic())


class WorkQueue(Generic[BatchT]):
    """The unfinished pieces, those of them that wait for a worker, and the results that have come."""

    def __init__(self, pieces: Sequence[WorkPiece[BatchT]] = ()) -> None:
        self.pieces: dict[int, WorkPiece[BatchT]] = {}
        self.waiting: deque[WorkPiece[BatchT]] = deque()
        self.results: list[TaskResult] = []
        self.add(pieces)

    def __bool__(self) -> bool:
        return bool(self.pieces or self.results)

    def add(self, pieces: Sequence[WorkPiece[BatchT]]) -> None:
        self.pieces |= {piece.number: piece for piece in pieces}
        self.waiting.extendleft(reversed(pieces))

    def retry(self, piece: WorkPiece[BatchT], reason: str) -> None:
        """Repeat a piece whose worker died; after repeated deaths split it, or report its only party as lost."""
        if self.pieces.pop(piece.number, None) is None:
            return
        if piece.deaths < _MAX_DEATHS:
            self.add([piece.renumbered(piece.rows, piece.deaths)])
        elif len(piece.rows) > 1:
            middle = (piece.rows.start + piece.rows.stop) // 2
            halves = (range(piece.rows.start, middle), range(middle, piece.rows.stop))
            self.add([piece.renumbered(half, deaths=1) for half in halves])
        else:
            self.fail(piece, "lost", f"{reason}. {_ADVICE}")

    def fail(self, piece: WorkPiece[BatchT], status: Status, reason: str) -> None:
        """Record a failed reply for every task of a piece."""
        self.results += [(Reply(t.party, t.round, t.kind, status=status, reason=reason), None) for t in piece.tasks]
        self.pieces.pop(piece.number, None)

    def record_results(self, piece: WorkPiece[BatchT], results: Sequence[TaskResult]) -> None:
        """Record the results of a piece, unless it is no longer wanted."""
        if piece.number in self.pieces:
            self.results += results
            del self.pieces[piece.number]  # last: an interrupt must not lose the results

    def take_replies(self, party_states: Store) -> list[Reply]:
        """Return the replies that have come, and stage their party states in the store."""
        results = self.results
        self.results = []
        for reply, party_state in results:
            if party_state is not None:
                party_states.stage(reply.party, party_state)
        return [reply for reply, _ in results]


def read_task_result(fields: Mapping[str, Any], arrays: Mapping[str, Tensor]) -> TaskResult:
    """Return the reply and the party state that a worker wrote."""
    keys = fields["party_state"]
    party_state = None if keys is None else {name: arrays[key] for name, key in keys.items()}
    return from_fields(fields["reply"], arrays, Reply), party_state
