"""Pieces in worker processes, so that all cores work; between the round and a piece only bytes travel.

Model, data, algorithm and solver go to a worker by their address (see `address`), arrays by files in shared memory. A
worker that dies is named and replaced, and its piece is done again with the same result: a piece is a pure function.
Until workers have started the round is worked on here, and they start only once that has taken some seconds.
"""

from __future__ import annotations

import itertools
import os
import queue
import time
import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import torch

from ..core import Report, Store, Task
from ..errors import DescantWarning, EngineError, SettingError
from ..piece import Answer, Plan, work
from ..store import PartyStore
from ..wire import parcel_of
from .freight import NUMBER, Batch, Piece, Spelled, cut
from .pool import Member, Message, Pool
from .shelf import Shelf
from .worker import INSIDE, mark_of

_PIECE = 2**21  # bytes of models a piece: small enough that the cores end together, large enough to be worth a message
_TRIES = 2


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Processes:
    """Makes engines that share some worker processes: ``Federation(..., engine=Processes(workers=2))``.

    >>> Processes(workers=2)
    Processes(workers=2, threads=1)
    """

    def __init__(self, workers: int | None = None, threads: int | None = None) -> None:
        self.workers = cores() if workers is None else workers
        self.threads = threads if threads is not None else max(1, cores() // max(1, self.workers))
        self._pool: Pool | None = None

    def __repr__(self) -> str:
        return f"Processes(workers={self.workers}, threads={self.threads})"

    def __call__(self, plan: Plan) -> ProcessEngine:
        """An engine for one federation."""
        for name, value in (("workers", self.workers), ("threads", self.threads)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise SettingError(f"The {name!r} of Processes must be a whole number >= 1. Got {value!r}.")
        if INSIDE in os.environ:
            raise EngineError(
                "A worker process has come upon Processes itself: the script that it loads runs its work at once. "
                "Put that part of it under `if __name__ == '__main__':`."
            )
        if self.workers > cores():
            told = f"{self.workers} workers share {cores()} cores and take turns; workers={cores()} is as fast"
            warnings.warn(f"{told}, with less memory.", DescantWarning, stacklevel=2)
        spelled = Spelled.of(plan)  # what cannot travel is an error now
        if self._pool is None or self._pool.closed:
            self._pool = Pool(self.threads)
        return ProcessEngine(plan, spelled, self._pool, self.workers)

    def close(self) -> None:
        """End the workers; they also end with this process, or when nobody has this object any more."""
        if self._pool is not None:
            self._pool.close()


class ProcessEngine:
    """A `core.Engine` for one plan, on a pool of workers."""

    def __init__(self, plan: Plan, spelled: Spelled, pool: Pool, workers: int) -> None:
        self.number = NUMBER()
        self._plan, self._spelled, self._pool = plan, spelled, pool
        self._workers = min(workers, len(plan.people))  # a worker without a party would have nothing to do
        self._most = max(1, _PIECE // (plan.net.layout.width * plan.net.layout.dtype.itemsize))
        self._memory = PartyStore(plan.budget)
        self._waiting: deque[Piece] = deque()
        self._owed: dict[int, Piece] = {}
        self._answers: list[Answer] = []
        self._wrong: EngineError | None = None
        self._shelves = [Shelf(pool.folder / f"tasks-{self.number}-{side}") for side in "ab"]

    @property
    def memory(self) -> Store:
        return self._memory

    def members(self) -> Sequence[str]:
        return tuple(self._plan.people)

    def submit(self, tasks: Sequence[Task]) -> None:
        with self._pool.lock:
            self._forget()
            self._shelves.reverse()  # a worker may still read what belongs to a round that was broken off
            batch = Batch(tasks, [self._memory.get(task.party) for task in tasks], self._shelves[0])
            self._waiting = deque(Piece(self, batch, rows) for rows in cut(len(tasks), self._workers, self._most))
            self._owed = {piece.number: piece for piece in self._waiting}

    def _forget(self) -> None:
        """What is left of a round that was broken off; a worker that hangs on it is ended."""
        for member in self._pool.members:
            if member.doing and member.doing[0].engine is self and member.doing[0].overdue():
                member.process.kill()
        self._waiting, self._owed, self._answers = deque(), {}, []

    def collect(self, timeout: float) -> list[Report]:
        end = time.monotonic() + timeout
        while self._owed or self._answers:
            with self._pool.lock:
                self._hear(0)
                if self._wrong is not None:
                    raise self._wrong
                if self._answers:
                    return self._reports()
                safe = [piece for piece in self._waiting if not piece.deaths]  # others have killed a worker
                if not self._give() and safe:
                    self._work_here(safe[0])
                elif time.monotonic() < end:
                    self._hear(min(0.1, end - time.monotonic()))
                else:
                    break
        return []

    def wait(self) -> ProcessEngine:
        """Wait until every worker has started and made the plan; a round does not need it."""
        while True:
            with self._pool.lock:
                self._pool.grow(self._workers)
                self._give()
                members = self._pool.members[: self._workers]
                if all(member.plans.get(self.number) for member in members):
                    return self
                self._hear(0.1)
                if self._wrong is not None:
                    raise self._wrong

    def _give(self) -> bool:
        """Hand out what waits, two pieces a worker, so that none runs dry; whether any worker is ready."""
        if self._pool.worth_it():
            self._pool.grow(self._workers)
        members = self._pool.members[: self._workers]
        for member in members:
            if self.number not in member.plans:
                member.plans[self.number] = False
                member.say({"plan": self.number, **self._spelled.message(self._pool.folder)})
        ready = [member for member in members if member.plans[self.number]]
        for member in sorted(ready, key=lambda member: len(member.doing)) * 2:
            if self._waiting and len(member.doing) < 2:
                piece = self._waiting.popleft()
                piece.begun = time.monotonic()
                member.doing.append(piece)
                member.say(piece.message())
        return bool(ready)

    def _hear(self, timeout: float) -> None:
        """Take in what workers have said: for this engine, or for another one on the same pool."""
        try:
            member, message = self._pool.heard.get(timeout=timeout) if timeout else self._pool.heard.get_nowait()
        except queue.Empty:
            return
        if message is None:
            self._bury(member)
        elif "answered" in message:
            piece = member.doing.popleft()
            piece.engine.receive(piece, message)
        elif message["plan"] == self.number:
            self._made(member, message)
        else:
            member.plans[message["plan"]] = "mark" in message

    def _made(self, member: Member, message: Message) -> None:
        member.plans[self.number] = True
        if "why" in message:
            self._wrong = EngineError(f"{member} could not make the federation:\n{message['why']}")
        elif message["mark"] != mark_of(self._plan):
            self._wrong = EngineError(
                f"{member} made another model or other parties than this process. "
                "What makes them must make the same every time: seed what it draws."
            )

    def _bury(self, member: Member) -> None:
        """A worker is dead: say so, replace it, and give back what it had."""
        if self._pool.closed or self._pool.members[member.index] is not member:
            return
        parties = ", ".join(repr(task.party) for piece in list(member.doing)[:1] for task in piece.tasks)
        told = f"{member} {member.fate()}" + (f" while it worked on {parties:.200}" if parties else "")
        warnings.warn(f"{told}. It is replaced, and its work is done again.", DescantWarning, stacklevel=4)
        for first, piece in zip(itertools.chain([True], itertools.repeat(False)), member.doing, strict=False):
            piece.deaths += first
            piece.engine.again(piece, told)
        self._pool.replace(member)

    def again(self, piece: Piece, why: str) -> None:
        """A piece whose worker died is repeated, then cut in two, and a party that does it alone is given up."""
        if self._owed.pop(piece.number, None) is None:
            return
        if piece.deaths < _TRIES:
            self._owe([replace(piece, number=NUMBER())])
        elif len(piece.rows) > 1:
            middle = (piece.rows.start + piece.rows.stop) // 2
            halves = (range(piece.rows.start, middle), range(middle, piece.rows.stop))
            self._owe([Piece(self, piece.batch, half, deaths=1) for half in halves])
        else:
            task = piece.tasks[0]
            advice = "Use fewer workers, smaller batches or a smaller model, or leave the party out."
            self._answers.append((Report(task.party, task.round, task.kind, "lost", reason=f"{why}. {advice}"), None))

    def _owe(self, pieces: Sequence[Piece]) -> None:
        self._owed |= {piece.number: piece for piece in pieces}
        self._waiting.extendleft(reversed(pieces))

    def receive(self, piece: Piece, message: Message) -> None:
        """The answers to a piece, if they are still wanted."""
        if self._owed.pop(piece.number, None) is None:
            return
        shelf = self._pool.shelf(message["file"])
        arrays = {key: array.clone() for key, array in shelf.read().items()}  # the worker will write there again
        for answer in message["answers"]:
            memory = answer["memory"]
            kept = None if memory is None else {name: arrays[key] for name, key in memory.items()}
            self._answers.append((parcel_of(answer["report"], arrays, Report), kept))

    def _work_here(self, piece: Piece) -> None:
        """As a worker would do it, with as many threads."""
        self._waiting.remove(piece)
        before = torch.get_num_threads()
        torch.set_num_threads(self._pool.threads)
        try:
            self._answers.extend(work(self._plan, piece.tasks, piece.memories))
        finally:
            torch.set_num_threads(before)
        self._owed.pop(piece.number)

    def _reports(self) -> list[Report]:
        answers, self._answers = self._answers, []
        for report, memory in answers:
            if memory:
                self._memory.stage(report.party, memory)
        return [report for report, _ in answers]
