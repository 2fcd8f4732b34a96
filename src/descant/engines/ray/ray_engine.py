"""An engine on the workers of a Ray cluster: many cores or machines.

All machines of the cluster must be trusted, because Ray unpickles and runs whatever it receives. This engine sends only
JSON and arrays, and code as addresses.

Each worker makes data and model once. Party states stay on the worker's machine, in Ray's shared memory. Arrays that
tasks share are sent once per machine. A worker that dies is replaced, and its piece is done again with the same result.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from ...core.interfaces import Store
from ...core.messages import Reply, Task
from ...core.settings import check_settings, setting
from ...errors import DescantWarning, EngineError
from ...rounds.plan import Plan
from ..processes.engine_worker import WORKER_ENV, plan_fingerprint
from ..processes.process_engine import available_cores
from ..processes.task_batches import PlanMessage, split_rows
from ..work_queue import WorkPiece, WorkQueue, next_id, read_task_result
from .ray_cluster import connect
from .ray_worker import RayWorker, pack_for_ray, unpack_from_ray
from .remote_state import RemotePartyStore, RemoteState, state_bytes
from .task_payloads import RayTaskBatch

_PIECES_PER_WORKER = 2  # the one that a worker runs, and the next
_PLAN_SECONDS = 600.0  # seconds that a worker has to make a plan
_PIECE_BYTES = 2**26  # bytes of models per piece
_OBJECT_STORE_SHARE = 4  # parts of a worker's object store: the input of two pieces, the output of one, one spare
_LOST_STATE_ADVICE = (
    "The party states were on a machine that has left the cluster. Go on from the last checkpoint: by load(), or by "
    "`descant run --resume`."
)
_TOKEN_ADVICE = "Does the cluster require a token, as this process does? Start it with RAY_AUTH_MODE=token."


@dataclass(frozen=True)
class Ray:
    """Makes engines on a Ray cluster: ``Federation(..., engine=Ray(workers=8, address="10.0.0.5:6379"))``.

    Without an address, a cluster is started on this machine. Ray listens on all network interfaces, and anyone it lets
    in can run code on it. So a token is required, and a cluster on another machine is not joined without one.

    >>> Ray(workers=2)
    Ray(workers=2, address=None, threads=1)
    """

    workers: int | None = setting(None, "number of workers; None: one per core of the cluster", least=1, whole=True)
    address: str | None = setting(None, "host:port of a running cluster; None: start one on this machine")
    threads: int = setting(1, "threads per worker", least=1, whole=True)
    _workers: list[Any] = field(default_factory=list, repr=False, compare=False)  # shared by its engines

    def __call__(self, plan: Plan) -> RayEngine:
        """An engine for one federation."""
        check_settings(self)
        if WORKER_ENV in os.environ:
            raise EngineError(
                "A Ray worker has started Ray itself: the script that it imports runs its work at once. "
                "Put that part of it under `if __name__ == '__main__':`."
            )
        plan_message = PlanMessage.from_plan(plan)  # raises now for what cannot be sent
        if not _is_connected():
            self._workers.clear()  # they were on a cluster that this process has left
        connect(self.address, (self.workers or available_cores()) * self.threads)
        machines = _cores_by_machine()
        while len(self._workers) < (self.workers or max(1, sum(machines.values()) // self.threads)):
            self._workers.append(self._start_worker(_scheduling_for(len(self._workers), machines)))
        return RayEngine(plan, plan_message, self)

    def _start_worker(self, scheduling: Any = "SPREAD") -> Any:
        """Start a worker; it reserves no core in Ray, so that several engines can share the cluster."""
        actor = sys.modules["ray"].remote(RayWorker).options(num_cpus=0, scheduling_strategy=scheduling)
        return actor.remote(self.threads, sys.path)

    def replace(self, index: int, dead: Any) -> None:
        """Replace a dead worker, unless another engine has done so."""
        if self._workers[index] is dead:
            self._workers[index] = self._start_worker()

    def close(self) -> None:
        """Stop the workers; they also stop with this process."""
        while self._workers:
            with suppress(Exception):  # the cluster may have stopped
                sys.modules["ray"].kill(self._workers.pop())

    def worker(self, index: int) -> Any:
        """Return a worker, or raise if they have been closed."""
        if index >= len(self._workers) or not _is_connected():
            raise EngineError("These workers have been closed. Make a new Ray(...).")
        return self._workers[index]


def _is_connected() -> bool:
    """Return whether this process is connected to a cluster; a call to Ray without a connection would start one."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def _fetch_state(object_ref: Any) -> dict[str, Tensor]:
    """Fetch a remote party state. (Ray raises ValueError for a reference of a former cluster.)"""
    ray = sys.modules["ray"]
    try:
        if _is_connected():
            return unpack_from_ray(ray.get(object_ref))[1]
    except (ray.exceptions.RayError, ValueError) as error:
        raise EngineError(_LOST_STATE_ADVICE) from error
    raise EngineError(_LOST_STATE_ADVICE)


def _cores_by_machine() -> dict[str, int]:
    """Return the number of cores of each machine of the cluster, by node id."""
    nodes = sys.modules["ray"].nodes()
    return {node["NodeID"]: int(node["Resources"].get("CPU", 0)) for node in nodes if node["Alive"]}


def _scheduling_for(index: int, machines: Mapping[str, int]) -> Any:
    """Return the scheduling of a worker, so that each machine has as many workers as cores.

    (Ray's own "SPREAD" may put all workers on one machine.)
    """
    slots = sorted((k / count, machine) for machine, count in machines.items() for k in range(count))
    node_affinity = sys.modules["ray"].util.scheduling_strategies.NodeAffinitySchedulingStrategy
    return node_affinity(slots[index % len(slots)][1], soft=False) if slots else "SPREAD"


class AssignedPiece(NamedTuple):
    """A piece assigned to a worker, with Ray's references to its results."""

    worker: Any
    results: Any
    party_states: Sequence[Any]  # one reference per party if states stay remote, else none
    piece: WorkPiece[RayTaskBatch]


class RayEngine:
    """A `core.Engine` for one plan, on workers of a Ray cluster."""

    def __init__(self, plan: Plan, plan_message: PlanMessage, cluster: Ray) -> None:
        import ray

        self._ray = ray
        self._cluster = cluster
        self._names = tuple(plan.population)
        self._fingerprint = plan_fingerprint(plan)
        self._max_piece_tasks = max(1, _PIECE_BYTES // (plan.net.layout.width * plan.net.layout.dtype.itemsize))
        self._party_states = RemotePartyStore(plan.memory_budget)
        self._queue = WorkQueue[RayTaskBatch]()
        self._plan = (f"{os.getpid()}-{next_id()}", ray.put(pack_for_ray(plan_message.fields, plan_message.arrays)))
        workers = min(len(cluster._workers), len(self._names))  # a worker without a party would have nothing to do
        store_bytes = int(ray.cluster_resources().get("object_store_memory", sys.maxsize))
        self._piece_state_bytes = store_bytes // (_OBJECT_STORE_SHARE * len(cluster._workers))  # party states per piece
        self._assigned: list[deque[AssignedPiece]] = [deque() for _ in range(workers)]
        self._last_worker: dict[str, int] = {}  # by party: the worker that did its last task
        self._is_checked = False

    @property
    def party_states(self) -> Store:
        return self._party_states

    def available_parties(self, starting_round: bool = False) -> Sequence[str]:
        return self._names

    def wait(self) -> RayEngine:
        """Wait until every worker has started and made the plan; a round does not need it."""
        for index in range(len(self._assigned)):
            self._check_fingerprint(index, self._worker_fingerprint(index))
        self._is_checked = True
        return self

    def _worker_fingerprint(self, index: int, retry: bool = True) -> str:
        worker = self._cluster.worker(index)
        try:
            fingerprint: str = self._ray.get(worker.fingerprint.remote(*self._plan), timeout=_PLAN_SECONDS)
            return fingerprint
        except self._ray.exceptions.RayTaskError as error:
            raise EngineError(f"A Ray worker could not make the federation:\n{error}") from error
        except self._ray.exceptions.RayError as error:  # it is dead, or it hangs
            if not retry:
                token = f" {_TOKEN_ADVICE}" if self._cluster.address is not None else ""
                raise EngineError(f"Ray worker {index} does not start: {error}{token}") from error
            with suppress(Exception):
                self._ray.kill(worker)
            self._cluster.replace(index, worker)
            return self._worker_fingerprint(index, retry=False)

    def _check_fingerprint(self, index: int, fingerprint: str) -> None:
        if fingerprint != self._fingerprint:
            raise EngineError(
                f"Ray worker {index} made another model or other parties than this process. "
                "The code that makes them must give the same result every time: seed what it draws."
            )

    def submit(self, tasks: Sequence[Task]) -> None:
        self._cluster.worker(0)
        if not self._is_checked:
            self.wait()
        batch = RayTaskBatch(tasks, [self._party_states.peek(task.party) for task in tasks])
        self._shared = self._ray.put(pack_for_ray(None, batch.shared_arrays))  # each machine fetches it once
        self._queue = WorkQueue(
            [
                WorkPiece(batch, rows)
                for rows in split_rows(len(tasks), len(self._assigned), self._rows_per_piece(batch))
            ]
        )

    def _rows_per_piece(self, batch: RayTaskBatch) -> int:
        """Return the number of tasks per piece, so that all workers' party states fit into Ray's object store.

        Otherwise Ray would move them to the disk and back again and again.
        """
        total = sum(map(state_bytes, batch.party_states))
        return min(self._max_piece_tasks, max(1, self._piece_state_bytes * len(batch.tasks) // max(1, total)))

    def collect(self, timeout: float) -> list[Reply]:
        end = time.monotonic() + timeout
        while self._queue:
            if self._queue.results:
                return self._queue.take_replies(self._party_states)
            self._hand_out()
            indices = {assigned[0].results: index for index, assigned in enumerate(self._assigned) if assigned}
            ready, _ = self._ray.wait(list(indices), timeout=max(0.0, end - time.monotonic()))
            if not ready:
                break
            self._collect_results(indices[ready[0]])
        self._kill_overdue()
        return []

    def _kill_overdue(self) -> None:
        for assigned in self._assigned:
            if assigned and assigned[0].piece.is_overdue():
                self._ray.kill(assigned[0].worker)

    def _hand_out(self) -> None:
        """Assign waiting pieces to the workers."""
        order = sorted(range(len(self._assigned)), key=lambda index: len(self._assigned[index]))
        for index in order * _PIECES_PER_WORKER:
            piece = self._next_piece(index)
            if piece is not None:
                self._queue.waiting.remove(piece)
                self._assigned[index].append(self._assign(self._cluster.worker(index), piece))

    def _next_piece(self, index: int) -> WorkPiece[RayTaskBatch] | None:
        """Return a piece whose party states are on the worker's machine, or another piece if the worker is idle."""
        other = None
        for piece in self._queue.waiting:
            if self._can_take(index, piece):
                if self._last_worker.get(piece.tasks[0].party, index) == index:
                    return piece
                other = other or piece
        return None if self._assigned[index] else other

    def _can_take(self, index: int, piece: WorkPiece[RayTaskBatch]) -> bool:
        """Return whether a worker may take a piece; one that killed a worker runs alone.

        A second death would lose the results of the other piece too.
        """
        assigned = self._assigned[index]
        return not assigned or (
            len(assigned) < _PIECES_PER_WORKER and not piece.deaths and not any(one.piece.deaths for one in assigned)
        )

    def _assign(self, worker: Any, piece: WorkPiece[RayTaskBatch]) -> AssignedPiece:
        piece.started = time.monotonic()
        keep_remote = self._party_states.has_remote and any(task.kind in ("train", "proxy") for task in piece.tasks)
        fields, arrays = piece.batch.piece_payload(piece.rows)
        call = worker.run_tasks.options(num_returns=1 + keep_remote * len(piece.rows))
        payload = pack_for_ray({**fields, "keep_remote": keep_remote}, arrays)
        references = call.remote(*self._plan, self._shared, payload, *piece.batch.remote_refs(piece.rows))
        results, *party_states = references if keep_remote else [references]
        return AssignedPiece(worker, results, party_states, piece=piece)

    def _collect_results(self, index: int) -> None:
        """Record the results of a worker's first piece, or the reason of their absence."""
        assigned = self._assigned[index].popleft()
        try:
            fields, arrays = unpack_from_ray(self._ray.get(assigned.results))
        except self._ray.exceptions.ObjectLostError as error:  # also if a party state for the task was lost
            raise EngineError(_LOST_STATE_ADVICE) from error
        except self._ray.exceptions.RayTaskError as error:
            self._queue.fail(assigned.piece, "error", str(error))
        except self._ray.exceptions.RayError as error:
            self._replace_dead(index, assigned, str(error))
        else:
            results = [read_task_result(one, arrays) for one in fields["results"]]
            for k, size_bytes in enumerate(fields["remote_bytes"]):
                if size_bytes:
                    results[k] = (results[k][0], RemoteState(assigned.party_states[k], _fetch_state, size_bytes))
            self._last_worker |= {task.party: index for task in assigned.piece.tasks}
            self._queue.record_results(assigned.piece, results)

    def _replace_dead(self, index: int, assigned: AssignedPiece, reason: str) -> None:
        """Replace a dead worker and retry its pieces; only the one that it ran counts a death."""
        parties = ", ".join(repr(task.party) for task in assigned.piece.tasks)
        description = f"Ray worker {index} died while it worked on {parties:.200}"
        warnings.warn(f"{description}. It is replaced, and its work is done again.", DescantWarning, stacklevel=4)
        self._cluster.replace(index, assigned.worker)
        assigned.piece.deaths += 1
        behind = [other for other in self._assigned[index] if other.worker is assigned.worker]
        self._assigned[index] = deque(other for other in self._assigned[index] if other.worker is not assigned.worker)
        for one in [*behind, assigned]:
            self._queue.retry(one.piece, f"{description}: {reason:.300}")
