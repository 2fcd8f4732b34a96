"""An engine for the laws: tasks and reports go through bytes, and the stack is cut into as many pieces as asked."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from descant.core.interfaces import Store
from descant.core.messages import Reply, Task
from descant.rounds.party_side import perform_tasks
from descant.rounds.plan import Plan
from descant.serialization.wire import pack, unpack
from descant.storage import PartyStore


class BytesEngine:
    """Cuts every round into ``pieces``; ``absent`` parties cannot be reached; ``fault`` may falsify a report."""

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
        batches = [packed_tasks[piece :: self.batch_count] for piece in range(self.batch_count)]
        self.packed_batches.extend(
            reversed([cut for cut in batches if cut])
        )  # pieces answer in another order than they were asked

    def collect(self, timeout: float) -> list[Reply]:
        tasks = [unpack(wire, Task) for wire in self.packed_batches.pop()] if self.packed_batches else []
        replies = []
        for reply, party_state in perform_tasks(
            self.plan, tasks, [self.party_states.get(task.party) for task in tasks]
        ):
            if party_state is not None:
                self.party_states.stage(reply.party, party_state)
            tampered = [reply] if self.tamper is None else self.tamper(reply)
            replies.extend(unpack(pack(one), Reply) for one in tampered)
        return replies
