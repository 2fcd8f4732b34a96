"""FedAvg, the base of all methods, and the methods that v2 §5.4 derives: Local, FedProx, RFA, coordinate median.

McMahan et al. (2017), Communication-efficient learning of deep networks from decentralized data; Li et al. (2020),
Federated optimization in heterogeneous networks; Pillutla et al. (2019), Robust aggregation for federated learning;
Yin et al. (2018), Byzantine-robust distributed learning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..aggregation.aggregators import CoordinateMedian as CoordinateMedianAggregator
from ..aggregation.aggregators import GeometricMedian, Mean
from ..aggregation.penalties import HalfSquare
from ..core.algorithm import Algorithm, LossTerm
from ..core.settings import Schedule, document_parameters
from .components import (
    DistanceTerm,
    MixedStart,
    Normalize,
    ReplayHyper,
    WeightsName,
    fixed_hyper,
    keep_global_model,
    keep_trained_models,
    server_update_for,
    uniform_weights,
    weight_function,
)
from .participation import all_parties


@document_parameters(
    weights="the weight of a reply: by its samples, or uniform (ERRATA 16)",
    normalize="weights are shares of the selected parties' samples, or of the total (ERRATA 6)",
)
def FedAvg(weights: WeightsName = "samples", normalize: Normalize = "selected") -> Algorithm:
    """Federated averaging: train from the global model, then average (v2 §5.4.2; Tuor et al. 2021, eq. (3)).

    v2 prints the plain mean; its baselines' own papers, FedProx among them, weight by samples (ERRATA 16). With
    ``normalize="total"`` weights are shares of all samples, including those of absent parties (ERRATA 6).

    >>> FedAvg().local_start
    MixedStart(init_mix=1.0)
    """
    return Algorithm(
        name="FedAvg",
        local_start=MixedStart(1.0),
        terms=(),
        proximal_step=None,
        aggregate=Mean(),
        aggregate_statistics=Mean(),
        compute_weights=weight_function(weights, "FedAvg"),
        server_update=server_update_for(normalize, "FedAvg"),
        personalize=None,
        tune=fixed_hyper,
        participation=all_parties,
    )


def Local() -> Algorithm:
    """Local training without a federation (v2 §5.4.1: λ=0, θ=1); the global model keeps its initial value.

    It is the Standalone of Tuor et al. (2021), §7.4.
    """
    return replace(
        FedAvg(),
        name="Local",
        local_start=MixedStart(0.0),
        server_update=keep_global_model,
        personalize=keep_trained_models,
    )


def local_baseline(
    algorithm: Algorithm,
    history: Sequence[Mapping[str, Any]],
    local: Algorithm = Local(),  # noqa: B008  a frozen value
) -> Algorithm:
    """Return the Local baseline of an algorithm: the same parties in the same rounds with the same work.

    Tuned hyper-parameters come from the history, because Local has no global model to tune by.
    """
    tune = fixed_hyper if algorithm.tune is fixed_hyper else ReplayHyper.from_history(history)
    max_staleness = algorithm.max_staleness
    return replace(
        local, participation=algorithm.participation, tune=tune, quorum=algorithm.quorum, max_staleness=max_staleness
    )


@document_parameters(
    mu="μ: the weight of the proximal term", weights="the weight of a reply: by its samples, or uniform (ERRATA 16)"
)
def FedProx(mu: Schedule = 0.01, weights: WeightsName = "samples") -> Algorithm:
    """FedAvg with μ/2·‖w - w̃‖² added to every loss (v2 §5.4.5, v1 Proposition 1). Not from the Fed+ papers: μ=0.01.

    >>> FedProx(mu=0.1).terms[0].strength
    0.1
    """
    terms = (LossTerm("proximal", DistanceTerm(HalfSquare()), mu, symbol="mu"),)
    return replace(FedAvg(), name="FedProx", terms=terms, compute_weights=weight_function(weights, "FedProx"))


@document_parameters(
    smoothing="the smoothing of the geometric median",
    weights="the weight of a reply: by its samples, or uniform (ERRATA 16)",
)
def RFA(smoothing: float = 1e-6, weights: WeightsName = "samples") -> Algorithm:
    """FedAvg with the geometric median in place of the mean (v2 §5.4.3, v1 Proposition 2)."""
    aggregate = GeometricMedian(smoothing)
    statistics = CoordinateMedianAggregator()
    return replace(
        FedAvg(),
        name="RFA",
        aggregate=aggregate,
        aggregate_statistics=statistics,
        compute_weights=weight_function(weights, "RFA"),
    )


def CoordinateMedian() -> Algorithm:
    """FedAvg with the coordinate-wise median in place of the mean (v2 §5.4.4, v1 Proposition 3)."""
    median = CoordinateMedianAggregator()
    return replace(
        FedAvg(),
        name="CoordinateMedian",
        aggregate=median,
        aggregate_statistics=median,
        compute_weights=uniform_weights,
    )
