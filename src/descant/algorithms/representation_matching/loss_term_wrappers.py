"""Robust federated learning through representation matching and adaptive hyper-parameters. Mostafa (2019).

These are the terms of its clients' losses: representation matching (§3.1), the entropy regularization of all its
experiments, and the weight-divergence penalty that it compares with (§4). Each wraps any algorithm.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ...core.algorithm import Algorithm, LossContext, LossTerm
from ...core.settings import Schedule, document_parameters, setting
from ...errors import ModelError
from ...models.flat import Net, Unbound
from ...models.matching_layers import CACHE_LINE, MatchingLayer, MatchingLoss, Reduction
from ..fedavg_and_baselines import FedAvg
from .inverse_layers import find_inverse_layers, points_of_interest

EntropyGranularity: TypeAlias = Literal["samples", "batch"]
MIN_ENTROPY_FOR_TEN_CLASSES = 2.0  # H_min for ten classes; not from the paper: a successor's (Auto-FedRL)


@dataclass(frozen=True)
class MatchingInitialization:
    """The initial θ: weights and biases uniform within ±1/√(fan in), as torch initializes its layers."""

    matching: MatchingLoss

    def __call__(self, received: Tensor, rng: np.random.Generator) -> Tensor:
        private = received.new_zeros(self.matching.width)
        layers = (back for link in self.matching.layers for back in link.inverse_layers)
        bounds = (back.fan_in**-0.5 for back in layers for _ in back.parameter_shapes)
        for part, bound in zip(self.matching.split(private), bounds, strict=True):
            part.copy_(torch.from_numpy(rng.uniform(-bound, bound, tuple(part.shape))))
        return private


@dataclass(frozen=True)
class UnboundMatching(Unbound):
    """The representation-matching term before its points are found in a model."""

    strength: Schedule = setting(0.1, "the factor of the matching loss; not from the paper", least=0)
    reduction: Reduction = "mean"
    points: tuple[str, ...] | None = None

    def bind(self, net: Net) -> LossTerm:
        traced = net.graph
        nodes = points_of_interest(traced) if self.points is None else traced.find_points(self.points)
        if len(nodes) < 2:
            raise ModelError(
                f"Matching needs at least two points, one before the other. Got {self.points!r}. "
                f"The model has: {', '.join(traced.points)}."
            )
        point_names = traced.point_names
        links = tuple(
            MatchingLayer(point_names[above], point_names[below], find_inverse_layers(traced, above, below))
            for below, above in pairwise(nodes)
        )
        read = [link.from_point for link in links] + [
            back.input_point for link in links for back in link.inverse_layers
        ]
        points = tuple(dict.fromkeys([*(link.to_point for link in links), *read]))
        value = MatchingLoss(links, self.reduction, -net.layout.trainable_width % CACHE_LINE)
        return LossTerm(
            "matching",
            value,
            self.strength,
            feature_names=points,
            initial_values=MatchingInitialization(value),
            symbol="coefficient",
        )


@document_parameters(
    base="the method to wrap",
    coefficient="the factor of the matching loss",
    reduction="the mean or the sum of squared differences (ERRATA 5)",
    points="names of the matched layers; None: points of interest are found by tracing",
)
def RepresentationMatching(
    base: Algorithm = FedAvg(),  # noqa: B008  a frozen value
    coefficient: Schedule = 0.1,
    reduction: Reduction = "mean",
    points: tuple[str, ...] | None = None,
) -> Algorithm:
    """Wrap a method with the matching loss, eq. (2): rebuild the received model's features from the local model's.

    The matching layers θ are private to a party: trained with its model, kept from round to round, never sent. Points
    of interest are found by tracing the model (§3.1: the input, every non-linearity, the top), unless they are named.
    Not from the paper: the mean in place of the sum that eq. (1) prints (ERRATA 5), and the coefficient; with 1,
    convolutional matching layers diverge at rates at which the model itself learns well.

    >>> RepresentationMatching().name
    'FedAvg+RM'
    """
    chosen = (points,) if isinstance(points, str) else None if points is None else tuple(points)
    terms = (*base.terms, UnboundMatching(coefficient, reduction, chosen))
    return replace(base, name=f"{base.name}+RM", terms=terms)


@dataclass(frozen=True)
class EntropyTerm:
    """The penalty max(0, H_min - H(softmax(a_M))), eq. (8), on over-confident outputs.

    It applies to each sample as printed, or to the batch's mean entropy as in the paper's successor (ERRATA 8).

    >>> confident, uncertain = torch.tensor([[9.0, 0.0], [0.0, 0.0]]).softmax(1).log().split(1)
    >>> [round(float(EntropyTerm(0.5).entropy_deficit(output)), 3) for output in (confident, uncertain)]
    [0.499, 0.0]
    """

    min_entropy: float | None = setting(
        None,
        "H_min in nats: less entropy is penalized; None: by the number of classes; not from the paper",
        least=0,
    )
    granularity: EntropyGranularity = setting(
        "samples", "apply H_min to each sample or to the batch's mean (ERRATA 8)", one_of=("samples", "batch")
    )

    def __call__(self, context: LossContext) -> Tensor:
        return self.entropy_deficit(context.output)

    def entropy_deficit(self, output: Tensor) -> Tensor:
        """Return the penalty of outputs ``[batch, classes]``."""
        logs = functional.log_softmax(output, 1)
        entropies = -(logs.exp() * logs).sum(1)
        min_entropy = (
            MIN_ENTROPY_FOR_TEN_CLASSES * math.log(output.shape[1]) / math.log(10)
            if self.min_entropy is None
            else self.min_entropy
        )
        return (min_entropy - (entropies.mean() if self.granularity == "batch" else entropies)).clamp(min=0).mean()


@document_parameters(
    base="the method to wrap",
    min_entropy="H_min in nats; None: by the number of classes",
    coefficient="the factor of the entropy term",
    granularity="apply H_min to each sample or to the batch's mean (ERRATA 8)",
)
def EntropyRegularization(
    base: Algorithm = FedAvg(),  # noqa: B008  a frozen value
    min_entropy: float | None = None,
    coefficient: Schedule = 1.0,
    granularity: EntropyGranularity = "samples",
) -> Algorithm:
    """Wrap a method to penalize over-confident outputs (entropy below H_min), eq. (8).

    All experiments of the paper use it. Not from the paper: the coefficient, and H_min. By default H_min is 2 nats of
    the ln 10 = 2.3 possible with ten classes, as in its successor, and the same share of ln C for C classes.
    """
    term = LossTerm("entropy", EntropyTerm(min_entropy, granularity), coefficient, symbol="coefficient")
    return replace(base, name=f"{base.name}+ER", terms=(*base.terms, term))


def divergence_term(context: LossContext) -> Tensor:
    """Return ‖w_t - w_t^i‖², the paper's §4: the sum of squares, without the half of FedProx."""
    return (context.w - context.received).square().sum()


@document_parameters(base="the method to wrap", coefficient="the factor of the squared divergence")
def WeightDivergence(base: Algorithm = FedAvg(), coefficient: Schedule = 0.01) -> Algorithm:  # noqa: B008
    """Wrap a method to penalize divergence from the received weights: FA+WD of §4.

    It is FedProx with μ = 2·coefficient. Not from the paper: 0.01.
    """
    term = LossTerm("divergence", divergence_term, coefficient, symbol="coefficient")
    return replace(base, name=f"{base.name}+WD", terms=(*base.terms, term))
