"""The tasks of a round, for workers that share no memory with this process: JSON values, and arrays beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from ...core.algorithm import NamedTensors
from ...core.messages import Task
from ...serialization.wire import TensorPool, to_fields
from .remote_state import RemoteState


@dataclass(eq=False)
class RayTaskBatch:
    """The tasks of one `submit`: the arrays that many of them speak of are told apart, to be carried once.

    A memory that is far is not looked into: a worker gets its place.
    """

    tasks: Sequence[Task]
    party_states: Sequence[NamedTensors]

    @cached_property
    def _encoded(self) -> tuple[list[dict[str, Any]], list[dict[str, str] | None], TensorPool]:
        crate = TensorPool()
        near = [None if isinstance(memory, RemoteState) else crate.add(memory) for memory in self.party_states]
        return [to_fields(task, crate) for task in self.tasks], near, crate

    def _used_keys(self, rows: range) -> list[str]:
        sheets, memories, _ = self._encoded
        return [key for k in rows for key in (*sheets[k]["arrays"].values(), *(memories[k] or {}).values())]

    @cached_property
    def shared_keys(self) -> set[str]:
        """What more than one task speaks of."""
        seen = set[str]()
        twice = set[str]()
        for key in self._used_keys(range(len(self.tasks))):
            (twice if key in seen else seen).add(key)
        return twice

    @property
    def shared_arrays(self) -> dict[str, Tensor]:
        """What is common."""
        return {key: self._encoded[2].arrays[key] for key in sorted(self.shared_keys)}

    def piece_payload(self, rows: range) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Some of the tasks as JSON values, a far memory as None, and the arrays that only they speak of."""
        sheets, memories, crate = self._encoded
        keys = sorted(set(self._used_keys(rows)) - self.shared_keys)
        fields = {"tasks": [sheets[k] for k in rows], "party_states": [memories[k] for k in rows]}
        return fields, {key: crate.arrays[key] for key in keys}

    def remote_refs(self, rows: range) -> list[Any]:
        """The places of the far memories among them, in their order."""
        return [
            memory.object_ref for memory in self.party_states[rows.start : rows.stop] if isinstance(memory, RemoteState)
        ]
