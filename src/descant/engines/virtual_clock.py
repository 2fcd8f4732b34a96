"""Simulate parties of different speeds on a virtual clock, without waiting for the slow ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..core import seeds
from ..core.interfaces import Engine, Store
from ..core.messages import Reply, Task
from ..core.settings import check_settings, setting
from ..errors import SettingError
from ..rounds.plan import Plan
from .in_process import InProcess


@dataclass(frozen=True)
class VirtualClock:
    """Makes engines in which a task takes its work divided by its party's speed, in virtual seconds.

    ``Federation(..., engine=VirtualClock({"slow": 0.1}))``: a party that is not named has speed 1, one unit of work per
    second. The replies that make up a round, and their delays, then depend on the speeds and the seed alone. Each reply
    has its arrival time as the metric "clock". ``engine`` does the work itself when a task is due.
    """

    speeds: Mapping[str, float] = field(default_factory=dict)  # by party; 1 for the others
    jitter: float = setting(0.0, "standard deviation of the logarithm of a task's duration", least=0)
    engine: Callable[[Plan], Engine] = InProcess

    def __call__(self, plan: Plan) -> VirtualClockEngine:
        """An engine for one federation."""
        check_settings(self)
        for party, speed in self.speeds.items():
            if party not in plan.population:
                raise SettingError(f"VirtualClock has a speed for party {party!r}, and there is no party of that name.")
            if not isinstance(speed, int | float) or isinstance(speed, bool) or not 0 < speed < math.inf:
                raise SettingError(f"The speed of party {party!r} must be a number > 0. Got {speed!r}.")
        return VirtualClockEngine(plan, self, self.engine(plan))


class VirtualClockEngine:
    """A `core.Engine` around another engine; it keeps only the tasks submitted last."""

    def __init__(self, plan: Plan, settings: VirtualClock, engine: Engine) -> None:
        self._seed = plan.seed
        self._quorum = plan.algorithm.quorum
        self._settings = settings
        self._engine = engine
        self._due: list[tuple[float, Task]] = []  # sorted by time
        self._outstanding = 0  # replies that the wrapped engine still has to give
        self._arrivals: dict[str, float] = {}
        self._started = 0

    @property
    def party_states(self) -> Store:
        return self._engine.party_states

    def available_parties(self, starting_round: bool = False) -> Sequence[str]:
        return self._engine.available_parties(starting_round)

    def submit(self, tasks: Sequence[Task]) -> None:
        if any(task.kind not in ("train", "proxy") for task in tasks):  # evaluation takes no time
            self._due = []
            self._arrivals = {}
            self._outstanding = len(tasks)
            self._engine.submit(tasks)
            return
        due = [(self._finish_time(task), self._tie_break(task), task) for task in tasks]
        self._due = [(at, task) for at, _, task in sorted(due, key=lambda one: one[:2])]
        self._outstanding = self._started = 0

    def collect(self, timeout: float) -> list[Reply]:
        if not self._outstanding and self._due:
            self._submit_due()
        replies = self._engine.collect(timeout)
        self._outstanding = max(0, self._outstanding - len(replies))
        return [self._add_arrival_time(reply) for reply in replies]

    def _submit_due(self) -> None:
        """Submit the tasks that are due next: all coreset proxies, and as many parties as the round waits for."""
        parties = [task.party for _, task in self._due if task.kind == "train"]
        count = len(parties) if self._quorum is None else max(1, self._quorum - self._started)
        later = set(parties[count:])
        now = [due for due in self._due if due[1].party not in later]
        self._due = [due for due in self._due if due[1].party in later]
        self._arrivals = {task.party: at for at, task in now}
        self._started += len(parties) - len(later)
        self._outstanding = len(now)
        self._engine.submit([task for _, task in now])

    def _finish_time(self, task: Task) -> float:
        """Return the time of a task's reply; a coreset proxy is the server's own work and takes no time."""
        sent_at = float(task.settings.get("sent_at", 0.0))
        if task.kind == "proxy":
            return sent_at
        draw = seeds.stream(self._seed, task.round, task.party, "clock").normal() if self._settings.jitter else 0.0
        slowness = math.exp(self._settings.jitter * draw) / self._settings.speeds.get(task.party, 1.0)
        return sent_at + float(task.settings["work"]) * slowness

    def _tie_break(self, task: Task) -> tuple[int, float]:
        """Return the sort key of tasks that finish at the same time: the earlier round first, then a random draw.

        Sorted by name, the same parties would always be late.
        """
        return task.round, float(seeds.stream(self._seed, task.round, task.party, "tie").random())

    def _add_arrival_time(self, reply: Reply) -> Reply:
        at = self._arrivals.get(reply.party)
        return reply if at is None else replace(reply, metrics={**reply.metrics, "clock": at})
