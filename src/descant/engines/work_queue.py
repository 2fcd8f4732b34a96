"""What workers owe a round: pieces, and what becomes of one whose worker died."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from ..core.algorithm import Memory
from ..core.interfaces import Store
from ..core.messages import Report, Status, Task
from ..rounds.party_side import Answer
from ..serialization.wire import parcel_of

NUMBER = partial(next, itertools.count())
"""A number that nothing else in this process has."""

_TRIES = 2
_ADVICE = "Use fewer workers, smaller batches or a smaller model, or leave the party out."


class Submitted(Protocol):
    """The tasks of one `submit`, and what their parties remember."""

    @property
    def tasks(self) -> Sequence[Task]: ...
    @property
    def memories(self) -> Sequence[Memory]: ...


All = TypeVar("All", bound=Submitted)


@dataclass(eq=False)
class Piece(Generic[All]):
    """Some of the tasks of one `submit`, for one worker."""

    of: All
    rows: range
    deaths: int = 0
    number: int = field(default_factory=NUMBER)
    begun: float = field(default_factory=time.monotonic)

    @property
    def tasks(self) -> Sequence[Task]:
        return self.of.tasks[self.rows.start : self.rows.stop]

    @property
    def memories(self) -> Sequence[Memory]:
        return self.of.memories[self.rows.start : self.rows.stop]

    def overdue(self) -> bool:
        """Whether its deadline is over, or so near that whoever waits for it, who began a little earlier, has left."""
        return time.monotonic() - self.begun > 0.95 * max(task.deadline for task in self.tasks)

    def anew(self, rows: range, deaths: int) -> Piece[All]:
        """These rows once more: what was asked before is not answered by it."""
        return replace(self, rows=rows, deaths=deaths, number=NUMBER(), begun=time.monotonic())


class Owed(Generic[All]):
    """The pieces that answers are owed for, those of them that wait for a worker, and the answers that came."""

    def __init__(self, pieces: Sequence[Piece[All]] = ()) -> None:
        self.pieces: dict[int, Piece[All]] = {}
        self.waiting: deque[Piece[All]] = deque()
        self.answers: list[Answer] = []
        self.add(pieces)

    def __bool__(self) -> bool:
        return bool(self.pieces or self.answers)

    def add(self, pieces: Sequence[Piece[All]]) -> None:
        self.pieces |= {piece.number: piece for piece in pieces}
        self.waiting.extendleft(reversed(pieces))

    def again(self, piece: Piece[All], why: str) -> None:
        """A piece whose worker died is repeated, then cut in two, and a party that does it alone is given up."""
        if self.pieces.pop(piece.number, None) is None:
            return
        if piece.deaths < _TRIES:
            self.add([piece.anew(piece.rows, piece.deaths)])
        elif len(piece.rows) > 1:
            middle = (piece.rows.start + piece.rows.stop) // 2
            halves = (range(piece.rows.start, middle), range(middle, piece.rows.stop))
            self.add([piece.anew(half, deaths=1) for half in halves])
        else:
            self.refuse(piece, "lost", f"{why}. {_ADVICE}")

    def refuse(self, piece: Piece[All], status: Status, reason: str) -> None:
        """Say of every task of a piece that there is no answer."""
        self.answers += [(Report(t.party, t.round, t.kind, status, reason=reason), None) for t in piece.tasks]
        self.pieces.pop(piece.number, None)

    def answer(self, piece: Piece[All], answers: Sequence[Answer]) -> None:
        """The answers to a piece, if they are still wanted."""
        if piece.number in self.pieces:
            self.answers += answers
            del self.pieces[piece.number]  # last: an interrupt must not lose them

    def reports(self, memory: Store) -> list[Report]:
        """What has come; what parties remember goes into the store."""
        answers, self.answers = self.answers, []
        for report, kept in answers:
            if kept is not None:
                memory.stage(report.party, kept)
        return [report for report, _ in answers]


def answer_of(fields: Mapping[str, Any], arrays: Mapping[str, Tensor]) -> Answer:
    """A report and what its party remembers, as a worker wrote them."""
    memory = fields["memory"]
    kept = None if memory is None else {name: arrays[key] for name, key in memory.items()}
    return parcel_of(fields["report"], arrays, Report), kept
