"""An engine on worker processes, so that all cores work.

Model, data, algorithm and solver go to a worker as addresses (see `serialization.references`), arrays as files in
shared memory. A worker that dies is named and replaced. Its piece is done again with the same result, because a piece
is a pure function. Work starts in this process; the workers start only once it has taken some seconds.
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

_PIECE_BYTES = 2**22  # bytes of models per piece: small for an even load, large enough to be worth a message
_MAX_PIECE_TASKS = 64  # per piece: a message must fit into a pipe, or sending it to a hanging worker would block


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Processes:
    """Makes engines that share worker processes: ``Federation(..., engine=Processes(workers=2))``.

    ``workers`` is the number of processes, by default one per core; ``threads`` is the number of threads of each.

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
                "A worker process has started Processes itself: the script that it imports runs its work at once. "
                "Put that part of it under `if __name__ == '__main__':`."
            )
        if self.workers > available_cores():
            cores = available_cores()
            warnings.warn(
                f"{self.workers} workers share {cores} cores and take turns; workers={cores} is as fast and needs less "
                "memory.",
                DescantWarning,
                stacklevel=2,
            )
        plan_message = PlanMessage.from_plan(plan)  # raises now for what cannot be sent
        with self._pool_lock:
            if self._pool is None or self._pool.closed:
                self._pool = WorkerPool(self.threads)
            return ProcessEngine(plan, plan_message, self._pool, workers=self.workers)

    def close(self) -> None:
        """Stop the workers; they also stop with this process, and when this object is garbage-collected."""
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
        self._party_states = PartyStore(plan.memory_budget)
        self._queue = WorkQueue[ProcessTaskBatch]()
        self._fingerprint = plan_fingerprint(plan)
        self._buffers = [SharedTensorFile(pool.folder / f"tasks-{self.engine_id}-{side}") for side in "ab"]
        weakref.finalize(self, pool.drop_plan, self.engine_id)

    @property
    def party_states(self) -> Store:
        return self._party_states

    def available_parties(self, starting_round: bool = False) -> Sequence[str]:
        return tuple(self._plan.population)

    def submit(self, tasks: Sequence[Task]) -> None:
        with self._pool.lock:
            self._reset_queue()
            self._buffers.reverse()  # a worker may still read the tasks of an interrupted round
            batch = ProcessTaskBatch(
                weakref.ref(self),
                self.engine_id,
                tasks,
                party_states=[self._party_states.get(task.party) for task in tasks],
                buffer=self._buffers[0],
            )
            ranges = split_rows(len(tasks), self._workers, self._max_piece_tasks)
            self._queue = WorkQueue([WorkPiece(batch, rows) for rows in ranges])

    def _reset_queue(self) -> None:
        """Drop the rest of an interrupted round, and kill workers that hang."""
        for worker in self._pool.workers:
            if worker.assigned and worker.assigned[0].is_overdue():
                worker.process.kill()
        self._queue = WorkQueue()

    def collect(self, timeout: float) -> list[Reply]:
        end = time.monotonic() + timeout
        while self._queue:
            with self._pool.lock:
                self._receive_messages(0)
                if self._queue.results:
                    return self._queue.take_replies(self._party_states)
                any_ready = self._hand_out()
                safe = [piece for piece in self._queue.waiting if not piece.deaths]  # others have killed a worker
                if not any_ready and safe:
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
                if all(self._has_plan(worker) for worker in self._pool.workers[: self._workers]):
                    return self
            self._receive_messages(0.1)

    def _hand_out(self) -> bool:
        """Assign up to two waiting pieces per worker, so that none runs dry; return whether any worker is ready."""
        if self._pool.closed:  # during a round: the work goes on in this process
            for piece in [piece for piece in self._queue.pieces.values() if piece.deaths]:
                self._queue.fail(piece, "lost", "a worker died of it, and the workers have been closed")
            self._queue.waiting = deque(self._queue.pieces.values())
            return False
        self._pool.send_dropped_plans()
        if self._pool.should_start():
            self._pool.ensure_workers(self._workers)
        workers = self._pool.workers[: self._workers]
        for worker in workers:
            if self.engine_id not in worker.plans:
                worker.send(self._plan_message.message(self.engine_id, self._pool.folder))
                worker.plans[self.engine_id] = None
        ready_workers = [worker for worker in workers if self._has_plan(worker)]
        for worker in sorted(ready_workers, key=lambda worker: len(worker.assigned)) * 2:
            if self._queue.waiting and len(worker.assigned) < 2:
                first = self._queue.waiting[0]
                message = first.batch.message(first.number, first.rows)
                piece = self._queue.waiting.popleft()
                piece.started = time.monotonic()
                worker.assigned.append(piece)
                worker.send(message)
        return bool(ready_workers)

    def _has_plan(self, worker: WorkerProcess) -> bool:
        """Return whether a worker has made this plan; raise if it failed or made another one."""
        reply = worker.plans.get(self.engine_id)
        if reply is None:
            return False
        if "error" in reply:
            raise EngineError(f"{worker} could not make the federation:\n{reply['error']}")
        if reply["fingerprint"] != self._fingerprint:
            raise EngineError(
                f"{worker} made another model or other parties than this process. "
                "The code that makes them must give the same result every time: seed what it draws."
            )
        return True

    def _receive_messages(self, timeout: float) -> None:
        """Handle the workers' messages, for this engine and for others on the same pool."""
        if timeout:
            self._pool.inbox.wait(timeout)
        with self._pool.lock:
            self._pool.inbox.process_all(self._handle_message)

    def _handle_message(self, worker: WorkerProcess, message: Message | None) -> None:
        if message is None:
            self._replace_dead(worker)
        elif "finished" in message:
            _deliver(worker, message)
        elif message["plan"] in worker.plans:
            worker.plans[message["plan"]] = message

    def _replace_dead(self, worker: WorkerProcess) -> None:
        """Replace a dead worker, return its pieces to their queues, and warn."""
        if self._pool.closed or self._pool.workers[worker.index] is not worker:
            return
        parties = ", ".join(repr(task.party) for piece in list(worker.assigned)[:1] for task in piece.tasks)
        while_working = f" while it worked on {parties:.200}" if parties else ""
        description = f"{worker} {worker.exit_description()}{while_working}"
        for at, piece in enumerate(worker.assigned):
            piece.deaths += at == 0
            _retry_piece(piece, description)
        self._pool.replace(worker)
        warnings.warn(f"{description}. It is replaced, and its work is done again.", DescantWarning, stacklevel=4)

    def retry(self, piece: WorkPiece[ProcessTaskBatch], reason: str) -> None:
        """Return a piece to the queue after its worker died."""
        self._queue.retry(piece, reason)

    def receive(self, piece: WorkPiece[ProcessTaskBatch], message: Message) -> None:
        """Record the results of a piece, unless it is no longer wanted."""
        if piece.number not in self._queue.pieces:
            return
        if "error" in message:
            self._queue.fail(piece, "error", message["error"])
        else:
            buffer = self._pool.buffer(message["file"])
            arrays = {key: array.clone() for key, array in buffer.read().items()}  # the worker reuses the file
            self._queue.record_results(piece, [read_task_result(fields, arrays) for fields in message["results"]])

    def _run_locally(self, piece: WorkPiece[ProcessTaskBatch]) -> None:
        """Do a piece in this process, with as many threads as a worker has."""
        self._queue.waiting.remove(piece)
        threads_before = torch.get_num_threads()
        started = time.monotonic()
        torch.set_num_threads(self._pool.threads)
        try:
            self._queue.record_results(piece, perform_tasks(self._plan, piece.tasks, piece.party_states))
        finally:
            torch.set_num_threads(threads_before)
        self._pool.local_seconds += time.monotonic() - started


def _deliver(worker: WorkerProcess, message: Message) -> None:
    """Give results to the engine of their piece; earlier pieces never reached the worker and are retried."""
    if message["finished"] not in [piece.number for piece in worker.assigned]:
        return
    while worker.assigned[0].number != message["finished"]:
        _retry_piece(worker.assigned.popleft(), "the piece never reached the worker")
    engine = worker.assigned[0].batch.owner()
    if engine is not None:
        engine.receive(worker.assigned[0], message)
    worker.assigned.popleft()


def _retry_piece(piece: WorkPiece[ProcessTaskBatch], reason: str) -> None:
    engine = piece.batch.owner()
    if engine is not None:
        engine.retry(piece, reason)
