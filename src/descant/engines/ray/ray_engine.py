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
from ...core.messages import Report, Task
from ...core.settings import check, setting
from ...errors import DescantWarning, EngineError
from ...rounds.plan import Plan
from ..processes.engine_worker import INSIDE, mark_of
from ..processes.process_engine import cores
from ..processes.task_batches import Spelled, cut
from ..work_queue import NUMBER, Owed, Piece, answer_of
from .ray_cluster import join
from .ray_worker import Hand, packed, unpacked
from .remote_state import Afar, Far, weight
from .task_payloads import Load

_AHEAD = 2  # pieces a worker has at most: the one that it works on, and the next
_START = 600.0  # seconds in which a worker must have made a plan
_MOST = 2**26  # bytes of models a piece
_SHARE = 4  # of a worker's part of Ray's memory: what its two pieces bring, what it hands over, and one to spare
_GONE = (
    "What parties remember was on a machine of the cluster that is gone. Go on from the last save: by load(), or by "
    "`descant run --resume`."
)


_ASKS = "Does the cluster ask for a token, as this process does? Start it with RAY_AUTH_MODE=token."


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
    _hands: list[Any] = field(default_factory=list, repr=False, compare=False)  # shared by its engines

    def __call__(self, plan: Plan) -> RayEngine:
        """An engine for one federation."""
        check(self)
        if INSIDE in os.environ:
            raise EngineError(
                "A worker of Ray has come upon Ray itself: the script that it loads runs its work at once. "
                "Put that part of it under `if __name__ == '__main__':`."
            )
        spelled = Spelled.of(plan)  # what cannot travel is an error now
        if not _is_joined():
            self._hands.clear()  # those of a cluster that was left
        join(self.address, (self.workers or cores()) * self.threads)
        machines = _machines()
        while len(self._hands) < (self.workers or max(1, sum(machines.values()) // self.threads)):
            self._hands.append(self._hand(_on_machine(len(self._hands), machines)))
        return RayEngine(plan, spelled, self)

    def _hand(self, where: Any = "SPREAD") -> Any:
        """A new worker; it asks for no core of Ray's, so that several clusters' worth of engines may take turns."""
        hand = sys.modules["ray"].remote(Hand).options(num_cpus=0, scheduling_strategy=where)
        return hand.remote(self.threads, sys.path)

    def replace(self, at: int, dead: Any) -> None:
        """A new worker in the place of one that is dead, unless another engine has seen to it."""
        if self._hands[at] is dead:
            self._hands[at] = self._hand()

    def close(self) -> None:
        """End the workers; they also end with this process."""
        while self._hands:
            with suppress(Exception):  # of a cluster that has ended
                sys.modules["ray"].kill(self._hands.pop())

    def hand(self, at: int) -> Any:
        """One of the workers."""
        if at >= len(self._hands) or not _is_joined():
            raise EngineError("These workers have been closed. Make a new Ray(...).")
        return self._hands[at]


def _is_joined() -> bool:
    """Whether this process is part of a cluster; one that asks Ray for something without that starts another."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def _fetched(place: Any) -> dict[str, Tensor]:
    """A memory that is elsewhere. (Ray has a ValueError for a place in a cluster that was left.)"""
    ray = sys.modules["ray"]
    try:
        if _is_joined():
            return unpacked(ray.get(place))[1]
    except (ray.exceptions.RayError, ValueError) as error:
        raise EngineError(_GONE) from error
    raise EngineError(_GONE)


def _machines() -> dict[str, int]:
    """The machines of the cluster, and how many cores each of them has."""
    nodes = sys.modules["ray"].nodes()
    return {node["NodeID"]: int(node["Resources"].get("CPU", 0)) for node in nodes if node["Alive"]}


def _on_machine(at: int, machines: Mapping[str, int]) -> Any:
    """Where a worker is to be: machines have as many as they have cores. (What Ray spreads may all be on one.)"""
    slots = sorted((k / count, machine) for machine, count in machines.items() for k in range(count))
    at_node = sys.modules["ray"].util.scheduling_strategies.NodeAffinitySchedulingStrategy
    return at_node(slots[at % len(slots)][1], soft=False) if slots else "SPREAD"


class Asked(NamedTuple):
    """A piece that a worker has."""

    hand: Any
    answer: Any  # where Ray will have it
    kept: Sequence[Any]  # and what each of the parties remembers, if that stays
    part: Piece[Load]


class RayEngine:
    """A `core.Engine` for one plan, on workers of a Ray cluster."""

    def __init__(self, plan: Plan, spelled: Spelled, cluster: Ray) -> None:
        import ray

        self._ray, self._cluster = ray, cluster
        self._names, self._mark = tuple(plan.people), mark_of(plan)
        self._most = max(1, _MOST // (plan.net.layout.width * plan.net.layout.dtype.itemsize))
        self._memory = Afar(plan.budget)
        self._owed = Owed[Load]()
        self._plan = (f"{os.getpid()}-{NUMBER()}", ray.put(packed(spelled.text, spelled.arrays)))
        workers = min(len(cluster._hands), len(self._names))  # one without a party would have nothing to do
        held = ray.cluster_resources().get("object_store_memory", sys.maxsize)
        self._room = int(held) // (_SHARE * len(cluster._hands))  # bytes of memories a piece
        self._doing: list[deque[Asked]] = [deque() for _ in range(workers)]
        self._where: dict[str, int] = {}  # by party: the worker that did its last task
        self._alike = False

    @property
    def memory(self) -> Store:
        return self._memory

    def members(self, begin: bool = False) -> Sequence[str]:
        return self._names

    def wait(self) -> RayEngine:
        """Wait until every worker has started and made the plan; a round does not need it."""
        for at in range(len(self._doing)):
            self._check(at, self._marked(at))
        self._alike = True
        return self

    def _marked(self, at: int, again: bool = True) -> str:
        hand = self._cluster.hand(at)
        try:
            mark: str = self._ray.get(hand.mark.remote(*self._plan), timeout=_START)
            return mark
        except self._ray.exceptions.RayTaskError as error:
            raise EngineError(f"A Ray worker could not make the federation:\n{error}") from error
        except self._ray.exceptions.RayError as error:  # it is dead, or busy with what it does not come to the end of
            if not again:
                token = f" {_ASKS}" if self._cluster.address is not None else ""
                raise EngineError(f"Ray worker {at} does not start: {error}{token}") from error
            with suppress(Exception):
                self._ray.kill(hand)
            self._cluster.replace(at, hand)
            return self._marked(at, again=False)

    def _check(self, at: int, mark: str) -> None:
        if mark != self._mark:
            raise EngineError(
                f"Ray worker {at} made another model or other parties than this process. "
                "What makes them must make the same every time: seed what it draws."
            )

    def submit(self, tasks: Sequence[Task]) -> None:
        self._cluster.hand(0)
        if not self._alike:
            self.wait()
        load = Load(tasks, [self._memory.look(task.party) for task in tasks])
        self._shared = self._ray.put(packed(None, load.shared))  # every machine fetches it once
        self._owed = Owed([Piece(load, rows) for rows in cut(len(tasks), len(self._doing), self._rows(load))])

    def _rows(self, load: Load) -> int:
        """Tasks a piece: what is beside them must fit into Ray's memory with that of the other workers, or Ray carries
        it to the disk and back again and again."""
        memories = sum(map(weight, load.memories))
        return min(self._most, max(1, self._room * len(load.tasks) // max(1, memories)))

    def collect(self, timeout: float) -> list[Report]:
        end = time.monotonic() + timeout
        while self._owed:
            if self._owed.answers:
                return self._owed.reports(self._memory)
            self._give()
            first = {doing[0].answer: at for at, doing in enumerate(self._doing) if doing}
            ready, _ = self._ray.wait(list(first), timeout=max(0.0, end - time.monotonic()))
            if not ready:
                break
            self._take(first[ready[0]])
        self._end_what_hangs()
        return []

    def _end_what_hangs(self) -> None:
        for doing in self._doing:
            if doing and doing[0].part.overdue():
                self._ray.kill(doing[0].hand)

    def _give(self) -> None:
        """Hand out what waits."""
        order = sorted(range(len(self._doing)), key=lambda at: len(self._doing[at]))
        for at in order * _AHEAD:
            part = self._next(at)
            if part is not None:
                self._owed.waiting.remove(part)
                self._doing[at].append(self._ask(self._cluster.hand(at), part))

    def _next(self, at: int) -> Piece[Load] | None:
        """What its parties' memories are beside comes first; what is another's a worker takes when it has nothing."""
        others = None
        for part in self._owed.waiting:
            if self._has_room(at, part):
                if self._where.get(part.tasks[0].party, at) == at:
                    return part
                others = others or part
        return None if self._doing[at] else others

    def _has_room(self, at: int, part: Piece[Load]) -> bool:
        """A piece that a worker died of is alone with its worker: an answer that was on its way may be lost as well."""
        doing = self._doing[at]
        return not doing or (len(doing) < _AHEAD and not part.deaths and not any(one.part.deaths for one in doing))

    def _ask(self, hand: Any, part: Piece[Load]) -> Asked:
        part.begun = time.monotonic()
        stay = self._memory.has_large and any(task.kind in ("train", "stand_in") for task in part.tasks)
        fields, arrays = part.of.own(part.rows)
        call = hand.work.options(num_returns=1 + stay * len(part.rows))
        given = packed({**fields, "stay": stay}, arrays)
        found = call.remote(*self._plan, self._shared, given, *part.of.far(part.rows))
        answer, *kept = found if stay else [found]
        return Asked(hand, answer, kept, part)

    def _take(self, at: int) -> None:
        """The answers to a worker's first piece, or why there are none."""
        asked = self._doing[at].popleft()
        try:
            fields, arrays = unpacked(self._ray.get(asked.answer))
        except self._ray.exceptions.ObjectLostError as error:  # also where a task found no memory to begin with
            raise EngineError(_GONE) from error
        except self._ray.exceptions.RayTaskError as error:
            self._owed.refuse(asked.part, "error", str(error))
        except self._ray.exceptions.RayError as error:
            self._bury(at, asked, str(error))
        else:
            answers = [answer_of(one, arrays) for one in fields["answers"]]
            for k in (k for k, bytes in enumerate(fields["stays"]) if bytes):
                answers[k] = (answers[k][0], Far(asked.kept[k], _fetched, fields["stays"][k]))
            self._where |= {task.party: at for task in asked.part.tasks}
            self._owed.answer(asked.part, answers)

    def _bury(self, at: int, asked: Asked, why: str) -> None:
        """A worker is dead: its piece counts a death, and what waited behind it does not."""
        told = (
            f"Ray worker {at} died while it worked on {', '.join(repr(task.party) for task in asked.part.tasks):.200}"
        )
        warnings.warn(f"{told}. It is replaced, and its work is done again.", DescantWarning, stacklevel=4)
        self._cluster.replace(at, asked.hand)
        asked.part.deaths += 1
        behind = [other for other in self._doing[at] if other.hand is asked.hand]
        self._doing[at] = deque(other for other in self._doing[at] if other.hand is not asked.hand)
        for one in [*behind, asked]:
            self._owed.again(one.part, f"{told}: {why:.300}")
