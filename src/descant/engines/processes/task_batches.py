"""Messages to a worker: an encoded plan, and the tasks of a round, split into pieces."""

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
    """An encoded plan."""

    fields: dict[str, Any]
    arrays: dict[str, Tensor]

    @classmethod
    def from_plan(cls, plan: Plan) -> PlanMessage:
        arrays: dict[str, Tensor] = {}
        if plan.origin is None:
            raise EngineError("This plan does not record its model and data. Make it with Plan.create(...).")
        parts = {"model": plan.origin[0], "data": plan.origin[1]}
        parts |= {name: getattr(plan, name) for name in _PLAN_FIELDS}
        return cls({name: _encode_part(name, part, arrays) for name, part in parts.items()}, arrays)

    def message(self, plan_id: int, folder: Path) -> dict[str, Any]:
        """Return the message with the plan; tensors among its settings, if any, go into a file that it names."""
        file = folder / f"plan-{plan_id}-settings"
        if self.arrays and not file.exists():
            save_file({name: tensor.contiguous().clone() for name, tensor in self.arrays.items()}, file)
        return {"plan": plan_id, "encoded": self.fields, "file": str(file) if self.arrays else ""}


def _encode_part(name: str, part: Any, arrays: dict[str, Tensor]) -> Any:
    try:
        return encode(part, arrays)
    except SettingError as error:
        raise SettingError(f"The {name} cannot be sent to a worker process. {error}") from None


@dataclass(eq=False)
class ProcessTaskBatch:
    """The tasks of one `submit`, with their arrays together in one shared-memory file."""

    owner: weakref.ref[ProcessEngine]  # weak: a forgotten piece must not keep its engine alive
    plan_id: int
    tasks: Sequence[Task]
    party_states: Sequence[NamedTensors]
    buffer: SharedTensorFile

    @cached_property
    def encoded(self) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
        """The fields of every task and the array keys of every party state; the arrays are in the file."""
        pool = TensorPool()
        task_fields = [to_fields(task, pool) for task in self.tasks]
        state_keys = [pool.add(party_state) for party_state in self.party_states]
        self.buffer.write(pool.arrays)
        return task_fields, state_keys

    def message(self, piece_id: int, rows: range) -> dict[str, Any]:
        """Return the message with the tasks in these rows."""
        task_fields, state_keys = self.encoded
        return {
            "piece": piece_id,
            "plan": self.plan_id,
            "file": str(self.buffer.file),
            "tasks": task_fields[rows.start : rows.stop],
            "party_states": state_keys[rows.start : rows.stop],
        }


def split_rows(count: int, workers: int, max_rows: int) -> list[range]:
    """Return equal shares for the workers, in pieces of at most `max_rows`; the first piece of each share comes first.

    >>> split_rows(10, 2, 2)
    [range(0, 2), range(5, 7), range(2, 4), range(7, 9), range(4, 5), range(9, 10)]
    """
    shares = [range(i * count // workers, (i + 1) * count // workers) for i in range(workers)]
    pieces = [[share[at : at + max_rows] for at in range(0, len(share), max_rows)] for share in shares]
    return [piece for level in itertools.zip_longest(*pieces) for piece in level if piece]
