"""The engine that every other one must agree with: the stack runs here, cut only where memory asks for it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ..core.interfaces import Store
from ..core.messages import Report, Task
from ..rounds.party_side import work
from ..rounds.plan import Plan
from ..storage import PartyStore

_STACK_BYTES = 2**31  # the rows of one stack with their gradients, moments and anchors
_COPIES = 8


class InProcess:
    """Runs the tasks of a round as one stack, or as several of at most ``most`` parties."""

    def __init__(self, plan: Plan, most: int | None = None) -> None:
        row = plan.net.layout.width * plan.net.layout.dtype.itemsize
        self._most = most or max(2, _STACK_BYTES // (row * _COPIES))
        self._names = tuple(plan.people)
        self._work = partial(work, plan)
        self._waiting: list[Task] = []
        self._memory = PartyStore(plan.budget)

    @property
    def memory(self) -> Store:
        return self._memory

    def members(self, begin: bool = False) -> Sequence[str]:
        return self._names

    def submit(self, tasks: Sequence[Task]) -> None:
        self._waiting = list(tasks)  # what is left of a round that was broken off is dropped

    def collect(self, timeout: float) -> list[Report]:
        now, self._waiting = self._waiting[: self._most], self._waiting[self._most :]
        reports = []
        for report, memory in self._work(now, [self._memory.get(task.party) for task in now]):
            if memory is not None:
                self._memory.stage(report.party, memory)
            reports.append(report)
        return reports
