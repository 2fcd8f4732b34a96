"""Across the boundary between a round and its parties: arrays, scalars and bytes, nothing else."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

from torch import Tensor

Kind: TypeAlias = Literal["train", "stand_in", "evaluate", "personal", "hello", "keys", "goodbye"]
Status: TypeAlias = Literal["ok", "error", "lost", "refused"]


@dataclass(frozen=True)
class Task:
    """What the round asks of one party."""

    party: str
    round: int
    kind: Kind
    arrays: Mapping[str, Tensor]  # "center" [width], and "own" [width] where the algorithm keeps models of their own
    settings: Mapping[str, Any]  # JSON values: seed, lr, work, way, layout
    deadline: float = 600.0  # seconds


@dataclass(frozen=True)
class Report:
    """What one party answers: a model by the names of its tensors, numbers about it, or why there is none."""

    party: str
    round: int
    kind: Kind
    status: Status = "ok"
    arrays: Mapping[str, Tensor] = field(default_factory=dict)
    metrics: Mapping[str, Any] = field(default_factory=dict)
    sealed: bytes = b""
    reason: str = ""


class Store(Protocol):
    """Tensors by party. What is staged counts only after :meth:`commit`, so a broken round leaves no trace."""

    @property
    def round(self) -> int:
        """The round of the last commit."""

    def get(self, party: str) -> dict[str, Tensor]: ...
    def stage(self, party: str, tensors: Mapping[str, Tensor]) -> None: ...
    def commit(self, round: int, parties: Collection[str]) -> None:
        """What is staged of these parties counts from now on; the rest of it is forgotten."""

    def rollback(self, round: int) -> None:
        """Forget what is staged, and a commit that went beyond this round."""

    def clear(self) -> None: ...
    def names(self) -> list[str]: ...


class Engine(Protocol):
    """How tasks reach parties: it decides where the stack is cut, never what comes out of it."""

    @property
    def memory(self) -> Store:
        """The parties' memories, as far as they live on this side of the boundary."""

    def members(self, begin: bool = False) -> Sequence[str]:
        """Who can be reached now, in a fixed order; where a round is to ``begin``, it may wait for more of them."""

    def submit(self, tasks: Sequence[Task]) -> None:
        """Take these tasks without waiting for their answers. A task that comes again has the same answer."""

    def collect(self, timeout: float) -> list[Report]:
        """What is ready, faults included; empty only when nothing came within ``timeout`` seconds."""
