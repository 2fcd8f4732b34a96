"""An engine for the laws: tasks and reports go through bytes, and the stack is cut into as many pieces as asked."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from descant.core.interfaces import Store
from descant.core.messages import Report, Task
from descant.rounds.party_side import work
from descant.rounds.plan import Plan
from descant.serialization.wire import pack, unpack
from descant.storage import PartyStore


class Bytes:
    """Cuts every round into ``pieces``; ``absent`` parties cannot be reached; ``fault`` may falsify a report."""

    def __init__(
        self,
        plan: Plan,
        pieces: int = 1,
        absent: Collection[str] = (),
        fault: Callable[[Report], Sequence[Report]] | None = None,
    ) -> None:
        self.plan, self.pieces, self.fault = plan, pieces, fault
        self.names = tuple(name for name in plan.people if name not in absent)
        self.memory: Store = PartyStore()
        self.wires: list[list[bytes]] = []

    def members(self, begin: bool = False) -> Sequence[str]:
        return self.names

    def submit(self, tasks: Sequence[Task]) -> None:
        wires = [pack(task) for task in tasks]
        cuts = [wires[piece :: self.pieces] for piece in range(self.pieces)]
        self.wires.extend(reversed([cut for cut in cuts if cut]))  # pieces answer in another order than they were asked

    def collect(self, timeout: float) -> list[Report]:
        tasks = [unpack(wire, Task) for wire in self.wires.pop()] if self.wires else []
        reports = []
        for report, memory in work(self.plan, tasks, [self.memory.get(task.party) for task in tasks]):
            if memory is not None:
                self.memory.stage(report.party, memory)
            sent = [report] if self.fault is None else self.fault(report)
            reports.extend(unpack(pack(one), Report) for one in sent)
        return reports
