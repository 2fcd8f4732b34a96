"""Messages between a round and its parties: arrays, scalars and bytes, nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from torch import Tensor

TaskKind: TypeAlias = Literal["train", "proxy", "evaluate", "personal", "handshake", "keys", "goodbye"]
Status: TypeAlias = Literal["ok", "error", "lost", "declined"]


CORESET_KEY = "coreset"
"""The setting of a task that requests a coreset, and the metric with its number of rows."""

REAL_ONLY = "real_only"
"""The metric of a desk without synthetic prices: a code of the reason."""


@dataclass(frozen=True)
class Task:
    """A task for one party."""

    party: str
    round: int
    kind: TaskKind
    arrays: Mapping[str, Tensor]  # "global_model" [width], and "personal" [width] if the algorithm has personal models
    settings: Mapping[str, Any]  # JSON values: seed, lr, work, execution_mode, layout
    deadline: float = 600.0  # seconds


@dataclass(frozen=True)
class Reply:
    """The reply of one party: its tensors by name and its metrics, or the reason of an error."""

    party: str
    round: int
    kind: TaskKind
    status: Status = "ok"
    arrays: Mapping[str, Tensor] = field(default_factory=dict)
    metrics: Mapping[str, Any] = field(default_factory=dict)
    encrypted_coreset: bytes = b""
    reason: str = ""
