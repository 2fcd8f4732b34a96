"""The results of a silo on its own disk: personal model, global model, and a log of its training.

folder/personal_model.safetensors  the personal model by the names of its state_dict, with its last scores
folder/global_model.safetensors    the global model of that evaluation
folder/training_log.jsonl          the rounds that were answered: learning rate, work and execution mode
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
    """The training settings that a party was given in one round."""

    round: int
    lr: float
    work: int
    execution_mode: str


def write_model(file: Path, layout: Layout, row: Tensor, metadata: Mapping[str, Any]) -> None:
    """Write a model by the names of its state_dict, with metadata; replace the previous file."""
    packed = write_to_file(layout.split(row.detach()), {_METADATA_KEY: json.dumps(metadata)})
    with write_errors(file.parent):
        atomic.replace(file, packed.memory_map(), f".{file.name}", atomic.PRIVATE_MODE)


@dataclass(frozen=True)
class SiloResults:
    """The result files in one party's folder."""

    folder: Path

    def record_task(self, task: Task) -> None:
        """Append a round to the training log; a repeated round is logged again and counts once."""
        record = TrainingRecord(
            round=task.round,
            lr=task.settings["lr"],
            work=task.settings["work"],
            execution_mode=task.settings["execution_mode"],
        )
        line = f"\n{json.dumps(asdict(record))}".encode()  # a new line first: a kill may have cut the previous one
        file = self.folder / _TRAINING_LOG
        with write_errors(self.folder):
            if not file.exists():
                atomic.write(file, b"", atomic.PRIVATE_MODE)
            atomic.append(file, line, file.stat().st_size)

    def training_records(self) -> dict[int, TrainingRecord]:
        """Return the answered rounds in order."""
        file = self.folder / _TRAINING_LOG
        records = dict[int, TrainingRecord]()
        for line in file.read_text().splitlines() if file.exists() else ():
            try:
                record = TrainingRecord(**json.loads(line))
            except (ValueError, TypeError):
                continue  # a line cut by a kill
            records[record.round] = record
        return dict(sorted(records.items()))

    def write_models(self, plan: Plan, task: Task, party_state: NamedTensors, scores: Mapping[str, Any]) -> None:
        """Write the evaluated models; replace the previous ones."""
        for name, row in zip(
            (GLOBAL_MODEL_FILE, PERSONAL_MODEL_FILE), models_in_use(plan, task, party_state), strict=True
        ):
            write_model(self.folder / name, plan.net.layout, row, metadata={**scores, "round": task.round})

    def personal_model(self, layout: Layout) -> Tensor:
        """Return the personal model of the last evaluation."""
        return layout.join(map_tensors(self.folder / PERSONAL_MODEL_FILE))

    def scores(self) -> dict[str, Any]:
        """Return the scores and the round of the last evaluation; raise if there is none yet."""
        file = self.folder / PERSONAL_MODEL_FILE
        if not file.exists():
            raise StateError(
                f"No model was evaluated in {self.folder} yet: the server asks for evaluations as its recipe says."
            )
        try:
            with safe_open(file, "pt") as tensors:
                return dict(json.loads(tensors.metadata()[_METADATA_KEY]))
        except (SafetensorError, ValueError, KeyError, TypeError) as error:
            message = f"{file} is not as Descant wrote it: {error}. The next evaluation writes it again."
            raise StateError(message) from error
