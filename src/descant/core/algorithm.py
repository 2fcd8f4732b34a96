"""The record `Algorithm`, and the types of its fields.

Rows are parties: K models are a matrix ``[K, width]``, one flat model a row (see `models.flat`). The order of a round:

    tune -> participation -> Task -> local start, terms, proximal step (at the party, by a solver) -> Reply
         -> validation -> aggregate -> server update -> personalize

Messages between the round and a party (Task, Reply) are in `messages`; solvers, engines and stores in `interfaces`.
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
"""Tensors by name: a party's state beside its model (optimizer moments, private columns), or server state."""

APPEND_ONLY = "log."
"""Prefix of state whose rows never change once written: a store keeps it without a copy."""

CORESET_STATE = "coreset."
SECRET_STATE = "secret."
"""Name prefixes of party state that a solver never sees: deposited coresets, and secrets of the party."""

Metrics: TypeAlias = Mapping[str, float]
Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""(output, target) -> a number, or one number a sample, which is averaged."""


def solver_state(party_state: NamedTensors) -> NamedTensors:
    """Return the part of a party's state that its solver sees."""
    return {name: tensor for name, tensor in party_state.items() if not name.startswith((CORESET_STATE, SECRET_STATE))}


def hidden_state(party_state: NamedTensors) -> NamedTensors:
    """Return the part of a party's state that its solver never sees: deposited coresets and secrets."""
    return {name: tensor for name, tensor in party_state.items() if name.startswith((CORESET_STATE, SECRET_STATE))}


@dataclass(frozen=True)
class Hyper:
    """The hyper-parameters of one round that an algorithm may tune."""

    lr: float = setting(0.01, "the learning rate η", above=0)
    work: int = setting(
        20, "the local training of a round, in the solver's unit (steps or epochs)", least=0, whole=True
    )


@dataclass(frozen=True)
class LossContext:
    """The inputs of a loss term: one party and one batch. Shapes are those of one party."""

    w: Tensor  # [d] the parameters that are being trained
    received: Tensor  # [d] the parameters received from the server, frozen
    private_params: Tensor  # [q] the term's private columns, trained with w and never sent
    x: Tensor
    y: Tensor
    output: Tensor
    features: Mapping[str, Tensor]  # values of the trained model at the term's points
    received_features: Mapping[str, Tensor]  # values of the frozen received model at the same points
    apply: Callable[[Tensor, Tensor], Tensor]  # (parameters, x) -> output: the module with other parameters
    loss: Loss


@dataclass(frozen=True)
class LossTerm:
    """A term of a party's loss: strength · value(context)."""

    name: str  # of its private columns in the party state: unique within an algorithm
    value: Callable[[LossContext], Tensor]
    strength: Schedule = setting(1.0, "the factor of the term", least=0, name_field="symbol")
    feature_names: tuple[str, ...] = ()  # values of both models that the term reads (see `models.tracing`)
    initial_values: InitialValues | None = None  # (received [d], rng) -> initial values [q] of its private columns
    symbol: str = "strength"  # the paper's symbol


class ProximalStep(Protocol):
    """The proximal step after each local step: w ← θ·w + (1-θ)·z with θ = 1/(1+αη), Fed+ v2 eq. (6)."""

    def anchor(self, personal_models: Tensor, global_model: Tensor, round: int, parties: Sequence[str]) -> Tensor:
        """Return z_k = R(w̃, w_k), eq. (11) or Proposition 3; ``[K, d]``."""

    def alphas(self, round: int, parties: Sequence[str], like: Tensor) -> Tensor:
        """Return α of every party in this round, ``[K, 1]``, or ``[K, d]`` where it differs by layer."""


class AggregateResult(Protocol):
    """An aggregate, and its distance from optimality."""

    @property
    def point(self) -> Tensor: ...
    @property
    def gap(self) -> float: ...


class FreezeSchedule(Protocol):
    """A schedule of frozen parameters."""

    def trainable_mask(self, step: int, steps: Sequence[int], d: int) -> Tensor:
        """Return a mask ``[K, d]``, True where a party's parameters are trained in this step of its ``steps``."""


@dataclass(frozen=True)
class TuneContext:
    """The inputs of a tuner before a round."""

    round: int
    hyper: Hyper  # the solver's own
    tuner_state: NamedTensors  # the tuner's state after the last round
    feedback: Metrics  # the metrics of the last round; before the first only "validation", if there is such a set
    global_model: Tensor  # [width] the global model before the round
    rng: np.random.Generator


@dataclass(frozen=True)
class TuneResult:
    """The result of a tuner: the round's hyper-parameters and the tuner's new state."""

    hyper: Hyper
    tuner_state: NamedTensors
    global_model: Tensor | None = None  # [width] an earlier global model to continue from: a rollback
    note: str = ""  # a sentence on a rollback, for the log
    metrics: Metrics = field(default_factory=dict)  # recorded with the round


@dataclass(frozen=True)
class ParticipationContext:
    """The inputs of a participation function."""

    round: int
    available_parties: Sequence[str]  # parties that can be reached and are idle, in the population's order
    hyper: Hyper  # the round's
    rng: np.random.Generator  # for draws that concern all parties
    seed: int = 0  # the run's, for streams of single parties
    all_parties: Collection[str] = ()  # all parties of the federation


@dataclass(frozen=True)
class ProxySettings:
    """Coreset proxies: the deposited coreset of an absent party is trained from where the party would begin."""

    selection: Any = setting(help="the selection of a coreset's rows", own_message=True)  # parties.Selection
    work: int | None = setting(None, "τ′: the local training of a proxy; None: that of a party", least=0, whole=True)


@dataclass(frozen=True)
class SecureSettings:
    """Secure aggregation: the server sees the sum of masked updates only."""

    min_parties: int = setting(3, "the smallest number of parties in a sum; not from the paper", least=2, whole=True)


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
    """A federated method: one field for each stage of a round. FedAvg is the base; a method is what it changes."""

    name: str
    local_start: LocalStart  # (personal [K, width], global [K, width]) -> initial models of local training
    terms: tuple[LossTerm | Unbound, ...]  # terms added to the loss
    proximal_step: ProximalStep | None  # proximal step after each local step
    aggregate: Aggregate  # (models [K, d], weights [K]) -> the aggregate
    compute_weights: ComputeWeights  # metrics of the replies -> their weights [K]
    aggregate_statistics: Aggregate  # (statistics [K, s], weights [K]) -> running means and variances
    # (global model [d], aggregate [d], server state, share of samples) -> the new global model and server state
    server_update: ServerUpdate
    # (models [K, width], global model [width], hyper) -> personal models; None: parties keep the global model
    personalize: Personalize | None
    tune: Tune  # tunes hyper-parameters before a round
    participation: Participation = setting(help="the participants of a round and their work", own_message=True)
    aggregate_over: Literal["active", "all"] = setting(
        "active", "aggregate participants or all parties (ERRATA 14)", one_of=("active", "all")
    )
    newcomer_model: Literal["initial", "global"] = setting(
        "initial", "the personal model of a party that never trained", one_of=("initial", "global")
    )
    reply_content: Literal["model", "update"] = setting(
        "model", "the content of a reply (v1 §3)", one_of=("model", "update")
    )
    private_layers: tuple[str, ...] | Unbound = ()  # name patterns of tensors that never leave their party
    personal_model: PersonalModel | None = (
        None  # (model [width], party state) -> the personal model, if a term holds it
    )
    freeze: FreezeSchedule | Unbound | None = None  # parameters frozen in a local step
    coreset_proxy: ProxySettings | None = setting(
        None, "coreset proxies of absent parties; None: none", own_message=True
    )
    quorum: int | None = setting(None, "the number of replies that end a round; None: all", least=1, whole=True)
    max_staleness: int = setting(0, "the largest age of a reply in rounds", least=0, whole=True)
    staleness_discount: StalenessDiscount | None = None  # age in rounds -> factor of a late update; None: 1
    loss_samples: int = setting(
        0, "own samples on which a party measures the loss of the received model", least=0, whole=True
    )
    privacy: PrivacySettings | None = setting(None, "differential privacy of updates; None: none", own_message=True)
    secure_aggregation: SecureSettings | None = setting(None, "secure aggregation; None: none", own_message=True)
