"""The tasks of a round as JSON values and arrays, for workers that share no memory with this process."""

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
    """The tasks of one `submit`; arrays shared by several tasks are separate, to be sent once.

    A remote party state is not fetched: the worker gets its reference.
    """

    tasks: Sequence[Task]
    party_states: Sequence[NamedTensors]

    @cached_property
    def _encoded(self) -> tuple[list[dict[str, Any]], list[dict[str, str] | None], TensorPool]:
        pool = TensorPool()
        state_keys = [None if isinstance(state, RemoteState) else pool.add(state) for state in self.party_states]
        return [to_fields(task, pool) for task in self.tasks], state_keys, pool

    def _used_keys(self, rows: range) -> list[str]:
        task_fields, state_keys, _ = self._encoded
        return [key for k in rows for key in (*task_fields[k]["arrays"].values(), *(state_keys[k] or {}).values())]

    @cached_property
    def shared_keys(self) -> set[str]:
        """The keys of arrays that more than one task uses."""
        seen = set[str]()
        twice = set[str]()
        for key in self._used_keys(range(len(self.tasks))):
            (twice if key in seen else seen).add(key)
        return twice

    @property
    def shared_arrays(self) -> dict[str, Tensor]:
        return {key: self._encoded[2].arrays[key] for key in sorted(self.shared_keys)}

    def piece_payload(self, rows: range) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the tasks in these rows as JSON values, with None for a remote state, and their unshared arrays."""
        task_fields, state_keys, pool = self._encoded
        keys = sorted(set(self._used_keys(rows)) - self.shared_keys)
        fields = {"tasks": [task_fields[k] for k in rows], "party_states": [state_keys[k] for k in rows]}
        return fields, {key: pool.arrays[key] for key in keys}

    def remote_refs(self, rows: range) -> list[Any]:
        """Return the references to the remote party states in these rows, in order."""
        states = self.party_states[rows.start : rows.stop]
        return [state.object_ref for state in states if isinstance(state, RemoteState)]
