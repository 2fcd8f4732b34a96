"""The words of the system: what an algorithm answers, what a solver is given, what crosses the boundary.

Rows are parties: K models are a matrix ``[K, width]``, one flat model a row (see `flat`). A round, as `run` walks it:

    tune -> attend -> Task -> start, terms, pull (at the party, by a solver) -> Report -> gate -> aggregate -> keep

What crosses between the round and a party (Task, Report) is in `messages`; solvers, engines and
stores are in `interfaces`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

import numpy as np
from torch import Tensor

from .settings import Schedule, setting

if TYPE_CHECKING:
    from ..models.flat import Unbound
    from ..privacy.gaussian_mechanism import PrivacySettings

NamedTensors: TypeAlias = Mapping[str, Tensor]
"""What a party keeps from round to round beside its model: optimiser moments, private columns. It never travels."""

APPEND_ONLY = "log."
"""What a memory's name begins with where its rows never change once they are there: a store keeps it without a copy."""

CORESET_STATE = "coreset."
SECRET_STATE = "secret."
"""Name prefixes of party state that a solver never sees: deposited coresets, and secrets of the party."""

Metrics: TypeAlias = Mapping[str, float]
Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""(output, target) -> a number, or one number a sample, of which the mean is taken."""


def solver_state(memory: NamedTensors) -> NamedTensors:
    """Return the part of a party's state that its solver sees."""
    return {name: tensor for name, tensor in memory.items() if not name.startswith((CORESET_STATE, SECRET_STATE))}


def hidden_state(memory: NamedTensors) -> NamedTensors:
    """Return the part of a party's state that its solver never sees: deposited coresets and secrets."""
    return {name: tensor for name, tensor in memory.items() if name.startswith((CORESET_STATE, SECRET_STATE))}


@dataclass(frozen=True)
class Hyper:
    """The hyper-parameters of one round that an algorithm may tune."""

    lr: float = setting(0.01, "the learning rate η", above=0)
    work: int = setting(
        20, "how much a party learns in a round, in the solver's unit (steps or epochs)", least=0, whole=True
    )


# ── what an algorithm answers ─────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class LossContext:
    """What a term of the loss may read: one party, one batch. Shapes are those of one party."""

    w: Tensor  # [d] the parameters that are being trained
    received: Tensor  # [d] the parameters that came from the centre, frozen
    private_params: Tensor  # [q] the term's private columns, trained with w and never reported
    x: Tensor
    y: Tensor
    output: Tensor
    features: Mapping[str, Tensor]  # values of the trained model at the term's points
    received_features: Mapping[str, Tensor]  # the same points in the frozen received model
    apply: Callable[[Tensor, Tensor], Tensor]  # (parameters, x) -> output: the module with other numbers in it
    loss: Loss


@dataclass(frozen=True)
class LossTerm:
    """What a party adds to its loss: strength · value(sight)."""

    name: str  # of its private columns in the party's memory: no two terms of an algorithm share it
    value: Callable[[LossContext], Tensor]
    strength: Schedule = setting(1.0, "the factor before the term", least=0, called="symbol")
    feature_names: tuple[str, ...] = ()  # values of both models that the term reads, by their names (see `traced`)
    initial_values: InitialValues | None = None  # (received [d], draws) -> first values [q] of its private columns
    symbol: str = "strength"  # the paper's letter for it


class ProximalStep(Protocol):
    """What draws a party back after each step: w ← θ·w + (1-θ)·z with θ = 1/(1+αη), Fed+ v2 eq. (6)."""

    def anchor(self, personal_models: Tensor, global_model: Tensor, round: int, parties: Sequence[str]) -> Tensor:
        """z_k = R(w̃, w_k), eq. (11) or Proposition 3; ``[K, d]``."""

    def alphas(self, round: int, parties: Sequence[str], like: Tensor) -> Tensor:
        """α of every party in this round, ``[K, 1]``, or ``[K, d]`` where it differs by layer."""


class AggregateResult(Protocol):
    """A centre, and how far it is from the best one."""

    @property
    def point(self) -> Tensor: ...
    @property
    def gap(self) -> float: ...


class FreezeSchedule(Protocol):
    """Which parameters stand still while others learn."""

    def trainable_mask(self, step: int, steps: Sequence[int], d: int) -> Tensor:
        """True ``[K, d]`` where a party's parameters move in this step, of as many as each party takes."""


@dataclass(frozen=True)
class TuneContext:
    """What a tuner knows before a round."""

    round: int
    hyper: Hyper  # the solver's own
    tuner_state: NamedTensors  # what the tuner said to remember
    feedback: Metrics  # the metrics of the last round; before the first, "validation" alone, where there is such a set
    global_model: Tensor  # [width] the centre that the round would begin with
    rng: np.random.Generator


@dataclass(frozen=True)
class TuneResult:
    """What a tuner says: the round's hyper-parameters, and what it remembers."""

    hyper: Hyper
    tuner_state: NamedTensors
    global_model: Tensor | None = None  # [width] another centre to go on from, for parties, too: it went back
    note: str = ""  # a sentence on what it did beyond tuning, for whoever looks after the run
    metrics: Metrics = field(default_factory=dict)  # recorded with the round


@dataclass(frozen=True)
class ParticipationContext:
    """What is known when it is settled who takes part in a round."""

    round: int
    available_parties: Sequence[str]  # who can be reached and has no work yet, in the parties' order
    hyper: Hyper  # the round's
    rng: np.random.Generator  # for draws that concern everybody
    seed: int = 0  # the run's, for streams of a party's own
    all_parties: Collection[str] = ()  # all parties of the federation


@dataclass(frozen=True)
class ProxySettings:
    """Who answers for the absent: a coreset that the party left, trained on from where the party would begin."""

    selection: Any = setting(help="how a party chooses the rows that it leaves", apart=True)  # parties.Selection
    work: int | None = setting(None, "τ′: how much a stand-in learns; None: as a party does", least=0, whole=True)


@dataclass(frozen=True)
class SecureSettings:
    """Work that is added up without anybody seeing a part of the sum (see `masks`)."""

    min_parties: int = setting(3, "parties that a sum has at least; not from the paper", least=2, whole=True)


LocalStart: TypeAlias = Callable[[Tensor, Tensor], Tensor]
Aggregate: TypeAlias = Callable[[Tensor, Tensor | None], AggregateResult]
ComputeWeights: TypeAlias = Callable[[Sequence[Metrics]], Tensor]
Personalize: TypeAlias = Callable[[Tensor, Tensor, Hyper], Tensor]
InitialValues: TypeAlias = Callable[[Tensor, np.random.Generator], Tensor]
ServerUpdate: TypeAlias = Callable[[Tensor, Tensor, NamedTensors, float], tuple[Tensor, NamedTensors]]
Tune: TypeAlias = Callable[[TuneContext], TuneResult]
Participation: TypeAlias = Callable[[ParticipationContext], dict[str, Hyper]]
StalenessDiscount: TypeAlias = Callable[[int], float]
PersonalModel: TypeAlias = Callable[[Tensor, Mapping[str, Tensor]], Tensor]


@dataclass(frozen=True)
class Algorithm:
    """A federated method: its answers to the questions of a round. FedAvg is the base; a method is what it changes."""

    name: str
    local_start: LocalStart  # (own [K, width], centre [K, width]) -> where each party begins its local work
    terms: tuple[LossTerm | Unbound, ...]  # what it adds to its loss
    proximal_step: ProximalStep | None  # what draws it back after each step
    aggregate: Aggregate  # (models [K, d], weights [K]) -> what the reports add up to
    compute_weights: ComputeWeights  # metrics of the reports -> their weights [K]
    aggregate_statistics: Aggregate  # (statistics [K, s], weights [K]) -> what running means and variances add up to
    server_update: (
        ServerUpdate  # (centre [d], aggregate [d], memory, share) -> the new centre, and what the server remembers
    )
    personalize: (
        Personalize | None
    )  # (models [K, width], centre [width]) -> what each party keeps; None: only the centre
    tune: Tune  # which hyper-parameters move, and how
    participation: Participation = setting(help="who takes part, and with how much work", apart=True)
    aggregate_over: Literal["active", "all"] = setting(
        "active", "whose models are aggregated (ERRATA 14)", one_of=("active", "all")
    )
    newcomer_model: Literal["initial", "global"] = setting(
        "initial", "the own model of a party that never trained", one_of=("initial", "global")
    )
    reply_content: Literal["model", "update"] = setting(
        "model", "what a report carries (v1 §3)", one_of=("model", "update")
    )
    private_layers: tuple[str, ...] | Unbound = ()  # name patterns of tensors that never leave their party
    personal_model: PersonalModel | None = None  # (model [width], memory) -> the party's own model, where terms hold it
    freeze: FreezeSchedule | Unbound | None = None  # which parameters stand still in a local step
    coreset_proxy: ProxySettings | None = setting(None, "who answers for the absent; None: nobody", apart=True)
    quorum: int | None = setting(None, "how many reports end a round; None: all that are owed", least=1, whole=True)
    max_staleness: int = setting(0, "how many rounds old a report may be", least=0, whole=True)
    staleness_discount: StalenessDiscount | None = (
        None  # rounds -> how much of the way from the centre a report so late counts; None: all
    )
    loss_samples: int = setting(
        0, "samples of its own on which a party reports the loss of the centre that it received", least=0, whole=True
    )
    privacy: PrivacySettings | None = setting(None, "what is hidden of what parties share; None: nothing", apart=True)
    secure_aggregation: SecureSettings | None = setting(
        None, "how single reports are hidden in their sum; None: not at all", apart=True
    )
