"""Pending tasks of asynchronous methods, as a run saves them to resume after a kill.

Only the tasks are saved (party, version of the global model, settings, time of sending), and those versions: a task
that is sent again has the same reply, so replies on their way need not be saved.
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
"""The setting with the time at which a task was sent, in seconds of the engine's clock."""
_GLOBAL_MODEL_PREFIX = "global_model."


@dataclass(frozen=True)
class PendingTask:
    """A task without a reply."""

    party: str
    round: int
    hyper: Hyper
    sent_at: float


@dataclass(frozen=True)
class PendingTasks:
    """All pending tasks, the global models they started from, and the engine's clock."""

    clock: float = 0.0
    tasks: tuple[PendingTask, ...] = ()
    global_models: dict[int, Tensor] = field(default_factory=dict)  # by round: [width]

    @classmethod
    def from_state(cls, plan: Plan, state: State) -> PendingTasks:
        """Restore the pending tasks of a state."""
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
        """Return the pending tasks as tensors, to be saved."""
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
        """Return the parties with a pending task."""
        return {one.party for one in self.tasks}

    def state_at(self, state: State, round: int) -> State:
        """Return the state with the global model that a task of that round received."""
        return replace(state, global_model=self.global_models[round])

    def after_round(self, state: State, replies: CollectedReplies) -> PendingTasks:
        """Return the tasks that are pending after a round."""
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
