"""A virtual clock: parties of unlike speed, without waiting for any of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..core import seeds
from ..core.interfaces import Engine, Store
from ..core.messages import Report, Task
from ..core.settings import check, setting
from ..errors import SettingError
from ..rounds.plan import Plan
from .in_process import InProcess


@dataclass(frozen=True)
class Clocked:
    """Makes engines in which a task takes its work divided by its party's speed, in virtual seconds.

    ``Federation(..., engine=Clocked({"slow": 0.1}))``: who is not named has a speed of 1, a unit of work a second.
    Which reports make up a round, and how late each of them is, then depends on speeds and seed alone; reports say when
    they came (the metric "clock"). The work itself is done, by ``engine``, when its time has come.
    """

    speeds: Mapping[str, float] = field(default_factory=dict)
    jitter: float = setting(0.0, "standard deviation of the logarithm of a task's duration", least=0)
    engine: Callable[[Plan], Engine] = InProcess

    def __call__(self, plan: Plan) -> Clock:
        """An engine for one federation."""
        check(self)
        for party, speed in self.speeds.items():
            if party not in plan.people:
                raise SettingError(f"Clocked has a speed for party {party!r}, and there is none of that name.")
            if not isinstance(speed, int | float) or isinstance(speed, bool) or not 0 < speed < math.inf:
                raise SettingError(f"The speed of party {party!r} must be a number > 0. Got {speed!r}.")
        return Clock(plan, self, self.engine(plan))


class Clock:
    """A `core.Engine` around another one; what it was asked last is all that it knows."""

    def __init__(self, plan: Plan, settings: Clocked, engine: Engine) -> None:
        self._seed, self._quorum, self._settings, self._engine = plan.seed, plan.algorithm.quorum, settings, engine
        self._due: list[tuple[float, Task]] = []  # in the order of their time
        self._owed = 0  # answers of the engine below
        self._came: dict[str, float] = {}
        self._heard = 0

    @property
    def memory(self) -> Store:
        return self._engine.memory

    def members(self, begin: bool = False) -> Sequence[str]:
        return self._engine.members(begin)

    def submit(self, tasks: Sequence[Task]) -> None:
        if any(task.kind not in ("train", "stand_in") for task in tasks):  # who looks on takes no time
            self._due, self._came, self._owed = [], {}, len(tasks)
            self._engine.submit(tasks)
            return
        due = [(self._time(task), self._tie(task), task) for task in tasks]
        self._due = [(at, task) for at, _, task in sorted(due, key=lambda one: one[:2])]
        self._owed = self._heard = 0

    def collect(self, timeout: float) -> list[Report]:
        if not self._owed and self._due:
            self._begin()
        reports = self._engine.collect(timeout)
        self._owed = max(0, self._owed - len(reports))
        return [self._dated(report) for report in reports]

    def _begin(self) -> None:
        """Hand on what is due next: all stand-ins, and as many parties as the round waits for."""
        parties = [task.party for _, task in self._due if task.kind == "train"]
        most = len(parties) if self._quorum is None else max(1, self._quorum - self._heard)
        later = set(parties[most:])
        now = [due for due in self._due if due[1].party not in later]
        self._due = [due for due in self._due if due[1].party in later]
        self._came = {task.party: at for at, task in now}
        self._heard += len(parties) - len(later)
        self._owed = len(now)
        self._engine.submit([task for _, task in now])

    def _time(self, task: Task) -> float:
        """When its answer comes; a stand-in is the server's own work, and takes none."""
        began = float(task.settings.get("at", 0.0))
        if task.kind == "stand_in":
            return began
        draw = seeds.stream(self._seed, task.round, task.party, "clock").normal() if self._settings.jitter else 0.0
        slowness = math.exp(self._settings.jitter * draw) / self._settings.speeds.get(task.party, 1.0)
        return began + float(task.settings["work"]) * slowness

    def _tie(self, task: Task) -> tuple[int, float]:
        """Who is first of those who are done at one time: who was asked first, then by lot.

        By name, the same parties would be late again and again.
        """
        return task.round, float(seeds.stream(self._seed, task.round, task.party, "tie").random())

    def _dated(self, report: Report) -> Report:
        at = self._came.get(report.party)
        return report if at is None else replace(report, metrics={**report.metrics, "clock": at})
