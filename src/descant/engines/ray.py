"""Pieces on the workers of a Ray cluster: many cores or machines, all of them trusted, because Ray unpickles and runs
whatever it is sent. What we send is JSON and arrays, and code goes by its address.

Data and model are made once where a worker is; the arrays that tasks share travel once a machine. A worker that dies is
replaced, and its piece is done again with the same result.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import time
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ..core import Report, Store, Task
from ..errors import DescantWarning, EngineError, SettingError
from ..piece import Plan
from ..settings import check, setting
from ..store import PartyStore
from .freight import NUMBER, Spelled, cut
from .loads import Load, Part
from .owed import Owed, answer_of
from .processes import cores
from .worker import INSIDE, answered, made, mark_of

_AHEAD = 2  # pieces a worker has at most: the one that it works on, and the next
_PLANS = 4  # that a worker has at once
_MOST = 2**26  # bytes of models a piece
_QUIET = {  # nothing is reported to anybody; without the second, Ray reports that it reports nothing
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_USAGE_STATS_REPORT_URL": "http://127.0.0.1:9/",
    "RAY_AUTH_MODE": "token",
}
Parcel: TypeAlias = tuple[str, dict[str, tuple[str, tuple[int, ...], np.ndarray[Any, Any]]]]
"""JSON, and by name an array's type, its shape and its bytes."""

_TOKENS = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


@dataclass(frozen=True)
class Ray:
    """Makes engines on a Ray cluster: ``Federation(..., engine=Ray(workers=8, address="10.0.0.5:6379"))``.

    Without an address a cluster is started on this machine, seen by nobody else. Whoever reaches a cluster can run code
    on it: one at another address must ask for a token.

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
        spelled = Spelled.of(plan)  # what cannot travel is an error now
        _join(self)
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
            sys.modules["ray"].kill(self._hands.pop())


def _join(settings: Ray) -> None:
    """Be connected to the cluster; one that is started here gets a token that nobody else has."""
    os.environ.update(_QUIET)
    if settings.address is not None and not _is_here(settings.address) and not _has_token():
        raise SettingError(
            f"The cluster at {settings.address} is not on this machine, and there is no token for it: whoever reaches "
            f"a cluster without one can run code on it. Start it with RAY_AUTH_MODE=token, and set {_TOKENS[1]}."
        )
    try:
        import ray
    except ImportError as error:
        raise EngineError("Ray is not installed. Install it with: pip install 'descant[ray]'") from error
    if ray.is_initialized():
        return
    given: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
    if settings.address is None:
        count = (settings.workers or cores()) * settings.threads
        given |= {"num_cpus": count, "include_dashboard": False}
        if not _has_token():
            os.environ[_TOKENS[0]] = secrets.token_hex(32)  # or Ray writes one into the home folder, for all to read
    try:
        ray.init(address=settings.address or "local", **given)
    except (ConnectionError, OSError, RuntimeError, ValueError) as error:
        raise EngineError(f"There is no Ray cluster at {settings.address or 'this machine'}: {error}") from error


def _is_here(address: str) -> bool:
    host = address.removeprefix("ray://").rpartition(":")[0].strip("[]") or address
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host in ("localhost", "auto", "local")


def _has_token() -> bool:
    return any(os.environ.get(name) for name in _TOKENS) or (Path.home() / ".ray" / "auth_token").exists()


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
        self._plans: dict[str, Plan] = {}

    def mark(self, plan: str, spelled: Parcel) -> str:
        return mark_of(self._plan(plan, spelled))

    def work(self, plan: str, spelled: Parcel, shared: Parcel, own: Parcel) -> Parcel:
        """The answers to the tasks of a piece."""
        fields, arrays = unpacked(own)
        answers, crate = answered(self._plan(plan, spelled), fields, {**unpacked(shared)[1], **arrays})
        return packed(answers, crate.arrays)

    def _plan(self, name: str, spelled: Parcel) -> Plan:
        if name not in self._plans:
            self._plans[name] = made(*unpacked(spelled))
        self._plans = {**dict(list(self._plans.items())[-_PLANS:]), name: self._plans[name]}
        return self._plans[name]


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

    def members(self) -> Sequence[str]:
        return self._names

    def wait(self) -> RayEngine:
        """Wait until every worker has started and made the plan; a round does not need it."""
        try:
            hands = self._cluster._hands[: len(self._doing)]
            marks = self._ray.get([hand.mark.remote(*self._plan) for hand in hands])
        except self._ray.exceptions.RayError as error:
            raise EngineError(f"A Ray worker could not make the federation:\n{error}") from error
        if set(marks) != {self._mark}:
            raise EngineError(
                "A Ray worker made another model or other parties than this process. "
                "What makes them must make the same every time: seed what it draws."
            )
        self._alike = True
        return self

    def submit(self, tasks: Sequence[Task]) -> None:
        if not self._alike:
            self.wait()
        for doing in self._doing:
            if doing and doing[0].part.overdue():  # it hangs, on whatever
                self._ray.kill(doing[0].hand)
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
        return []

    def _give(self) -> None:
        """Hand out what waits."""
        order = sorted(range(len(self._doing)), key=lambda at: len(self._doing[at]))
        for at in order * _AHEAD:
            if self._owed.waiting and len(self._doing[at]) < _AHEAD:
                part = self._owed.waiting.popleft()
                part.begun = time.monotonic()
                hand = self._cluster._hands[at]
                answer = hand.work.remote(*self._plan, self._shared, packed(*part.load.own(part.rows)))
                self._doing[at].append(Asked(hand, answer, part))

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
