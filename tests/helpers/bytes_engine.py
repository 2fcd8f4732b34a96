"""An in-process engine for the laws: it serializes tasks and replies and splits every round into batches."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from descant.core.interfaces import Store
from descant.core.messages import Reply, Task
from descant.rounds.party_side import perform_tasks
from descant.rounds.plan import Plan
from descant.serialization.wire import pack, unpack
from descant.storage import PartyStore


class BytesEngine:
    """Split every round into ``batch_count`` batches.

    ``absent`` parties are unreachable; ``tamper`` may change a reply.
    """

    def __init__(
        self,
        plan: Plan,
        batch_count: int = 1,
        absent: Collection[str] = (),
        tamper: Callable[[Reply], Sequence[Reply]] | None = None,
    ) -> None:
        self.plan = plan
        self.batch_count = batch_count
        self.tamper = tamper
        self.names = tuple(name for name in plan.population if name not in absent)
        self.party_states: Store = PartyStore()
        self.packed_batches: list[list[bytes]] = []

    def available_parties(self, starting_round: bool = False) -> Sequence[str]:
        return self.names

    def submit(self, tasks: Sequence[Task]) -> None:
        packed_tasks = [pack(task) for task in tasks]
        batches = [packed_tasks[first :: self.batch_count] for first in range(self.batch_count)]
        self.packed_batches.extend(reversed([batch for batch in batches if batch]))  # replies come in another order

    def collect(self, timeout: float) -> list[Reply]:
        tasks = [unpack(packed, Task) for packed in self.packed_batches.pop()] if self.packed_batches else []
        replies = []
        party_states = [self.party_states.get(task.party) for task in tasks]
        for reply, party_state in perform_tasks(self.plan, tasks, party_states):
            if party_state is not None:
                self.party_states.stage(reply.party, party_state)
            tampered = [reply] if self.tamper is None else self.tamper(reply)
            replies.extend(unpack(pack(one), Reply) for one in tampered)
        return replies
