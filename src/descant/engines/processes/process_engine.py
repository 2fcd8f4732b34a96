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
from ...core.messages import Reply, Task
from ...errors import DescantWarning, EngineError, SettingError
from ...rounds.party_side import perform_tasks
from ...rounds.plan import Plan
from ...storage import PartyStore
from ..work_queue import WorkPiece, WorkQueue, next_id, read_task_result
from .engine_worker import WORKER_ENV, plan_fingerprint
from .shared_memory import SharedTensorFile
from .task_batches import PlanMessage, ProcessTaskBatch, split_rows
from .worker_pool import Message, WorkerPool, WorkerProcess

_PIECE_BYTES = (
    2**22
)  # bytes of models a piece: small enough that the cores end together, large enough to be worth a message
_MAX_PIECE_TASKS = 64  # a piece: a message must fit into a pipe, so that nobody waits for a worker that hangs


def available_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Processes:
    """Makes engines that share some worker processes: ``Federation(..., engine=Processes(workers=2))``.

    >>> Processes(workers=2)
    Processes(workers=2, threads=1)
    """

    def __init__(self, workers: int | None = None, threads: int | None = None) -> None:
        self.workers = available_cores() if workers is None else workers
        self.threads = threads if threads is not None else max(1, available_cores() // max(1, self.workers))
        self._pool: WorkerPool | None = None
        self._pool_lock = threading.Lock()

    def __repr__(self) -> str:
        return f"Processes(workers={self.workers}, threads={self.threads})"

    def __call__(self, plan: Plan) -> ProcessEngine:
        """An engine for one federation."""
        for name, value in (("workers", self.workers), ("threads", self.threads)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise SettingError(f"The {name!r} of Processes must be a whole number >= 1. Got {value!r}.")
        if WORKER_ENV in os.environ:
            raise EngineError(
                "A worker process has come upon Processes itself: the script that it loads runs its work at once. "
                "Put that part of it under `if __name__ == '__main__':`."
            )
        if self.workers > available_cores():
            told = f"{self.workers} workers share {available_cores()} cores and take turns; workers={available_cores()} is as fast"
            warnings.warn(f"{told}, with less memory.", DescantWarning, stacklevel=2)
        plan_message = PlanMessage.from_plan(plan)  # what cannot travel is an error now
        with self._pool_lock:
            if self._pool is None or self._pool.closed:
                self._pool = WorkerPool(self.threads)
            return ProcessEngine(plan, plan_message, self._pool, workers=self.workers)

    def close(self) -> None:
        """End the workers; they also end with this process, or when nobody has this object any more."""
        if self._pool is not None:
            self._pool.close()


class ProcessEngine:
    """A `core.Engine` for one plan, on a pool of workers."""

    def __init__(self, plan: Plan, plan_message: PlanMessage, pool: WorkerPool, workers: int) -> None:
        self.engine_id = next_id()
        self._plan = plan
        self._plan_message = plan_message
        self._pool = pool
        self._workers = min(workers, len(plan.population))  # a worker without a party would have nothing to do
        self._max_piece_tasks = min(
            _MAX_PIECE_TASKS, max(1, _PIECE_BYTES // (plan.net.layout.width * plan.net.layout.dtype.itemsize))
        )
        self._memory = PartyStore(plan.memory_budget)
        self._queue = WorkQueue[ProcessTaskBatch]()
        self._fingerprint = plan_fingerprint(plan)
        self._buffers = [SharedTensorFile(pool.folder / f"tasks-{self.engine_id}-{side}") for side in "ab"]
        weakref.finalize(self, pool.drop_plan, self.engine_id)

    @property
    def party_states(self) -> Store:
        return self._memory

    def available_parties(self, starting_round: bool = False) -> Sequence[str]:
        return tuple(self._plan.population)

    def submit(self, tasks: Sequence[Task]) -> None:
        with self._pool.lock:
            self._reset_queue()
            self._buffers.reverse()  # a worker may still read what belongs to a round that was broken off
            memories = [self._memory.get(task.party) for task in tasks]
            batch = ProcessTaskBatch(
                weakref.ref(self), self.engine_id, tasks, party_states=memories, buffer=self._buffers[0]
            )
            rows = split_rows(len(tasks), self._workers, self._max_piece_tasks)
            self._queue = WorkQueue([WorkPiece(batch, some) for some in rows])

    def _reset_queue(self) -> None:
        """What is left of a round that was broken off; a worker that hangs, on whatever, is ended."""
        for member in self._pool.workers:
            if member.assigned and member.assigned[0].overdue():
                member.process.kill()
        self._queue = WorkQueue()

    def collect(self, timeout: float) -> list[Reply]:
        end = time.monotonic() + timeout
        while self._queue:
            with self._pool.lock:
                self._receive_messages(0)
                if self._queue.results:
                    return self._queue.take_replies(self._memory)
                ready = self._hand_out()
                safe = [piece for piece in self._queue.waiting if not piece.deaths]  # others have killed a worker
                if not ready and safe:
                    self._run_locally(safe[0])
                    continue
            if time.monotonic() >= end:
                break
            self._receive_messages(min(0.1, end - time.monotonic()))
        return []

    def wait(self) -> ProcessEngine:
        """Wait until every worker has started and made the plan; a round does not need it."""
        while True:
            with self._pool.lock:
                self._pool.ensure_workers(self._workers)
                self._hand_out()
                if all(self._has_plan(member) for member in self._pool.workers[: self._workers]):
                    return self
            self._receive_messages(0.1)

    def _hand_out(self) -> bool:
        """Hand out what waits, two pieces a worker, so that none runs dry; whether any worker is ready."""
        if self._pool.closed:  # by somebody, in the middle of the work: it goes on here
            for piece in [piece for piece in self._queue.pieces.values() if piece.deaths]:
                self._queue.fail(piece, "lost", "a worker died of it, and the workers have been closed")
            self._queue.waiting = deque(self._queue.pieces.values())
            return False
        self._pool.send_dropped_plans()
        if self._pool.should_start():
            self._pool.ensure_workers(self._workers)
        members = self._pool.workers[: self._workers]
        for member in members:
            if self.engine_id not in member.plans:
                member.send(self._plan_message.message(self.engine_id, self._pool.folder))
                member.plans[self.engine_id] = None
        ready_workers = [member for member in members if self._has_plan(member)]
        for member in sorted(ready_workers, key=lambda member: len(member.assigned)) * 2:
            if self._queue.waiting and len(member.assigned) < 2:
                first = self._queue.waiting[0]
                message = first.batch.message(first.number, first.rows)
                piece = self._queue.waiting.popleft()
                piece.started = time.monotonic()
                member.assigned.append(piece)
                member.send(message)
        return bool(ready_workers)

    def _has_plan(self, worker: WorkerProcess) -> bool:
        """Whether a worker has made this plan; an error if it could not, or made another one."""
        reply = worker.plans.get(self.engine_id)
        if reply is None:
            return False
        if "why" in reply:
            raise EngineError(f"{worker} could not make the federation:\n{reply['why']}")
        if reply["mark"] != self._fingerprint:
            raise EngineError(
                f"{worker} made another model or other parties than this process. "
                "What makes them must make the same every time: seed what it draws."
            )
        return True

    def _receive_messages(self, timeout: float) -> None:
        """Take in what workers have said, for this engine or for another one on the same pool."""
        if timeout:
            self._pool.inbox.wait(timeout)
        with self._pool.lock:
            self._pool.inbox.process_all(self._handle_message)

    def _handle_message(self, worker: WorkerProcess, message: Message | None) -> None:
        if message is None:
            self._replace_dead(worker)
        elif "answered" in message:
            _deliver(worker, message)
        elif message["plan"] in worker.plans:
            worker.plans[message["plan"]] = message

    def _replace_dead(self, worker: WorkerProcess) -> None:
        """A worker is dead: replace it, give back what it had, and say so."""
        if self._pool.closed or self._pool.workers[worker.index] is not worker:
            return
        parties = ", ".join(repr(task.party) for piece in list(worker.assigned)[:1] for task in piece.tasks)
        description = f"{worker} {worker.exit_description()}" + (
            f" while it worked on {parties:.200}" if parties else ""
        )
        for at, piece in enumerate(worker.assigned):
            piece.deaths += at == 0
            _retry_piece(piece, description)
        self._pool.replace(worker)
        warnings.warn(f"{description}. It is replaced, and its work is done again.", DescantWarning, stacklevel=4)

    def retry(self, piece: WorkPiece[ProcessTaskBatch], reason: str) -> None:
        """The worker of a piece died."""
        self._queue.retry(piece, reason)

    def receive(self, piece: WorkPiece[ProcessTaskBatch], message: Message) -> None:
        """The answers to a piece, if they are still wanted."""
        if piece.number not in self._queue.pieces:
            return
        if "why" in message:
            self._queue.fail(piece, "error", message["why"])
        else:
            buffer = self._pool.buffer(message["file"])
            arrays = {key: array.clone() for key, array in buffer.read().items()}  # the worker will write there again
            self._queue.record_results(piece, [read_task_result(fields, arrays) for fields in message["answers"]])

    def _run_locally(self, piece: WorkPiece[ProcessTaskBatch]) -> None:
        """As a worker would do it, with as many threads."""
        self._queue.waiting.remove(piece)
        before = torch.get_num_threads()
        began = time.monotonic()
        torch.set_num_threads(self._pool.threads)
        try:
            self._queue.record_results(piece, perform_tasks(self._plan, piece.tasks, piece.party_states))
        finally:
            torch.set_num_threads(before)
        self._pool.local_seconds += time.monotonic() - began


def _deliver(worker: WorkerProcess, message: Message) -> None:
    """An answer goes to the engine that asked; what the worker should have done before it never came to it."""
    if message["answered"] not in [piece.number for piece in worker.assigned]:
        return
    while worker.assigned[0].number != message["answered"]:
        _retry_piece(worker.assigned.popleft(), "the worker was never asked")
    engine = worker.assigned[0].of.owner()
    if engine is not None:
        engine.receive(worker.assigned[0], message)
    worker.assigned.popleft()


def _retry_piece(piece: WorkPiece[ProcessTaskBatch], reason: str) -> None:
    engine = piece.batch.owner()
    if engine is not None:
        engine.retry(piece, reason)
