"""What workers owe a round: pieces, and what becomes of one whose worker died."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from ..core import Report, Status, Store, Task
from ..piece import Answer
from ..wire import parcel_of
from .freight import NUMBER

_TRIES = 2
_ADVICE = "Use fewer workers, smaller batches or a smaller model, or leave the party out."


class Piecemeal(Protocol):
    """A dataclass: some tasks of a round, for one worker."""

    number: int
    rows: range
    deaths: int

    @property
    def tasks(self) -> Sequence[Task]: ...


Some = TypeVar("Some", bound=Piecemeal)


class Owed(Generic[Some]):
    """The pieces that answers are owed for, those of them that wait for a worker, and the answers that came."""

    def __init__(self, pieces: Sequence[Some] = ()) -> None:
        self.pieces: dict[int, Some] = {}
        self.waiting: deque[Some] = deque()
        self.answers: list[Answer] = []
        self.add(pieces)

    def __bool__(self) -> bool:
        return bool(self.pieces or self.answers)

    def add(self, pieces: Sequence[Some]) -> None:
        self.pieces |= {piece.number: piece for piece in pieces}
        self.waiting.extendleft(reversed(pieces))

    def again(self, piece: Some, why: str) -> None:
        """A piece whose worker died is repeated, then cut in two, and a party that does it alone is given up."""
        if self.pieces.pop(piece.number, None) is None:
            return
        if piece.deaths < _TRIES:
            self.add([_anew(piece, piece.rows, piece.deaths)])
        elif len(piece.rows) > 1:
            middle = (piece.rows.start + piece.rows.stop) // 2
            halves = (range(piece.rows.start, middle), range(middle, piece.rows.stop))
            self.add([_anew(piece, half, deaths=1) for half in halves])
        else:
            self.refuse(piece, "lost", f"{why}. {_ADVICE}")

    def refuse(self, piece: Some, status: Status, reason: str) -> None:
        """Say of every task of a piece that there is no answer."""
        self.answers += [(Report(t.party, t.round, t.kind, status, reason=reason), None) for t in piece.tasks]
        self.pieces.pop(piece.number, None)

    def answer(self, piece: Some, answers: Sequence[Answer]) -> None:
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


def _anew(piece: Some, rows: range, deaths: int) -> Some:
    changes: dict[str, Any] = {"rows": rows, "deaths": deaths, "number": NUMBER(), "begun": time.monotonic()}
    return replace(piece, **changes)  # type: ignore[type-var]


def answer_of(fields: Mapping[str, Any], arrays: Mapping[str, Tensor]) -> Answer:
    """A report and what its party remembers, as a worker wrote them."""
    memory = fields["memory"]
    kept = None if memory is None else {name: arrays[key] for name, key in memory.items()}
    return parcel_of(fields["report"], arrays, Report), kept
