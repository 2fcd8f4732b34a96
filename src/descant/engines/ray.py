"""Pieces on the workers of a Ray cluster: many cores or machines, all of them trusted, because Ray unpickles and runs
whatever it is sent. What we send is JSON and arrays, and code goes by its address.

Data and model are made once where a worker is; the arrays that tasks share travel once a machine. A worker that dies is
replaced, and its piece is done again with the same result.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ..core import Report, Store, Task
from ..errors import DescantWarning, EngineError
from ..parties import People
from ..piece import Plan
from ..settings import check, setting
from ..store import PartyStore
from .freight import NUMBER, Spelled, cut
from .joining import join
from .loads import Load, Part
from .owed import Owed, answer_of
from .processes import cores
from .worker import INSIDE, answered, made, mark_of, people_of

_AHEAD = 2  # pieces a worker has at most: the one that it works on, and the next
_START = 600.0  # seconds in which a worker must have made a plan
_PLANS = 4  # that a worker has at once
_MOST = 2**26  # bytes of models a piece
Parcel: TypeAlias = tuple[str, dict[str, tuple[str, tuple[int, ...], np.ndarray[Any, Any]]]]
"""JSON, and by name an array's type, its shape and its bytes."""


@dataclass(frozen=True)
class Ray:
    """Makes engines on a Ray cluster: ``Federation(..., engine=Ray(workers=8, address="10.0.0.5:6379"))``.

    Without an address a cluster is started on this machine. Ray listens to all, and whoever it lets in can run code on
    it: so it asks for a token, and one at another address must do so, too.

    >>> Ray(workers=2)
    Ray(workers=2, address=None, threads=1)
    """

    workers: int | None = setting(None, "how many workers; as many as this machine has cores", least=1, whole=True)
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
        join(self.address, (self.workers or cores()) * self.threads)
        while len(self._hands) < (self.workers or cores()):
            self._hands.append(self._hand())
        return RayEngine(plan, spelled, self)

    def _hand(self) -> Any:
        """A new worker; it asks for no core of Ray's, so that several clusters' worth of engines may take turns."""
        hand = sys.modules["ray"].remote(Hand).options(num_cpus=0, scheduling_strategy="SPREAD")
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
        if at >= len(self._hands) or not sys.modules["ray"].is_initialized():
            raise EngineError("These workers have been closed. Make a new Ray(...).")
        return self._hands[at]


def packed(fields: Any, arrays: Mapping[str, Tensor]) -> Parcel:
    """JSON values and arrays in a form that Ray carries with one copy: into its shared memory."""
    found = {}
    for name, tensor in arrays.items():
        flat = tensor.detach().contiguous().view(-1)
        numbers = flat.view(torch.uint8).numpy() if len(flat) else np.empty(0, np.uint8)  # torch sees no bytes in none
        found[name] = (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), numbers)
    return json.dumps(fields), found


def unpacked(parcel: Parcel) -> tuple[Any, dict[str, Tensor]]:
    """What :func:`packed` put in; the arrays are copies, because Ray's own cannot be written to."""
    text, held = parcel
    found = {}
    for name, (dtype, shape, numbers) in held.items():
        kind = getattr(torch, dtype)
        flat = torch.from_numpy(numbers.copy()).view(kind) if len(numbers) else torch.empty(0, dtype=kind)
        found[name] = flat.view(shape)
    return json.loads(text), found


class Hand:
    """What a Ray worker runs: pieces of the plans that it was asked about last, each made when it is first needed."""

    def __init__(self, threads: int, path: Sequence[str]) -> None:
        os.environ[INSIDE] = "1"
        sys.path += [folder for folder in path if folder not in sys.path]
        torch.set_num_threads(threads)
        self._plans: dict[str, Plan] = {}  # the one that was asked about last is last
        self._people: tuple[str, People] | None = None  # made last: plans that are compared share them

    def mark(self, plan: str, spelled: Parcel) -> str:
        return mark_of(self._plan(plan, spelled))

    def work(self, plan: str, spelled: Parcel, shared: Parcel, own: Parcel) -> Parcel:
        """The answers to the tasks of a piece."""
        fields, arrays = unpacked(own)
        answers, crate = answered(self._plan(plan, spelled), fields, {**unpacked(shared)[1], **arrays})
        return packed(answers, crate.arrays)

    def _plan(self, name: str, spelled: Parcel) -> Plan:
        plan = self._plans.pop(name, None)
        if plan is None:
            text, arrays = unpacked(spelled)
            key = json.dumps(text["data"])
            if self._people is None or self._people[0] != key or arrays:  # arrays are not in the key
                self._people = (key, people_of(text, arrays))
            plan = made(text, arrays, self._people[1])
        self._plans = {**dict(list(self._plans.items())[1 - _PLANS :]), name: plan}
        return plan


class Asked(NamedTuple):
    """A piece that a worker has."""

    hand: Any
    answer: Any  # where Ray will have it
    part: Part


class RayEngine:
    """A `core.Engine` for one plan, on workers of a Ray cluster."""

    def __init__(self, plan: Plan, spelled: Spelled, cluster: Ray) -> None:
        import ray

        self._ray, self._cluster = ray, cluster
        self._names, self._mark = tuple(plan.people), mark_of(plan)
        self._most = max(1, _MOST // (plan.net.layout.width * plan.net.layout.dtype.itemsize))
        self._memory = PartyStore(plan.budget)
        self._owed = Owed[Part]()
        self._plan = (f"{os.getpid()}-{NUMBER()}", ray.put(packed(spelled.text, spelled.arrays)))
        workers = min(len(cluster._hands), len(self._names))  # one without a party would have nothing to do
        self._doing: list[deque[Asked]] = [deque() for _ in range(workers)]
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
                raise EngineError(f"Ray worker {at} does not start: {error}") from error
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
        if not self._alike:
            self.wait()
        load = Load(tasks, [self._memory.get(task.party) for task in tasks])
        self._shared = self._ray.put(packed(None, load.shared))  # every machine fetches it once
        self._owed = Owed([Part(load, rows) for rows in cut(len(tasks), len(self._doing), self._most)])

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
            if self._owed.waiting and self._has_room(at, self._owed.waiting[0]):
                hand, part = self._cluster.hand(at), self._owed.waiting.popleft()
                part.begun = time.monotonic()
                answer = hand.work.remote(*self._plan, self._shared, packed(*part.load.own(part.rows)))
                self._doing[at].append(Asked(hand, answer, part))

    def _has_room(self, at: int, part: Part) -> bool:
        """A piece that a worker died of is alone with its worker: an answer that was on its way may be lost as well."""
        doing = self._doing[at]
        return not doing or (len(doing) < _AHEAD and not part.deaths and not any(one.part.deaths for one in doing))

    def _take(self, at: int) -> None:
        """The answers to a worker's first piece, or why there are none."""
        asked = self._doing[at].popleft()
        try:
            fields, arrays = unpacked(self._ray.get(asked.answer))
        except self._ray.exceptions.RayTaskError as error:
            self._owed.refuse(asked.part, "error", str(error))
        except self._ray.exceptions.RayError as error:
            self._bury(at, asked, str(error))
        else:
            self._owed.answer(asked.part, [answer_of(one, arrays) for one in fields])

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
