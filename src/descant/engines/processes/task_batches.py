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

from ...core.algorithm import Memory
from ...core.messages import Task
from ...errors import EngineError, SettingError
from ...rounds.plan import Plan
from ...serialization.references import spell
from ...serialization.wire import Crate, sheet
from .shared_memory import Shelf

if TYPE_CHECKING:
    from .process_engine import ProcessEngine

_PARTS = ("algorithm", "solver", "loss", "metric", "seed", "vault", "agreed")


@dataclass(frozen=True)
class Spelled:
    """A plan as bytes."""

    text: dict[str, Any]
    arrays: dict[str, Tensor]

    @classmethod
    def of(cls, plan: Plan) -> Spelled:
        arrays: dict[str, Tensor] = {}
        if plan.origin is None:
            raise EngineError("This plan does not say what it was made of. Make it by Plan.made(...).")
        parts = {"model": plan.origin[0], "data": plan.origin[1]}
        parts |= {name: getattr(plan, name) for name in _PARTS}
        return cls({name: _part(name, part, arrays) for name, part in parts.items()}, arrays)

    def message(self, number: int, folder: Path) -> dict[str, Any]:
        """Its text, and where the tensors among the settings lie; most plans have none."""
        place = folder / f"plan-{number}-settings"
        if self.arrays and not place.exists():
            save_file({name: tensor.contiguous().clone() for name, tensor in self.arrays.items()}, place)
        return {"plan": number, "spelled": self.text, "file": str(place) if self.arrays else ""}


def _part(name: str, part: Any, arrays: dict[str, Tensor]) -> Any:
    try:
        return spell(part, arrays)
    except SettingError as error:
        raise SettingError(f"The {name} cannot go to a worker process. {error}") from None


@dataclass(eq=False)
class Batch:
    """The tasks of one `submit`: their arrays lie together on one shelf."""

    owner: weakref.ref[ProcessEngine]  # not the engine itself: a piece that is forgotten must not keep it alive
    plan: int
    tasks: Sequence[Task]
    memories: Sequence[Memory]
    shelf: Shelf

    @cached_property
    def written(self) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
        """Every task and memory as JSON values that point into the shelf."""
        crate = Crate()
        sheets = [sheet(task, crate) for task in self.tasks]
        memories = [crate.put(memory) for memory in self.memories]
        self.shelf.write(crate.arrays)
        return sheets, memories

    def message(self, number: int, rows: range) -> dict[str, Any]:
        """Some of them as a worker is asked, by the number of their piece."""
        sheets, memories = (part[rows.start : rows.stop] for part in self.written)
        return {
            "piece": number,
            "plan": self.plan,
            "file": str(self.shelf.file),
            "tasks": sheets,
            "memories": memories,
        }


def cut(count: int, workers: int, most: int) -> list[range]:
    """An equal share for each worker, in pieces of at most ``most``; the first pieces of all shares come first.

    >>> cut(10, 2, 2)
    [range(0, 2), range(5, 7), range(2, 4), range(7, 9), range(4, 5), range(9, 10)]
    """
    shares = [range(i * count // workers, (i + 1) * count // workers) for i in range(workers)]
    pieces = [[share[at : at + most] for at in range(0, len(share), most)] for share in shares]
    return [piece for level in itertools.zip_longest(*pieces) for piece in level if piece]
