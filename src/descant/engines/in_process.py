"""The engine that every other one must agree with: the stack runs here, cut only where memory asks for it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ..core.interfaces import Store
from ..core.messages import Reply, Task
from ..rounds.party_side import perform_tasks
from ..rounds.plan import Plan
from ..storage import PartyStore

_STACK_BYTES = 2**31  # the rows of one stack with their gradients, moments and anchors
_COPIES = 8


class InProcess:
    """Runs the tasks of a round as one stack, or as several of at most ``most`` parties."""

    def __init__(self, plan: Plan, max_parties: int | None = None) -> None:
        row_bytes = plan.net.layout.width * plan.net.layout.dtype.itemsize
        self._max_parties = max_parties or max(2, _STACK_BYTES // (row_bytes * _COPIES))
        self._names = tuple(plan.population)
        self._work = partial(perform_tasks, plan)
        self._queue: list[Task] = []
        self._memory = PartyStore(plan.memory_budget)

    @property
    def party_states(self) -> Store:
        return self._memory

    def available_parties(self, starting_round: bool = False) -> Sequence[str]:
        return self._names

    def submit(self, tasks: Sequence[Task]) -> None:
        self._queue = list(tasks)  # what is left of a round that was broken off is dropped

    def collect(self, timeout: float) -> list[Reply]:
        batch = self._queue[: self._max_parties]
        self._queue = self._queue[self._max_parties :]
        reports = []
        for report, memory in self._work(batch, [self._memory.get(task.party) for task in batch]):
            if memory is not None:
                self._memory.stage(report.party, memory)
            reports.append(report)
        return reports
