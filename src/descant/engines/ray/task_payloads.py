"""The tasks of a round, for workers that share no memory with this process: JSON values, and arrays beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from ...core.algorithm import Memory
from ...core.messages import Task
from ...serialization.wire import Crate, sheet
from .remote_state import Far


@dataclass(eq=False)
class Load:
    """The tasks of one `submit`: the arrays that many of them speak of are told apart, to be carried once.

    A memory that is far is not looked into: a worker gets its place.
    """

    tasks: Sequence[Task]
    memories: Sequence[Memory]

    @cached_property
    def _written(self) -> tuple[list[dict[str, Any]], list[dict[str, str] | None], Crate]:
        crate = Crate()
        near = [None if isinstance(memory, Far) else crate.put(memory) for memory in self.memories]
        return [sheet(task, crate) for task in self.tasks], near, crate

    def _used(self, rows: range) -> list[str]:
        sheets, memories, _ = self._written
        return [key for k in rows for key in (*sheets[k]["arrays"].values(), *(memories[k] or {}).values())]

    @cached_property
    def common(self) -> set[str]:
        """What more than one task speaks of."""
        seen, twice = set[str](), set[str]()
        for key in self._used(range(len(self.tasks))):
            (twice if key in seen else seen).add(key)
        return twice

    @property
    def shared(self) -> dict[str, Tensor]:
        """What is common."""
        return {key: self._written[2].arrays[key] for key in sorted(self.common)}

    def own(self, rows: range) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Some of the tasks as JSON values, a far memory as None, and the arrays that only they speak of."""
        sheets, memories, crate = self._written
        keys = sorted(set(self._used(rows)) - self.common)
        fields = {"tasks": [sheets[k] for k in rows], "memories": [memories[k] for k in rows]}
        return fields, {key: crate.arrays[key] for key in keys}

    def far(self, rows: range) -> list[Any]:
        """The places of the far memories among them, in their order."""
        return [memory.place for memory in self.memories[rows.start : rows.stop] if isinstance(memory, Far)]
