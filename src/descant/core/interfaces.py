"""Interfaces between the parts of a round: parties, solvers, engines and stores."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from .algorithm import FreezeSchedule, Hyper, Loss, LossTerm, Metrics, NamedTensors
from .messages import Reply, Task

if TYPE_CHECKING:
    from ..models.flat import Net
    from .metrics import Metric


class PartyInfo(Protocol):
    """One party, as far as the round needs to know it; its data is between it and the solver."""

    @property
    def name(self) -> str: ...
    @property
    def samples(self) -> int: ...


@dataclass(frozen=True)
class TrainJob:
    """The local work of a stack of parties: rows are parties in every tensor and every sequence."""

    net: Net
    loss: Loss
    parties: Sequence[Any]
    hyperparameters: Sequence[Hyper]
    party_states: Sequence[NamedTensors]
    seed: int
    round: int
    execution_mode: str  # how the stack is computed; chosen once a run
    start: Tensor  # [K, width]
    received: Tensor  # [K, width]
    anchor: Tensor | None  # [K, d] z_k
    alphas: Tensor | None  # [K, 1] or [K, d]
    terms: tuple[LossTerm, ...]
    freeze: FreezeSchedule | None


@dataclass(frozen=True)
class TrainResult:
    """What came of a job."""

    models: Tensor  # [K, width]
    party_states: Sequence[NamedTensors]
    metrics: Sequence[Metrics]


@dataclass(frozen=True)
class EvaluationJob:
    """Models of some parties, to be judged on what each party keeps for it."""

    net: Net
    metric: Metric
    parties: Sequence[Any]
    models: Sequence[Sequence[Tensor]]  # the models of each party, [width] each
    trivial: bool  # whether to say, too, what is reached without learning


@dataclass(frozen=True)
class EvaluationResult:
    """What came of an exam for one party."""

    samples: int  # how much it was judged on; 0: it keeps nothing for that, and has no scores
    scores: Sequence[float]  # one a model
    trivial: float | None = None  # what is reached without learning: by its majority class, or by acting at random


class Solver(Protocol):
    """How parties learn alone; it knows nothing of the federation but the terms and the pull in its job."""

    @property
    def hyper(self) -> Hyper: ...
    @property
    def metric(self) -> Metric | None:
        """What its models are judged by, unless the user says otherwise; None: what their loss tells."""

    def execution_modes(
        self, net: Net, loss: Loss, terms: tuple[LossTerm, ...], party: Any, count: int
    ) -> dict[str, str]:
        """The ways to compute stacks of ``count`` parties like this one, the best first, and why each is not taken.

        The first whose reason is "" is taken; a bad model, loss or term is an error here.
        """

    def train(self, job: TrainJob) -> TrainResult: ...

    def evaluate(self, job: EvaluationJob) -> Sequence[EvaluationResult]:
        """How good models are, party by party."""


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
    def party_states(self) -> Store:
        """The parties' memories, as far as they live on this side of the boundary."""

    def available_parties(self, starting_round: bool = False) -> Sequence[str]:
        """Who can be reached now, in a fixed order; where a round is to ``begin``, it may wait for more of them."""

    def submit(self, tasks: Sequence[Task]) -> None:
        """Take these tasks without waiting for their answers. A task that comes again has the same answer."""

    def collect(self, timeout: float) -> list[Reply]:
        """What is ready, faults included; empty only when nothing came within ``timeout`` seconds."""
