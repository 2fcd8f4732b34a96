"""Work that parties still have when a round is over: what a run must know of it to go on, after a kill, too.

Only what was asked is kept (who, from which version of the centre, with which settings, since when), and those
versions: asked again, a task has the same answer. So nothing of an answer that is on its way need be saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..core.algorithm import Hyper, Memory
from ..core.messages import Task
from .dispatch import Heard
from .plan import Plan
from .state import State

AT = "at"
"""The setting that says when a task was handed out, in the engine's own seconds."""
_CENTER = "center."


@dataclass(frozen=True)
class Asked:
    """A task that is not answered yet."""

    party: str
    round: int
    hyper: Hyper
    at: float


@dataclass(frozen=True)
class Flight:
    """Every such task, the centres that they began with, and the engine's clock."""

    clock: float = 0.0
    asked: tuple[Asked, ...] = ()
    centers: dict[int, Tensor] = field(default_factory=dict)  # by round: [width]

    @classmethod
    def of(cls, plan: Plan, state: State) -> Flight:
        """As a state has it."""
        held = state.memories.get("flight")
        if held is None:
            return cls()
        columns = (held[name].tolist() for name in ("place", "round", "lr", "work", AT))
        names = plan.people.names
        asked = [Asked(names[k], round, Hyper(lr, work), at) for k, round, lr, work, at in zip(*columns, strict=True)]
        centers = {int(name.removeprefix(_CENTER)): row for name, row in held.items() if name.startswith(_CENTER)}
        return cls(float(held["clock"]), tuple(asked), centers)

    def memory(self, plan: Plan) -> Memory:
        """As tensors, to be saved."""
        numbers = {
            "place": torch.tensor([plan.places[one.party] for one in self.asked], dtype=torch.int64),
            "round": torch.tensor([one.round for one in self.asked], dtype=torch.int64),
            "lr": torch.tensor([one.hyper.lr for one in self.asked], dtype=torch.float64),
            "work": torch.tensor([one.hyper.work for one in self.asked], dtype=torch.int64),
            AT: torch.tensor([one.at for one in self.asked], dtype=torch.float64),
            "clock": torch.tensor(self.clock, dtype=torch.float64),
        }
        return {**numbers, **{f"{_CENTER}{round}": row for round, row in self.centers.items()}}

    @property
    def parties(self) -> set[str]:
        """Who is still at work."""
        return {one.party for one in self.asked}

    def begun(self, state: State, round: int) -> State:
        """The state as far as a task of that round saw it."""
        return replace(state, center=self.centers[round])

    def after(self, state: State, heard: Heard) -> Flight:
        """What is still asked when a round is over."""
        owed: Sequence[Task] = [task for task in heard.owed if task.kind == "train"]
        asked = tuple(
            Asked(t.party, t.round, Hyper(t.settings["lr"], t.settings["work"]), float(t.settings[AT])) for t in owed
        )
        centers = {round: self.centers.get(round, state.center) for round in sorted({one.round for one in asked})}
        return Flight(max(self.clock, heard.clock), asked, centers)
