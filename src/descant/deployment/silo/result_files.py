"""What a team has of taking part, on its own disk: its own model, the common one, and what it has worked for them.

folder/own.safetensors      its own model by the names of its state_dict, and its scores, when it was last judged
folder/center.safetensors   the common model of that moment
folder/worked.jsonl         the rounds that were answered: learning rate, work, and the way it was computed
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...core.algorithm import Memory
from ...core.messages import Task
from ...errors import StateError
from ...models.flat import Layout
from ...rounds.party_evaluation import shown
from ...rounds.plan import Plan
from ...serialization.wire import filed
from ...storage import atomic, clear_errors
from ...storage.mapped_tensors import tensors_in

OWN = "own.safetensors"
CENTER = "center.safetensors"
_WORKED = "worked.jsonl"
_HEADER = "descant"


@dataclass(frozen=True)
class Work:
    """What was asked of the party in a round."""

    round: int
    lr: float
    work: int
    way: str


def write_model(file: Path, layout: Layout, row: Tensor, told: Mapping[str, Any]) -> None:
    """A model by the names of its state_dict, with what is told of it, in place of the one before."""
    held = filed(layout.split(row.detach()), {_HEADER: json.dumps(told)})
    with clear_errors(file.parent):
        atomic.replace(file, held.mapped(), f".{file.name}", atomic.PRIVATE)


@dataclass(frozen=True)
class Result:
    """One party's folder."""

    folder: Path

    def note(self, task: Task) -> None:
        """A round is about to be answered; one that comes again is noted again, and counts once."""
        work = Work(task.round, task.settings["lr"], task.settings["work"], task.settings["way"])
        line = f"\n{json.dumps(asdict(work))}".encode()  # behind whatever a kill has left of the line before
        file = self.folder / _WORKED
        with clear_errors(self.folder):
            if not file.exists():
                atomic.write(file, b"", atomic.PRIVATE)
            atomic.append(file, line, file.stat().st_size)

    def worked(self) -> dict[int, Work]:
        """The rounds that were answered, in their order."""
        file, found = self.folder / _WORKED, dict[int, Work]()
        for line in file.read_text().splitlines() if file.exists() else ():
            try:
                work = Work(**json.loads(line))
            except (ValueError, TypeError):
                continue  # what a kill has left of a line
            found[work.round] = work
        return dict(sorted(found.items()))

    def keep(self, plan: Plan, task: Task, memory: Memory, scores: Mapping[str, Any]) -> None:
        """The models that were judged, in place of those before."""
        for name, row in zip((CENTER, OWN), shown(plan, task, memory), strict=True):
            write_model(self.folder / name, plan.net.layout, row, {**scores, "round": task.round})

    def own(self, layout: Layout) -> Tensor:
        """The party's own model, as it was judged."""
        return layout.join(tensors_in(self.folder / OWN))

    def scores(self) -> dict[str, Any]:
        """The party's scores and the round of its models; an error if there are none yet."""
        file = self.folder / OWN
        if not file.exists():
            raise StateError(f"No model was judged in {self.folder} yet: the server asks for it as its recipe says.")
        try:
            with safe_open(file, "pt") as held:
                return dict(json.loads(held.metadata()[_HEADER]))
        except (SafetensorError, ValueError, KeyError, TypeError) as error:
            raise StateError(f"{file} is not as Descant wrote it: {error}. The next judging writes it anew.") from error
