"""Fed+: a unified approach to robust personalized federated learning. Yu, Kundu, Wynter, Lim (v1 2020, v2 2021).

A party keeps a personal model w_k. Each local step pulls it toward the anchor z_k = R(w̃, w_k), a robust combination of
the personal and the global model. One penalty φ defines both the aggregate (eq. 4) and the anchor (eq. 11).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from ..aggregation.aggregators import CoordinateMedian, Mean
from ..aggregation.penalties import HalfSquare, Norm1, Norm2, Penalty
from ..core.algorithm import Aggregate, AggregateResult, Algorithm, Hyper, LossTerm, TuneContext, TuneResult
from ..core.settings import Schedule, document_parameters, setting
from ..errors import SettingError
from .components import (
    DistanceTerm,
    FedPlusStep,
    FixedMixAnchor,
    MixedStart,
    PerLayer,
    ProximalAnchor,
    keep_trained_models,
    uniform_weights,
)
from .fedavg_and_baselines import FedAvg

AggregateOver = Literal["active", "all"]


@document_parameters(
    FedPlusStep,
    ProximalAnchor,
    MixedStart,
    Algorithm,
    penalty="the penalty φ of aggregate and anchor",
    name="the name in tables",
)
def FedPlus(
    penalty: Penalty = HalfSquare(),  # noqa: B008  a frozen value
    alpha: Schedule = 0.01,
    rho: float = 1.0,
    init_mix: float = 0.0,
    aggregate_over: AggregateOver = "active",
    name: str = "FedPlus",
) -> Algorithm:
    """Fed+ v2, Algorithm 1, for any penalty φ, which may differ by layer (`penalties.ByLayer`, §5.3).

    α=0.01 is the paper's; ρ=1 is not from the paper, which gives ρ for its three named methods only.

    >>> FedPlus(Norm1(), rho=0.1).proximal_step.alpha
    0.01
    """
    return replace(
        FedAvg(),
        name=name,
        local_start=MixedStart(init_mix),
        proximal_step=FedPlusStep(alpha, ProximalAnchor(penalty, rho)),
        aggregate=PenaltyAggregator(penalty, rho),
        compute_weights=uniform_weights,
        personalize=keep_trained_models,
        aggregate_over=aggregate_over,
    )


@dataclass(frozen=True)
class PenaltyAggregator:
    """The aggregate A(W), eq. (4): the minimizer of the mean envelope of φ over the models."""

    penalty: Penalty
    rho: float = setting(1.0, "ρ = μ/α of eq. (5): the smoothing of the aggregate", above=0)

    def __call__(self, models: Tensor, weights: Tensor | None = None) -> AggregateResult:
        return self.penalty.center(self.rho)(models, weights)


@document_parameters(FedPlusStep, ProximalAnchor, MixedStart, Algorithm)
def FedAvgPlus(
    alpha: Schedule = 0.01, rho: float = 1000.0, init_mix: float = 0.0, aggregate_over: AggregateOver = "active"
) -> Algorithm:
    """Fed+ with φ = ½‖·‖²: the mean, and z_k = (w_k + ρ·w̃)/(1+ρ) (v2 §5.2.1). Defaults are the paper's §8.1."""
    return FedPlus(HalfSquare(), alpha, rho, init_mix=init_mix, aggregate_over=aggregate_over, name="FedAvgPlus")


@document_parameters(FedPlusStep, ProximalAnchor, MixedStart, Algorithm)
def FedGeoMedPlus(
    alpha: Schedule = 0.01, rho: float = 10.0, init_mix: float = 0.0, aggregate_over: AggregateOver = "active"
) -> Algorithm:
    """Fed+ with φ = ‖·‖₂: the ρ-smoothed geometric median (v2 §5.2.2; RFA+ in v1). Defaults are the paper's §8.1."""
    return replace(
        FedPlus(Norm2(), alpha, rho, init_mix=init_mix, aggregate_over=aggregate_over, name="FedGeoMedPlus"),
        aggregate_statistics=CoordinateMedian(),
    )


@document_parameters(FedPlusStep, ProximalAnchor, MixedStart, Algorithm)
def FedCoMedPlus(
    alpha: Schedule = 0.01, rho: float = 10.0, init_mix: float = 0.0, aggregate_over: AggregateOver = "active"
) -> Algorithm:
    """Fed+ with φ = ‖·‖₁: the ρ-smoothed coordinate median (v2 §5.2.3; coordinate-wise median+ in v1).

    Defaults are the paper's §8.1.
    """
    return replace(
        FedPlus(Norm1(), alpha, rho, init_mix=init_mix, aggregate_over=aggregate_over, name="FedCoMedPlus"),
        aggregate_statistics=CoordinateMedian(),
    )


@document_parameters(FedPlusStep, FixedMixAnchor, MixedStart, Algorithm, aggregate="the aggregator")
def FedPlusFixed(
    gamma: Schedule | tuple[float, ...] | Tensor | PerLayer = 0.5,
    aggregate: Aggregate = Mean(),  # noqa: B008  a frozen value
    alpha: Schedule = 0.01,
    init_mix: float = 0.0,
    aggregate_over: AggregateOver = "active",
) -> Algorithm:
    """Fed+ with z_k = (1-γ)·w_k + γ·w̃, γ fixed, and any aggregator: v2's Proposition 3, used in §8.2.

    Not from the paper: γ=0.5. The paper reports the best of a grid in its portfolio experiments.
    """
    proximal_step = FedPlusStep(alpha, FixedMixAnchor(gamma))
    return replace(
        FedPlus(alpha=alpha, init_mix=init_mix, aggregate_over=aggregate_over),
        name="FedPlusFixed",
        proximal_step=proximal_step,
        aggregate=aggregate,
    )


@document_parameters(
    penalty="B: the distance between personal and global model",
    aggregate="C: the aggregator",
    alpha="α: the weight of the distance in the loss",
)
def FedPlusV1(
    penalty: Penalty = HalfSquare(),  # noqa: B008  a frozen value
    aggregate: Aggregate = Mean(),  # noqa: B008  a frozen value
    alpha: Schedule = 0.001,
) -> Algorithm:
    """Fed+ v1, Algorithm 1: w ← w - η(∇f + α·∇B(w, w̃)) from the personal model, for any distance B and aggregator C.

    ``alpha`` may differ by party and round (`settings.PerParty`, `settings.Decay`); 0.001 is from v1's §8. For
    B = ½‖·‖² its step is v2's step under η₊ = η/(1-αη) (ERRATA 17).
    """
    terms = (LossTerm("distance", DistanceTerm(penalty), alpha, symbol="alpha"),)
    return replace(
        FedAvg(),
        name="FedPlusV1",
        local_start=MixedStart(0.0),
        terms=terms,
        aggregate=aggregate,
        compute_weights=uniform_weights,
        personalize=keep_trained_models,
    )


@dataclass(frozen=True)
class GeometricStepCount:
    """A tuner that draws the number of local steps before an aggregation step: P(g) = (1-p)^g · p."""

    p: float = setting(0.1, "the probability of an aggregation step", above=0, below=1)

    def __call__(self, context: TuneContext) -> TuneResult:
        return TuneResult(replace(context.hyper, work=int(context.rng.geometric(self.p)) - 1), context.tuner_state)


@dataclass(frozen=True)
class StepToMean:
    """L2GD's aggregation step w_k ← (1-s)·w_k + s·w̃ with s = ηλ(1-p)/p, where η is the local step size."""

    lam: float = setting(0.1, "λ: how strongly models are pulled toward their mean", least=0)
    p: float = setting(0.1, "the probability of an aggregation step", above=0, below=1)

    def __call__(self, models: Tensor, global_model: Tensor, hyper: Hyper) -> Tensor:
        s = hyper.lr * self.lam * (1 - self.p) / self.p
        if s > 1:
            raise SettingError(f"L2GD's step to the mean, lr·λ(1-p)/p, must be <= 1. Got {s:.3g}: lower lr or lam.")
        return torch.lerp(models, global_model.expand_as(models), s)


@document_parameters(StepToMean)
def L2GD(lam: float = 0.1, p: float = 0.1) -> Algorithm:
    """The local-global mixture of Hanzely & Richtárik (2020) in rounds (v1 Remark 1). Not from the Fed+ papers: λ, p.

    In the original, each iteration is drawn at random: a local step of size a/(n(1-p)), or a step of size aλ/(np) to
    the mean. Here a round is the local steps up to the next step to the mean, and that step. The solver's learning rate
    is the local step size; the draw replaces its number of steps.
    """
    return replace(
        FedAvg(),
        name="L2GD",
        local_start=MixedStart(0.0),
        compute_weights=uniform_weights,
        personalize=StepToMean(lam, p),
        tune=GeometricStepCount(p),
    )
