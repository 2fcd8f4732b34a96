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

from ...core.algorithm import NamedTensors
from ...core.messages import Task
from ...errors import StateError
from ...models.flat import Layout
from ...rounds.party_evaluation import models_in_use
from ...rounds.plan import Plan
from ...serialization.wire import write_to_file
from ...storage import atomic, write_errors
from ...storage.mapped_tensors import map_tensors

PERSONAL_MODEL_FILE = "personal_model.safetensors"
GLOBAL_MODEL_FILE = "global_model.safetensors"
_TRAINING_LOG = "training_log.jsonl"
_METADATA_KEY = "descant"


@dataclass(frozen=True)
class TrainingRecord:
    """What was asked of the party in a round."""

    round: int
    lr: float
    work: int
    execution_mode: str


def write_model(file: Path, layout: Layout, row: Tensor, metadata: Mapping[str, Any]) -> None:
    """A model by the names of its state_dict, with what is told of it, in place of the one before."""
    packed = write_to_file(layout.split(row.detach()), {_METADATA_KEY: json.dumps(metadata)})
    with write_errors(file.parent):
        atomic.replace(file, packed.memory_map(), f".{file.name}", atomic.PRIVATE_MODE)


@dataclass(frozen=True)
class SiloResults:
    """One party's folder."""

    folder: Path

    def record_task(self, task: Task) -> None:
        """A round is about to be answered; one that comes again is noted again, and counts once."""
        record = TrainingRecord(
            task.round, task.settings["lr"], task.settings["work"], execution_mode=task.settings["execution_mode"]
        )
        line = f"\n{json.dumps(asdict(record))}".encode()  # behind whatever a kill has left of the line before
        file = self.folder / _TRAINING_LOG
        with write_errors(self.folder):
            if not file.exists():
                atomic.write(file, b"", atomic.PRIVATE_MODE)
            atomic.append(file, line, file.stat().st_size)

    def training_records(self) -> dict[int, TrainingRecord]:
        """The rounds that were answered, in their order."""
        file = self.folder / _TRAINING_LOG
        found = dict[int, TrainingRecord]()
        for line in file.read_text().splitlines() if file.exists() else ():
            try:
                record = TrainingRecord(**json.loads(line))
            except (ValueError, TypeError):
                continue  # what a kill has left of a line
            found[record.round] = record
        return dict(sorted(found.items()))

    def write_models(self, plan: Plan, task: Task, party_state: NamedTensors, scores: Mapping[str, Any]) -> None:
        """The models that were judged, in place of those before."""
        for name, row in zip(
            (GLOBAL_MODEL_FILE, PERSONAL_MODEL_FILE), models_in_use(plan, task, party_state), strict=True
        ):
            write_model(self.folder / name, plan.net.layout, row, metadata={**scores, "round": task.round})

    def personal_model(self, layout: Layout) -> Tensor:
        """The party's own model, as it was judged."""
        return layout.join(map_tensors(self.folder / PERSONAL_MODEL_FILE))

    def scores(self) -> dict[str, Any]:
        """The party's scores and the round of its models; an error if there are none yet."""
        file = self.folder / PERSONAL_MODEL_FILE
        if not file.exists():
            raise StateError(f"No model was judged in {self.folder} yet: the server asks for it as its recipe says.")
        try:
            with safe_open(file, "pt") as tensors:
                return dict(json.loads(tensors.metadata()[_METADATA_KEY]))
        except (SafetensorError, ValueError, KeyError, TypeError) as error:
            raise StateError(f"{file} is not as Descant wrote it: {error}. The next judging writes it anew.") from error
