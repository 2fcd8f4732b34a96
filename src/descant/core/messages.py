"""Across the boundary between a round and its parties: arrays, scalars and bytes, nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from torch import Tensor

TaskKind: TypeAlias = Literal["train", "proxy", "evaluate", "personal", "handshake", "keys", "goodbye"]
Status: TypeAlias = Literal["ok", "error", "lost", "declined"]


CORESET_KEY = "coreset"
"""The setting of a task that asks for a coreset, and the metric that says how many rows it has."""

REAL_ONLY = "real_only"
"""The metric of a desk that could not make up prices: the code of the reason."""


@dataclass(frozen=True)
class Task:
    """What the round asks of one party."""

    party: str
    round: int
    kind: TaskKind
    arrays: Mapping[str, Tensor]  # "center" [width], and "own" [width] where the algorithm keeps models of their own
    settings: Mapping[str, Any]  # JSON values: seed, lr, work, way, layout
    deadline: float = 600.0  # seconds


@dataclass(frozen=True)
class Reply:
    """What one party answers: a model by the names of its tensors, numbers about it, or why there is none."""

    party: str
    round: int
    kind: TaskKind
    status: Status = "ok"
    arrays: Mapping[str, Tensor] = field(default_factory=dict)
    metrics: Mapping[str, Any] = field(default_factory=dict)
    encrypted_coreset: bytes = b""
    reason: str = ""
