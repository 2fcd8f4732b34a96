"""The words of the system: what an algorithm answers, what a solver is given, what crosses the boundary.

Rows are parties: K models are a matrix ``[K, width]``, one flat model a row (see `flat`). A round, as `run` walks it:

    tune -> attend -> Task -> start, terms, pull (at the party, by a solver) -> Report -> gate -> aggregate -> keep
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

import numpy as np
from torch import Tensor

from .flat import Net, Unbound
from .settings import Schedule, setting

if TYPE_CHECKING:
    from .metrics import Metric

Memory: TypeAlias = Mapping[str, Tensor]
"""What a party keeps from round to round beside its model: optimiser moments, private columns. It never travels."""

LOG = "log."
"""What a memory's name begins with where its rows never change once they are there: a store keeps it without a copy."""

Metrics: TypeAlias = Mapping[str, float]
Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""(output, target) -> a number, or one number a sample, of which the mean is taken."""


@dataclass(frozen=True)
class Hyper:
    """The hyper-parameters of one round that an algorithm may tune."""

    lr: float = setting(0.01, "the learning rate η", above=0)
    work: int = setting(
        20, "how much a party learns in a round, in the solver's unit (steps or epochs)", least=0, whole=True
    )


# ── across the boundary: arrays, scalars and bytes, nothing else ──────────────────────────────────────────────────────

Kind: TypeAlias = Literal["train", "evaluate", "personal"]
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

    def members(self) -> Sequence[str]:
        """Who can be reached now, in a fixed order."""

    def submit(self, tasks: Sequence[Task]) -> None:
        """Take these tasks without waiting for their answers. A task that comes again has the same answer."""

    def collect(self, timeout: float) -> list[Report]:
        """What is ready, faults included; empty only when nothing came within ``timeout`` seconds."""


# ── what an algorithm answers ─────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Sight:
    """What a term of the loss may read: one party, one batch. Shapes are those of one party."""

    w: Tensor  # [d] the parameters that are being trained
    received: Tensor  # [d] the parameters that came from the centre, frozen
    own: Tensor  # [q] the term's private columns, trained with w and never reported
    x: Tensor
    y: Tensor
    output: Tensor
    seen: Mapping[str, Tensor]  # activations of the trained model at the term's points
    seen_received: Mapping[str, Tensor]  # the same points in the frozen received model
    apply: Callable[[Tensor, Tensor], Tensor]  # (parameters, x) -> output: the module with other numbers in it
    loss: Loss


@dataclass(frozen=True)
class Term:
    """What a party adds to its loss: strength · value(sight)."""

    name: str  # of its private columns in the party's memory: no two terms of an algorithm share it
    value: Callable[[Sight], Tensor]
    strength: Schedule = setting(1.0, "the factor before the term", least=0, called="symbol")
    points: tuple[str, ...] = ()  # submodules whose outputs the term reads, of both models
    begin: Begin | None = None  # (received [d], draws) -> first values [q] of its private columns
    symbol: str = "strength"  # the paper's letter for it


class Pull(Protocol):
    """What draws a party back after each step: w ← θ·w + (1-θ)·z with θ = 1/(1+αη), Fed+ v2 eq. (6)."""

    def anchor(self, own: Tensor, center: Tensor, round: int, parties: Sequence[str]) -> Tensor:
        """z_k = R(w̃, w_k), eq. (11) or Proposition 3; ``[K, d]``."""

    def alphas(self, round: int, parties: Sequence[str], like: Tensor) -> Tensor:
        """α of every party in this round, ``[K, 1]``, or ``[K, d]`` where it differs by layer."""


class Aggregated(Protocol):
    """A centre, and how far it is from the best one."""

    @property
    def point(self) -> Tensor: ...
    @property
    def gap(self) -> float: ...


class Hold(Protocol):
    """Which parameters stand still while others learn."""

    def moving(self, step: int, steps: Sequence[int], d: int) -> Tensor:
        """True ``[K, d]`` where a party's parameters move in this step, of as many as each party takes."""


Start: TypeAlias = Callable[[Tensor, Tensor], Tensor]
Aggregate: TypeAlias = Callable[[Tensor, Tensor | None], Aggregated]
Weigh: TypeAlias = Callable[[Sequence[Metrics]], Tensor]
Keep: TypeAlias = Callable[[Tensor, Tensor, Hyper], Tensor]
Begin: TypeAlias = Callable[[Tensor, np.random.Generator], Tensor]
Advance: TypeAlias = Callable[[Tensor, Tensor, Memory], tuple[Tensor, Memory]]
Tune: TypeAlias = Callable[[int, Hyper, Memory, Metrics, np.random.Generator], tuple[Hyper, Memory]]
Attend: TypeAlias = Callable[[Sequence[str], Hyper, np.random.Generator], dict[str, Hyper]]
Personal: TypeAlias = Callable[[Tensor, Mapping[str, Tensor]], Tensor]


@dataclass(frozen=True)
class Algorithm:
    """A federated method: its answers to the questions of a round. FedAvg is the base; a method is what it changes."""

    name: str
    start: Start  # (own [K, width], centre [K, width]) -> where each party begins its local work
    terms: tuple[Term, ...]  # what it adds to its loss
    pull: Pull | None  # what draws it back after each step
    aggregate: Aggregate  # (models [K, d], weights [K]) -> what the reports add up to
    weigh: Weigh  # metrics of the reports -> their weights [K]
    statistics: Aggregate  # (statistics [K, s], weights [K]) -> what running means and variances add up to
    advance: Advance  # (centre [d], aggregate [d], memory) -> the new centre, and what the server remembers
    keep: Keep | None  # (models [K, width], centre [width]) -> what each party keeps; None: only the centre
    tune: Tune  # (round, hyper, memory, last round's metrics, draws) -> which hyper-parameters move, and how
    attend: Attend = setting(help="who takes part, and with how much work", apart=True)
    over: Literal["active", "all"] = setting(
        "active", "whose models are aggregated (ERRATA 14)", one_of=("active", "all")
    )
    newcomer: Literal["initial", "center"] = setting(
        "initial", "the own model of a party that never trained", one_of=("initial", "center")
    )
    report: Literal["model", "change"] = setting("model", "what a report carries (v1 §3)", one_of=("model", "change"))
    private: tuple[str, ...] | Unbound = ()  # name patterns of tensors that never leave their party
    personal: Personal | None = None  # (model [width], memory) -> the party's own model, where terms hold it
    hold: Hold | Unbound | None = None  # which parameters stand still in a local step
    max_staleness: int = setting(0, "how many rounds old a report may be", least=0, whole=True)


# ── what a solver is given ────────────────────────────────────────────────────────────────────────────────────────────


class Party(Protocol):
    """One party, as far as the round needs to know it; its data is between it and the solver."""

    @property
    def name(self) -> str: ...
    @property
    def samples(self) -> int: ...


@dataclass(frozen=True)
class Job:
    """The local work of a stack of parties: rows are parties in every tensor and every sequence."""

    net: Net
    loss: Loss
    parties: Sequence[Any]
    hypers: Sequence[Hyper]
    memories: Sequence[Memory]
    seed: int
    round: int
    way: str  # how the stack is computed; chosen once a run
    start: Tensor  # [K, width]
    received: Tensor  # [K, width]
    anchor: Tensor | None  # [K, d] z_k
    alphas: Tensor | None  # [K, 1] or [K, d]
    terms: tuple[Term, ...]
    hold: Hold | None


@dataclass(frozen=True)
class Trained:
    """What came of a job."""

    rows: Tensor  # [K, width]
    memories: Sequence[Memory]
    metrics: Sequence[Metrics]


@dataclass(frozen=True)
class Exam:
    """Models of some parties, to be judged on what each party keeps for it."""

    net: Net
    metric: Metric
    parties: Sequence[Any]
    rows: Sequence[Sequence[Tensor]]  # the models of each party, [width] each
    trivial: bool  # whether to say, too, what is reached without learning


@dataclass(frozen=True)
class Judgement:
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

    def ways(self, net: Net, loss: Loss, terms: tuple[Term, ...], party: Any, count: int) -> dict[str, str]:
        """The ways to compute stacks of ``count`` parties like this one, the best first, and why each is not taken.

        The first whose reason is "" is taken; a bad model, loss or term is an error here.
        """

    def train(self, job: Job) -> Trained: ...

    def examine(self, exam: Exam) -> Sequence[Judgement]:
        """How good models are, party by party."""
