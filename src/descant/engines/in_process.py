"""The default engine: tasks run in this process as one stack. Every other engine must give the same result."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ..core.interfaces import Store
from ..core.messages import Reply, Task
from ..rounds.party_side import perform_tasks
from ..rounds.plan import Plan
from ..storage import PartyStore

_STACK_BYTES = 2**31  # bytes of one stack, with its gradients, moments and anchors
_COPIES = 8  # of each row, in gradients, moments and anchors


class InProcess:
    """Run the tasks of a round as one stack, or as several stacks of at most ``max_parties`` parties."""

    def __init__(self, plan: Plan, max_parties: int | None = None) -> None:
        row_bytes = plan.net.layout.width * plan.net.layout.dtype.itemsize
        self._max_parties = max_parties or max(2, _STACK_BYTES // (row_bytes * _COPIES))
        self._names = tuple(plan.population)
        self._perform_tasks = partial(perform_tasks, plan)
        self._queue: list[Task] = []
        self._party_states = PartyStore(plan.memory_budget)

    @property
    def party_states(self) -> Store:
        return self._party_states

    def available_parties(self, starting_round: bool = False) -> Sequence[str]:
        return self._names

    def submit(self, tasks: Sequence[Task]) -> None:
        self._queue = list(tasks)  # drops the rest of an interrupted round

    def collect(self, timeout: float) -> list[Reply]:
        batch = self._queue[: self._max_parties]
        self._queue = self._queue[self._max_parties :]
        replies = []
        for reply, party_state in self._perform_tasks(batch, [self._party_states.get(task.party) for task in batch]):
            if party_state is not None:
                self._party_states.stage(reply.party, party_state)
            replies.append(reply)
        return replies
