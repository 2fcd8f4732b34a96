"""Work that parties still have when a round is over: what a run must know of it to go on, after a kill, too.

Only what was asked is kept (who, from which version of the centre, with which settings, since when), and those
versions: asked again, a task has the same answer. So nothing of an answer that is on its way need be saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..core.algorithm import Hyper, NamedTensors
from ..core.messages import Task
from .dispatch import CollectedReplies
from .plan import Plan
from .state import State

SENT_AT = "sent_at"
"""The setting that says when a task was handed out, in the engine's own seconds."""
_GLOBAL_MODEL_PREFIX = "global_model."


@dataclass(frozen=True)
class PendingTask:
    """A task that is not answered yet."""

    party: str
    round: int
    hyper: Hyper
    sent_at: float


@dataclass(frozen=True)
class PendingTasks:
    """Every such task, the centres that they began with, and the engine's clock."""

    clock: float = 0.0
    tasks: tuple[PendingTask, ...] = ()
    global_models: dict[int, Tensor] = field(default_factory=dict)  # by round: [width]

    @classmethod
    def from_state(cls, plan: Plan, state: State) -> PendingTasks:
        """As a state has it."""
        saved = state.server_state.get("pending_tasks")
        if saved is None:
            return cls()
        columns = (saved[name].tolist() for name in ("party_index", "round", "lr", "work", SENT_AT))
        names = plan.population.names
        tasks = [
            PendingTask(names[k], round, Hyper(lr, work), sent_at=at)
            for k, round, lr, work, at in zip(*columns, strict=True)
        ]
        global_models = {
            int(name.removeprefix(_GLOBAL_MODEL_PREFIX)): row
            for name, row in saved.items()
            if name.startswith(_GLOBAL_MODEL_PREFIX)
        }
        return cls(float(saved["clock"]), tuple(tasks), global_models)

    def to_tensors(self, plan: Plan) -> NamedTensors:
        """As tensors, to be saved."""
        numbers = {
            "party_index": torch.tensor([plan.party_indices[one.party] for one in self.tasks], dtype=torch.int64),
            "round": torch.tensor([one.round for one in self.tasks], dtype=torch.int64),
            "lr": torch.tensor([one.hyper.lr for one in self.tasks], dtype=torch.float64),
            "work": torch.tensor([one.hyper.work for one in self.tasks], dtype=torch.int64),
            SENT_AT: torch.tensor([one.sent_at for one in self.tasks], dtype=torch.float64),
            "clock": torch.tensor(self.clock, dtype=torch.float64),
        }
        return {**numbers, **{f"{_GLOBAL_MODEL_PREFIX}{round}": row for round, row in self.global_models.items()}}

    @property
    def busy_parties(self) -> set[str]:
        """Who is still at work."""
        return {one.party for one in self.tasks}

    def state_at(self, state: State, round: int) -> State:
        """The state as far as a task of that round saw it."""
        return replace(state, global_model=self.global_models[round])

    def after_round(self, state: State, replies: CollectedReplies) -> PendingTasks:
        """What is still asked when a round is over."""
        unanswered: Sequence[Task] = [task for task in replies.pending if task.kind == "train"]
        tasks = tuple(
            PendingTask(
                t.party, t.round, Hyper(t.settings["lr"], t.settings["work"]), sent_at=float(t.settings[SENT_AT])
            )
            for t in unanswered
        )
        global_models = {
            round: self.global_models.get(round, state.global_model) for round in sorted({one.round for one in tasks})
        }
        return PendingTasks(max(self.clock, replies.clock), tasks, global_models)
