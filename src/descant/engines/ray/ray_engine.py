"""Pieces on the workers of a Ray cluster: many cores or machines, all of them trusted, because Ray unpickles and runs
whatever it is sent. What we send is JSON and arrays, and code goes by its address.

Data and model are made once where a worker is, and what its parties remember stays on its machine, in Ray's shared
memory; the arrays that tasks share travel once a machine. A worker that dies is replaced, and its piece is done again
with the same result.
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

_PIECES_PER_WORKER = 2  # pieces a worker has at most: the one that it works on, and the next
_PLAN_SECONDS = 600.0  # seconds in which a worker must have made a plan
_PIECE_BYTES = 2**26  # bytes of models a piece
_OBJECT_STORE_SHARE = (
    4  # of a worker's part of Ray's memory: what its two pieces bring, what it hands over, and one to spare
)
_LOST_STATE_ADVICE = (
    "What parties remember was on a machine of the cluster that is gone. Go on from the last save: by load(), or by "
    "`descant run --resume`."
)


_TOKEN_ADVICE = "Does the cluster ask for a token, as this process does? Start it with RAY_AUTH_MODE=token."


@dataclass(frozen=True)
class Ray:
    """Makes engines on a Ray cluster: ``Federation(..., engine=Ray(workers=8, address="10.0.0.5:6379"))``.

    Without an address a cluster is started on this machine. Ray listens to all, and whoever it lets in can run code on
    it: so it asks for a token, and one at another address is not joined without one.

    >>> Ray(workers=2)
    Ray(workers=2, address=None, threads=1)
    """

    workers: int | None = setting(None, "how many workers; as many as the cluster has cores", least=1, whole=True)
    address: str | None = setting(None, "host:port of a cluster that runs; None: one is started here")
    threads: int = setting(1, "threads of a worker", least=1, whole=True)
    _workers: list[Any] = field(default_factory=list, repr=False, compare=False)  # shared by its engines

    def __call__(self, plan: Plan) -> RayEngine:
        """An engine for one federation."""
        check_settings(self)
        if WORKER_ENV in os.environ:
            raise EngineError(
                "A worker of Ray has come upon Ray itself: the script that it loads runs its work at once. "
                "Put that part of it under `if __name__ == '__main__':`."
            )
        spelled = PlanMessage.from_plan(plan)  # what cannot travel is an error now
        if not _is_connected():
            self._workers.clear()  # those of a cluster that was left
        connect(self.address, (self.workers or available_cores()) * self.threads)
        machines = _cores_by_machine()
        while len(self._workers) < (self.workers or max(1, sum(machines.values()) // self.threads)):
            self._workers.append(self._start_worker(_scheduling_for(len(self._workers), machines)))
        return RayEngine(plan, spelled, self)

    def _start_worker(self, scheduling: Any = "SPREAD") -> Any:
        """A new worker; it asks for no core of Ray's, so that several clusters' worth of engines may take turns."""
        actor = sys.modules["ray"].remote(RayWorker).options(num_cpus=0, scheduling_strategy=scheduling)
        return actor.remote(self.threads, sys.path)

    def replace(self, index: int, dead: Any) -> None:
        """A new worker in the place of one that is dead, unless another engine has seen to it."""
        if self._workers[index] is dead:
            self._workers[index] = self._start_worker()

    def close(self) -> None:
        """End the workers; they also end with this process."""
        while self._workers:
            with suppress(Exception):  # of a cluster that has ended
                sys.modules["ray"].kill(self._workers.pop())

    def worker(self, index: int) -> Any:
        """One of the workers."""
        if index >= len(self._workers) or not _is_connected():
            raise EngineError("These workers have been closed. Make a new Ray(...).")
        return self._workers[index]


def _is_connected() -> bool:
    """Whether this process is part of a cluster; one that asks Ray for something without that starts another."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def _fetch_state(object_ref: Any) -> dict[str, Tensor]:
    """A memory that is elsewhere. (Ray has a ValueError for a place in a cluster that was left.)"""
    ray = sys.modules["ray"]
    try:
        if _is_connected():
            return unpack_from_ray(ray.get(object_ref))[1]
    except (ray.exceptions.RayError, ValueError) as error:
        raise EngineError(_LOST_STATE_ADVICE) from error
    raise EngineError(_LOST_STATE_ADVICE)


def _cores_by_machine() -> dict[str, int]:
    """The machines of the cluster, and how many cores each of them has."""
    nodes = sys.modules["ray"].nodes()
    return {node["NodeID"]: int(node["Resources"].get("CPU", 0)) for node in nodes if node["Alive"]}


def _scheduling_for(index: int, machines: Mapping[str, int]) -> Any:
    """Where a worker is to be: machines have as many as they have cores. (What Ray spreads may all be on one.)"""
    slots = sorted((k / count, machine) for machine, count in machines.items() for k in range(count))
    at_node = sys.modules["ray"].util.scheduling_strategies.NodeAffinitySchedulingStrategy
    return at_node(slots[index % len(slots)][1], soft=False) if slots else "SPREAD"


class AssignedPiece(NamedTuple):
    """A piece that a worker has."""

    worker: Any
    answer: Any  # where Ray will have it
    states: Sequence[Any]  # and what each of the parties remembers, if that stays
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
        self._memory = RemotePartyStore(plan.memory_budget)
        self._queue = WorkQueue[RayTaskBatch]()
        self._plan = (f"{os.getpid()}-{next_id()}", ray.put(pack_for_ray(plan_message.fields, plan_message.arrays)))
        workers = min(len(cluster._workers), len(self._names))  # one without a party would have nothing to do
        held = ray.cluster_resources().get("object_store_memory", sys.maxsize)
        self._piece_state_bytes = int(held) // (
            _OBJECT_STORE_SHARE * len(cluster._workers)
        )  # bytes of memories a piece
        self._assigned: list[deque[AssignedPiece]] = [deque() for _ in range(workers)]
        self._last_worker: dict[str, int] = {}  # by party: the worker that did its last task
        self._is_checked = False

    @property
    def party_states(self) -> Store:
        return self._memory

    def available_parties(self, starting_round: bool = False) -> Sequence[str]:
        return self._names

    def wait(self) -> RayEngine:
        """Wait until every worker has started and made the plan; a round does not need it."""
        for at in range(len(self._assigned)):
            self._check_fingerprint(at, self._worker_fingerprint(at))
        self._is_checked = True
        return self

    def _worker_fingerprint(self, index: int, retry: bool = True) -> str:
        worker = self._cluster.worker(index)
        try:
            mark: str = self._ray.get(worker.mark.remote(*self._plan), timeout=_PLAN_SECONDS)
            return mark
        except self._ray.exceptions.RayTaskError as error:
            raise EngineError(f"A Ray worker could not make the federation:\n{error}") from error
        except self._ray.exceptions.RayError as error:  # it is dead, or busy with what it does not come to the end of
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
                "What makes them must make the same every time: seed what it draws."
            )

    def submit(self, tasks: Sequence[Task]) -> None:
        self._cluster.worker(0)
        if not self._is_checked:
            self.wait()
        batch = RayTaskBatch(tasks, [self._memory.peek(task.party) for task in tasks])
        self._shared = self._ray.put(pack_for_ray(None, batch.shared_arrays))  # every machine fetches it once
        self._queue = WorkQueue(
            [
                WorkPiece(batch, rows)
                for rows in split_rows(len(tasks), len(self._assigned), self._rows_per_piece(batch))
            ]
        )

    def _rows_per_piece(self, batch: RayTaskBatch) -> int:
        """Tasks a piece: what is beside them must fit into Ray's memory with that of the other workers, or Ray carries
        it to the disk and back again and again."""
        memories = sum(map(state_bytes, batch.party_states))
        return min(self._max_piece_tasks, max(1, self._piece_state_bytes * len(batch.tasks) // max(1, memories)))

    def collect(self, timeout: float) -> list[Reply]:
        end = time.monotonic() + timeout
        while self._queue:
            if self._queue.results:
                return self._queue.take_replies(self._memory)
            self._hand_out()
            first = {doing[0].answer: at for at, doing in enumerate(self._assigned) if doing}
            ready, _ = self._ray.wait(list(first), timeout=max(0.0, end - time.monotonic()))
            if not ready:
                break
            self._collect_results(first[ready[0]])
        self._kill_overdue()
        return []

    def _kill_overdue(self) -> None:
        for doing in self._assigned:
            if doing and doing[0].piece.is_overdue():
                self._ray.kill(doing[0].worker)

    def _hand_out(self) -> None:
        """Hand out what waits."""
        order = sorted(range(len(self._assigned)), key=lambda at: len(self._assigned[at]))
        for at in order * _PIECES_PER_WORKER:
            part = self._next_piece(at)
            if part is not None:
                self._queue.waiting.remove(part)
                self._assigned[at].append(self._assign(self._cluster.worker(at), part))

    def _next_piece(self, index: int) -> WorkPiece[RayTaskBatch] | None:
        """What its parties' memories are beside comes first; what is another's a worker takes when it has nothing."""
        others = None
        for part in self._queue.waiting:
            if self._can_take(index, part):
                if self._last_worker.get(part.tasks[0].party, index) == index:
                    return part
                others = others or part
        return None if self._assigned[index] else others

    def _can_take(self, index: int, piece: WorkPiece[RayTaskBatch]) -> bool:
        """A piece that a worker died of is alone with its worker: an answer that was on its way may be lost as well."""
        doing = self._assigned[index]
        return not doing or (
            len(doing) < _PIECES_PER_WORKER and not piece.deaths and not any(one.piece.deaths for one in doing)
        )

    def _assign(self, worker: Any, piece: WorkPiece[RayTaskBatch]) -> AssignedPiece:
        piece.started = time.monotonic()
        keep_remote = self._memory.has_remote and any(task.kind in ("train", "proxy") for task in piece.tasks)
        fields, arrays = piece.batch.piece_payload(piece.rows)
        call = worker.work.options(num_returns=1 + keep_remote * len(piece.rows))
        given = pack_for_ray({**fields, "stay": keep_remote}, arrays)
        found = call.remote(*self._plan, self._shared, given, *piece.batch.remote_refs(piece.rows))
        answer, *kept = found if keep_remote else [found]
        return AssignedPiece(worker, answer, kept, piece=piece)

    def _collect_results(self, index: int) -> None:
        """The answers to a worker's first piece, or why there are none."""
        assigned = self._assigned[index].popleft()
        try:
            fields, arrays = unpack_from_ray(self._ray.get(assigned.answer))
        except self._ray.exceptions.ObjectLostError as error:  # also where a task found no memory to begin with
            raise EngineError(_LOST_STATE_ADVICE) from error
        except self._ray.exceptions.RayTaskError as error:
            self._queue.fail(assigned.piece, "error", str(error))
        except self._ray.exceptions.RayError as error:
            self._replace_dead(index, assigned, str(error))
        else:
            answers = [read_task_result(one, arrays) for one in fields["answers"]]
            for k in (k for k, bytes in enumerate(fields["stays"]) if bytes):
                answers[k] = (answers[k][0], RemoteState(assigned.states[k], _fetch_state, fields["stays"][k]))
            self._last_worker |= {task.party: index for task in assigned.piece.tasks}
            self._queue.record_results(assigned.piece, answers)

    def _replace_dead(self, index: int, assigned: AssignedPiece, reason: str) -> None:
        """A worker is dead: its piece counts a death, and what waited behind it does not."""
        description = f"Ray worker {index} died while it worked on {', '.join(repr(task.party) for task in assigned.piece.tasks):.200}"
        warnings.warn(f"{description}. It is replaced, and its work is done again.", DescantWarning, stacklevel=4)
        self._cluster.replace(index, assigned.worker)
        assigned.piece.deaths += 1
        behind = [other for other in self._assigned[index] if other.worker is assigned.worker]
        self._assigned[index] = deque(other for other in self._assigned[index] if other.worker is not assigned.worker)
        for one in [*behind, assigned]:
            self._queue.retry(one.piece, f"{description}: {reason:.300}")
