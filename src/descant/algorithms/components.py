"""Parts from which methods are composed: each fills one field of `core.algorithm.Algorithm`.

The rules of participation are in `participation`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from ..aggregation.penalties import Penalty, proximal_anchor
from ..core.algorithm import (
    ComputeWeights,
    Hyper,
    LossContext,
    Metrics,
    NamedTensors,
    ServerUpdate,
    TuneContext,
    TuneResult,
)
from ..core.settings import Schedule, check_settings, setting, value_at
from ..models.flat import Net, Unbound

Normalize: TypeAlias = Literal["selected", "total"]
WeightsName: TypeAlias = Literal["samples", "uniform"]


@dataclass(frozen=True)
class MixedStart:
    """The start (1-λ)·w_k + λ·w̃ of local training: Algorithm 1 of Fed+ v2, line 10.

    λ=1 starts from the global model, λ=0 from the party's personal model.

    >>> MixedStart(0.25)(torch.tensor([4.0]), torch.tensor([8.0]))
    tensor([5.])
    """

    init_mix: float = setting(
        1.0,
        "λ of line 10: the share of the global model in the start (ERRATA 13: not the prox factor)",
        least=0,
        most=1,
    )

    def __call__(self, personal_models: Tensor, global_model: Tensor) -> Tensor:
        if self.init_mix in (0.0, 1.0):  # the ends are exact, bit for bit
            return global_model if self.init_mix else personal_models
        return torch.lerp(personal_models, global_model, self.init_mix)


@dataclass(frozen=True)
class ProximalAnchor:
    """The anchor z_k = w̃ + prox_φ^ρ(w_k - w̃), Fed+ v2 eq. (11)."""

    penalty: Penalty
    rho: float = setting(1.0, "ρ = μ/α of eq. (5): how far a model may differ before it is pulled back", above=0)

    def __call__(self, personal_models: Tensor, global_model: Tensor, round: int, parties: Sequence[str]) -> Tensor:
        return proximal_anchor(self.penalty, personal_models, global_model, rho=self.rho)


@dataclass(frozen=True)
class FixedMixAnchor:
    """The anchor z_k = (1-γ_k)·w_k + γ_k·w̃ with γ_k fixed by party or by column: v2's Proposition 3.

    γ=1 is R = w̃ (FedProx, Corollary 1b), γ=0 is R = w_k (the local proximal-point method, Corollary 1a).

    >>> FixedMixAnchor((0.0, 1.0))(torch.tensor([[4.0, 4.0]]), torch.tensor([[8.0, 8.0]]), 1, ["a"])
    tensor([[4., 8.]])
    """

    gamma: Schedule | tuple[float, ...] | Tensor | PerLayer = setting(
        1.0, "γ: the share of the global model in the anchor", least=0, most=1
    )

    def __call__(self, personal_models: Tensor, global_model: Tensor, round: int, parties: Sequence[str]) -> Tensor:
        if isinstance(self.gamma, PerLayer):
            raise TypeError("bind this algorithm to a model's layout first: its γ goes by layer names")
        if isinstance(self.gamma, tuple | Tensor):
            gammas = torch.as_tensor(self.gamma, dtype=personal_models.dtype)
        else:  # a schedule may give one number per party, or one per column
            party_gammas = [
                torch.as_tensor(value_at(self.gamma, round, party), dtype=personal_models.dtype) for party in parties
            ]
            gammas = torch.stack([gamma.expand(personal_models.shape[1]) for gamma in party_gammas])
        return torch.lerp(personal_models, global_model, gammas.expand_as(personal_models))


@dataclass(frozen=True)
class PerLayer(Unbound):
    """One number per layer, by name patterns: the first match counts, and unmatched layers get 0."""

    values: Mapping[str, float]

    def bind(self, net: Net) -> Tensor:
        layout = net.layout
        layout.matching_names(tuple(self.values))
        columns = torch.zeros(layout.trainable_width)
        for name in layout.parameter_names:
            begin, end = layout.column_range(name)
            matches = (value for pattern, value in self.values.items() if fnmatchcase(name, pattern))
            columns[begin:end] = next(matches, 0.0)
        return columns


@dataclass(frozen=True)
class FedPlusStep:
    """The step w ← θ·w + (1-θ)·z after each local step, with θ = 1/(1+αη): Fed+ v2 eq. (6) and Proposition 2."""

    alpha: Schedule = setting(0.01, "α: how strongly a party is pulled toward its anchor", least=0)
    anchor_rule: ProximalAnchor | FixedMixAnchor = FixedMixAnchor()

    def anchor(self, personal_models: Tensor, global_model: Tensor, round: int, parties: Sequence[str]) -> Tensor:
        return self.anchor_rule(personal_models, global_model, round, parties)

    def alphas(self, round: int, parties: Sequence[str], like: Tensor) -> Tensor:
        return like.new_tensor([[value_at(self.alpha, round, party)] for party in parties])


@dataclass(frozen=True)
class DistanceTerm:
    """The distance B(w_k, w̃) = φ(w_k - w̃), Fed+ v1 eq. (2)-(4), its gradient taken with w̃ fixed (ERRATA 18)."""

    penalty: Penalty

    def __call__(self, context: LossContext) -> Tensor:
        return self.penalty.value(context.w - context.received)


def sample_weights(metrics: Sequence[Metrics]) -> Tensor:
    """Return n_k: the weights of FedAvg and the baselines (ERRATA 16); |D_i| of Tuor et al. (2021), eq. (1)."""
    return torch.tensor([float(metric["samples"]) for metric in metrics], dtype=torch.float64)


def uniform_weights(metrics: Sequence[Metrics]) -> Tensor:
    """Return equal weights: the plain means and medians of the Fed+ papers (ERRATA 16)."""
    return torch.ones(len(metrics), dtype=torch.float64)


WEIGHTS: Mapping[WeightsName, ComputeWeights] = {"samples": sample_weights, "uniform": uniform_weights}


@dataclass(frozen=True)
class _WeightsSetting:
    weights: WeightsName = setting(
        "samples", "how much each reply counts: by its samples, or equally (ERRATA 16)", one_of=tuple(WEIGHTS)
    )


def weight_function(weights: WeightsName, owner: str) -> ComputeWeights:
    """Return the weight function of a baseline's ``weights``."""
    check_settings(_WeightsSetting(weights), owner)
    return WEIGHTS[weights]


def take_aggregate(
    global_model: Tensor, aggregate: Tensor, server_state: NamedTensors, sample_share: float
) -> tuple[Tensor, NamedTensors]:
    """Return the aggregate as the new global model."""
    return aggregate, server_state


def take_sample_share(
    global_model: Tensor, aggregate: Tensor, server_state: NamedTensors, sample_share: float
) -> tuple[Tensor, NamedTensors]:
    """Return w + Σ n_k/N·(w_k - w) with N of all parties: a step of the replies' share of all samples.

    It is line 14 of Algorithm 1 of representation matching, taken literally (ERRATA 6).
    """
    return torch.lerp(global_model, aggregate, sample_share), server_state


def keep_global_model(
    global_model: Tensor, aggregate: Tensor, server_state: NamedTensors, sample_share: float
) -> tuple[Tensor, NamedTensors]:
    """Return the old global model: the method has none to train."""
    return global_model, server_state


SERVER_UPDATES: Mapping[Normalize, ServerUpdate] = {"selected": take_aggregate, "total": take_sample_share}


@dataclass(frozen=True)
class _NormalizeSetting:
    normalize: Normalize = setting(
        "selected",
        "weights are shares of the selected parties' samples, or of the total (ERRATA 6)",
        one_of=tuple(SERVER_UPDATES),
    )


def server_update_for(normalize: Normalize, owner: str) -> ServerUpdate:
    """Return the server update of a baseline's ``normalize``: shares of the replies' samples, or of all (ERRATA 6)."""
    check_settings(_NormalizeSetting(normalize), owner)
    return SERVER_UPDATES[normalize]


@dataclass(frozen=True)
class ServerStep:
    """A server update that moves part of the way to the aggregate: a server learning rate."""

    size: float = setting(1.0, "the share of the way from the global model to the aggregate", above=0)

    def __call__(
        self, global_model: Tensor, aggregate: Tensor, server_state: NamedTensors, sample_share: float
    ) -> tuple[Tensor, NamedTensors]:
        return torch.lerp(global_model, aggregate, self.size), server_state


def keep_trained_models(models: Tensor, global_model: Tensor, hyper: Hyper) -> Tensor:
    """Return the models that the parties trained as their personal models."""
    return models


def fixed_hyper(context: TuneContext) -> TuneResult:
    """Return the solver's own settings in every round: nothing is tuned."""
    return TuneResult(context.hyper, context.tuner_state)


@dataclass(frozen=True)
class ReplayHyper:
    """A tuner that repeats another run's hyper-parameters, so that Local takes the steps of a tuned federation."""

    hypers: tuple[tuple[float, int], ...] = field(repr=False)  # (lr, work) of the rounds from the first on

    @classmethod
    def from_history(cls, history: Sequence[Mapping[str, Any]]) -> ReplayHyper:
        """Return the tuner that repeats the hyper-parameters in a run's history."""
        return cls(tuple((entry["lr"], entry["work"]) for entry in history))

    def __call__(self, context: TuneContext) -> TuneResult:
        hyper = Hyper(*self.hypers[context.round - 1]) if self.hypers else context.hyper  # the run had no round yet
        return TuneResult(hyper, context.tuner_state)
