"""What goes to a worker: a plan, spelled out, and the tasks of a round, cut into pieces."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import save_file
from torch import Tensor

from ...core.algorithm import NamedTensors
from ...core.messages import Task
from ...errors import EngineError, SettingError
from ...rounds.plan import Plan
from ...serialization.references import encode
from ...serialization.wire import TensorPool, to_fields
from .shared_memory import SharedTensorFile

if TYPE_CHECKING:
    from .process_engine import ProcessEngine

_PLAN_FIELDS = ("algorithm", "solver", "loss", "metric", "seed", "vault", "coreset_limit")


@dataclass(frozen=True)
class PlanMessage:
    """A plan as bytes."""

    fields: dict[str, Any]
    arrays: dict[str, Tensor]

    @classmethod
    def from_plan(cls, plan: Plan) -> PlanMessage:
        arrays: dict[str, Tensor] = {}
        if plan.origin is None:
            raise EngineError("This plan does not say what it was made of. Make it by Plan.made(...).")
        parts = {"model": plan.origin[0], "data": plan.origin[1]}
        parts |= {name: getattr(plan, name) for name in _PLAN_FIELDS}
        return cls({name: _encode_part(name, part, arrays) for name, part in parts.items()}, arrays)

    def message(self, plan_id: int, folder: Path) -> dict[str, Any]:
        """Its text, and where the tensors among the settings lie; most plans have none."""
        file = folder / f"plan-{plan_id}-settings"
        if self.arrays and not file.exists():
            save_file({name: tensor.contiguous().clone() for name, tensor in self.arrays.items()}, file)
        return {"plan": plan_id, "spelled": self.fields, "file": str(file) if self.arrays else ""}


def _encode_part(name: str, part: Any, arrays: dict[str, Tensor]) -> Any:
    try:
        return encode(part, arrays)
    except SettingError as error:
        raise SettingError(f"The {name} cannot go to a worker process. {error}") from None


@dataclass(eq=False)
class ProcessTaskBatch:
    """The tasks of one `submit`: their arrays lie together on one shelf."""

    owner: weakref.ref[ProcessEngine]  # not the engine itself: a piece that is forgotten must not keep it alive
    plan_id: int
    tasks: Sequence[Task]
    party_states: Sequence[NamedTensors]
    buffer: SharedTensorFile

    @cached_property
    def encoded(self) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
        """Every task and memory as JSON values that point into the shelf."""
        crate = TensorPool()
        sheets = [to_fields(task, crate) for task in self.tasks]
        memories = [crate.add(memory) for memory in self.party_states]
        self.buffer.write(crate.arrays)
        return sheets, memories

    def message(self, piece_id: int, rows: range) -> dict[str, Any]:
        """Some of them as a worker is asked, by the number of their piece."""
        sheets, memories = (part[rows.start : rows.stop] for part in self.encoded)
        return {
            "piece": piece_id,
            "plan": self.plan_id,
            "file": str(self.buffer.file),
            "tasks": sheets,
            "party_states": memories,
        }


def split_rows(count: int, workers: int, max_rows: int) -> list[range]:
    """An equal share for each worker, in pieces of at most ``most``; the first pieces of all shares come first.

    >>> cut(10, 2, 2)
    [range(0, 2), range(5, 7), range(2, 4), range(7, 9), range(4, 5), range(9, 10)]
    """
    shares = [range(i * count // workers, (i + 1) * count // workers) for i in range(workers)]
    pieces = [[share[at : at + max_rows] for at in range(0, len(share), max_rows)] for share in shares]
    return [piece for level in itertools.zip_longest(*pieces) for piece in level if piece]
