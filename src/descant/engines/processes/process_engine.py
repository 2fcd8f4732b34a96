"""Pieces in worker processes, so that all cores work; between the round and a piece only bytes travel.

Model, data, algorithm and solver go to a worker by their address (see `address`), arrays by files in shared memory. A
worker that dies is named and replaced, and its piece is done again with the same result: a piece is a pure function.
Until workers have started the round is worked on here, and they start only once that has taken some seconds.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Sequence

import torch

from ...core.interfaces import Store
from ...core.messages import Report, Task
from ...errors import DescantWarning, EngineError, SettingError
from ...rounds.party_side import work
from ...rounds.plan import Plan
from ...storage import PartyStore
from ..work_queue import NUMBER, Owed, Piece, answer_of
from .engine_worker import INSIDE, mark_of
from .shared_memory import Shelf
from .task_batches import Batch, Spelled, cut
from .worker_pool import Member, Message, Pool

_PIECE = 2**22  # bytes of models a piece: small enough that the cores end together, large enough to be worth a message
_TASKS = 64  # a piece: a message must fit into a pipe, so that nobody waits for a worker that hangs


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
        self._making = threading.Lock()

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
        with self._making:
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
        self._most = min(_TASKS, max(1, _PIECE // (plan.net.layout.width * plan.net.layout.dtype.itemsize)))
        self._memory = PartyStore(plan.budget)
        self._owed = Owed[Batch]()
        self._mark = mark_of(plan)
        self._shelves = [Shelf(pool.folder / f"tasks-{self.number}-{side}") for side in "ab"]
        weakref.finalize(self, pool.forget, self.number)

    @property
    def memory(self) -> Store:
        return self._memory

    def members(self, begin: bool = False) -> Sequence[str]:
        return tuple(self._plan.people)

    def submit(self, tasks: Sequence[Task]) -> None:
        with self._pool.lock:
            self._forget()
            self._shelves.reverse()  # a worker may still read what belongs to a round that was broken off
            memories = [self._memory.get(task.party) for task in tasks]
            batch = Batch(weakref.ref(self), self.number, tasks, memories, self._shelves[0])
            rows = cut(len(tasks), self._workers, self._most)
            self._owed = Owed([Piece(batch, some) for some in rows])

    def _forget(self) -> None:
        """What is left of a round that was broken off; a worker that hangs, on whatever, is ended."""
        for member in self._pool.members:
            if member.doing and member.doing[0].overdue():
                member.process.kill()
        self._owed = Owed()

    def collect(self, timeout: float) -> list[Report]:
        end = time.monotonic() + timeout
        while self._owed:
            with self._pool.lock:
                self._hear(0)
                if self._owed.answers:
                    return self._owed.reports(self._memory)
                ready = self._give()
                safe = [piece for piece in self._owed.waiting if not piece.deaths]  # others have killed a worker
                if not ready and safe:
                    self._work_here(safe[0])
                    continue
            if time.monotonic() >= end:
                break
            self._hear(min(0.1, end - time.monotonic()))
        return []

    def wait(self) -> ProcessEngine:
        """Wait until every worker has started and made the plan; a round does not need it."""
        while True:
            with self._pool.lock:
                self._pool.grow(self._workers)
                self._give()
                if all(self._has_made(member) for member in self._pool.members[: self._workers]):
                    return self
            self._hear(0.1)

    def _give(self) -> bool:
        """Hand out what waits, two pieces a worker, so that none runs dry; whether any worker is ready."""
        if self._pool.closed:  # by somebody, in the middle of the work: it goes on here
            for piece in [piece for piece in self._owed.pieces.values() if piece.deaths]:
                self._owed.refuse(piece, "lost", "a worker died of it, and the workers have been closed")
            self._owed.waiting = deque(self._owed.pieces.values())
            return False
        self._pool.tidy()
        if self._pool.worth_it():
            self._pool.grow(self._workers)
        members = self._pool.members[: self._workers]
        for member in members:
            if self.number not in member.plans:
                member.say(self._spelled.message(self.number, self._pool.folder))
                member.plans[self.number] = None
        ready = [member for member in members if self._has_made(member)]
        for member in sorted(ready, key=lambda member: len(member.doing)) * 2:
            if self._owed.waiting and len(member.doing) < 2:
                first = self._owed.waiting[0]
                message = first.of.message(first.number, first.rows)
                piece = self._owed.waiting.popleft()
                piece.begun = time.monotonic()
                member.doing.append(piece)
                member.say(message)
        return bool(ready)

    def _has_made(self, member: Member) -> bool:
        """Whether a worker has made this plan; an error if it could not, or made another one."""
        said = member.plans.get(self.number)
        if said is None:
            return False
        if "why" in said:
            raise EngineError(f"{member} could not make the federation:\n{said['why']}")
        if said["mark"] != self._mark:
            raise EngineError(
                f"{member} made another model or other parties than this process. "
                "What makes them must make the same every time: seed what it draws."
            )
        return True

    def _hear(self, timeout: float) -> None:
        """Take in what workers have said, for this engine or for another one on the same pool."""
        if timeout:
            self._pool.mail.wait(timeout)
        with self._pool.lock:
            self._pool.mail.deal(self._take)

    def _take(self, member: Member, message: Message | None) -> None:
        if message is None:
            self._bury(member)
        elif "answered" in message:
            _settle(member, message)
        elif message["plan"] in member.plans:
            member.plans[message["plan"]] = message

    def _bury(self, member: Member) -> None:
        """A worker is dead: replace it, give back what it had, and say so."""
        if self._pool.closed or self._pool.members[member.index] is not member:
            return
        parties = ", ".join(repr(task.party) for piece in list(member.doing)[:1] for task in piece.tasks)
        told = f"{member} {member.fate()}" + (f" while it worked on {parties:.200}" if parties else "")
        for at, piece in enumerate(member.doing):
            piece.deaths += at == 0
            _give_back(piece, told)
        self._pool.replace(member)
        warnings.warn(f"{told}. It is replaced, and its work is done again.", DescantWarning, stacklevel=4)

    def again(self, piece: Piece[Batch], why: str) -> None:
        """The worker of a piece died."""
        self._owed.again(piece, why)

    def receive(self, piece: Piece[Batch], message: Message) -> None:
        """The answers to a piece, if they are still wanted."""
        if piece.number not in self._owed.pieces:
            return
        if "why" in message:
            self._owed.refuse(piece, "error", message["why"])
        else:
            shelf = self._pool.shelf(message["file"])
            arrays = {key: array.clone() for key, array in shelf.read().items()}  # the worker will write there again
            self._owed.answer(piece, [answer_of(fields, arrays) for fields in message["answers"]])

    def _work_here(self, piece: Piece[Batch]) -> None:
        """As a worker would do it, with as many threads."""
        self._owed.waiting.remove(piece)
        before, began = torch.get_num_threads(), time.monotonic()
        torch.set_num_threads(self._pool.threads)
        try:
            self._owed.answer(piece, work(self._plan, piece.tasks, piece.memories))
        finally:
            torch.set_num_threads(before)
        self._pool.spent += time.monotonic() - began


def _settle(member: Member, message: Message) -> None:
    """An answer goes to the engine that asked; what the worker should have done before it never came to it."""
    if message["answered"] not in [piece.number for piece in member.doing]:
        return
    while member.doing[0].number != message["answered"]:
        _give_back(member.doing.popleft(), "the worker was never asked")
    engine = member.doing[0].of.owner()
    if engine is not None:
        engine.receive(member.doing[0], message)
    member.doing.popleft()


def _give_back(piece: Piece[Batch], why: str) -> None:
    engine = piece.of.owner()
    if engine is not None:
        engine.again(piece, why)
