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
    """The part of a party that the round uses; its data is used by the solver alone."""

    @property
    def name(self) -> str: ...
    @property
    def samples(self) -> int: ...


@dataclass(frozen=True)
class TrainJob:
    """Local training of a stack of parties: rows are parties in every tensor and sequence."""

    net: Net
    loss: Loss
    parties: Sequence[Any]
    hyperparameters: Sequence[Hyper]
    party_states: Sequence[NamedTensors]
    seed: int
    round: int
    execution_mode: str  # chosen once per run
    start: Tensor  # [K, width]
    received: Tensor  # [K, width]
    anchor: Tensor | None  # [K, d] z_k
    alphas: Tensor | None  # [K, 1] or [K, d]
    terms: tuple[LossTerm, ...]
    freeze: FreezeSchedule | None


@dataclass(frozen=True)
class TrainResult:
    """The result of a `TrainJob`."""

    models: Tensor  # [K, width]
    party_states: Sequence[NamedTensors]
    metrics: Sequence[Metrics]


@dataclass(frozen=True)
class EvaluationJob:
    """Models of some parties to evaluate on each party's own test data."""

    net: Net
    metric: Metric
    parties: Sequence[Any]
    models: Sequence[Sequence[Tensor]]  # the models of each party, [width] each
    trivial: bool  # also evaluate the trivial baseline


@dataclass(frozen=True)
class EvaluationResult:
    """The result of an `EvaluationJob` for one party."""

    samples: int  # test samples; 0: no test data and no scores
    scores: Sequence[float]  # one a model
    trivial: float | None = None  # score of the trivial baseline, such as the majority class


class Solver(Protocol):
    """Local training; of the federation it sees only the loss terms and the proximal step in its job."""

    @property
    def hyper(self) -> Hyper: ...
    @property
    def metric(self) -> Metric | None:
        """The default metric of its models; None: the metric follows from the loss."""

    def execution_modes(
        self, net: Net, loss: Loss, terms: tuple[LossTerm, ...], party: Any, count: int
    ) -> dict[str, str]:
        """Return the execution modes for stacks of ``count`` such parties, best first, each with a reason against it.

        The first mode whose reason is "" is used; a bad model, loss or term raises here.
        """

    def train(self, job: TrainJob) -> TrainResult: ...

    def evaluate(self, job: EvaluationJob) -> Sequence[EvaluationResult]:
        """Evaluate models, party by party."""


class Store(Protocol):
    """Tensors by party. Staged tensors count only after :meth:`commit`, so an interrupted round leaves no trace."""

    @property
    def round(self) -> int:
        """Return the round of the last commit."""

    def get(self, party: str) -> dict[str, Tensor]: ...
    def stage(self, party: str, tensors: Mapping[str, Tensor]) -> None: ...
    def commit(self, round: int, parties: Collection[str]) -> None:
        """Commit what is staged of these parties and discard the rest."""

    def rollback(self, round: int) -> None:
        """Discard what is staged, and undo a commit of a later round."""

    def clear(self) -> None: ...
    def names(self) -> list[str]: ...


class Engine(Protocol):
    """Transport of tasks to parties: an engine decides where tasks run, never their results."""

    @property
    def party_states(self) -> Store:
        """Return the store of party states on this side of the transport."""

    def available_parties(self, starting_round: bool = False) -> Sequence[str]:
        """Return the reachable parties in a fixed order; before a round it may wait for more."""

    def submit(self, tasks: Sequence[Task]) -> None:
        """Submit tasks without waiting for replies. A task that is sent again has the same reply."""

    def collect(self, timeout: float) -> list[Reply]:
        """Return the replies that are ready, errors included; empty only if none came within ``timeout`` seconds."""
