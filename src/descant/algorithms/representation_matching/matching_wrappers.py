"""Robust federated learning through representation matching and adaptive hyper-parameters. Mostafa (2019).

Here are the terms of its clients' losses: representation matching (§3.1), the entropy regularisation of all its
experiments, and the penalty on the divergence of weights that it compares with (§4). Each wraps any algorithm.
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
from ...core.settings import Schedule, setting
from ...errors import ModelError
from ...models.flat import Net, Unbound
from ...models.matching_layers import CACHE_LINE, MatchingLayer, MatchingLoss, Reduction
from ..fedavg import FedAvg
from .inverse_path import find_inverse_layers, points_of_interest

EntropyGranularity: TypeAlias = Literal["samples", "batch"]
MIN_ENTROPY_FOR_TEN_CLASSES = 2.0  # H_min for ten classes; not from the paper: a successor's (Auto-FedRL)


@dataclass(frozen=True)
class MatchingInitialization:
    """θ at the beginning: uniform within ±1/√(fan in), weights and biases, as torch begins its layers."""

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
    """The term of representation matching, its points not yet found."""

    strength: Schedule = setting(0.1, "the factor before the matching loss; not from the paper", least=0)
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


def RepresentationMatching(
    base: Algorithm = FedAvg(),  # noqa: B008  a frozen value
    coefficient: Schedule = 0.1,
    reduction: Reduction = "mean",
    points: tuple[str, ...] | None = None,
) -> Algorithm:
    """Parties must be able to rebuild what the received model saw from what their own sees: eq. (2), any algorithm's.

    The matching layers θ are a party's own: trained with its model, kept from round to round, never sent. Points of
    interest are found by tracing the model (§3.1: the input, every non-linearity, the top), unless they are named.
    Not from the paper: the mean for the sum that eq. (1) prints (ERRATA 5), and the coefficient; with 1, convolutional
    matching layers diverge at rates at which the model itself learns well.

    >>> RepresentationMatching().name
    'FedAvg+RM'
    """
    chosen = (points,) if isinstance(points, str) else None if points is None else tuple(points)
    terms = (*base.terms, UnboundMatching(coefficient, reduction, chosen))
    return replace(base, name=f"{base.name}+RM", terms=terms)


@dataclass(frozen=True)
class EntropyTerm:
    """max(0, H_min - H(softmax(a_M))), eq. (8): a penalty on outputs that are surer than they may be.

    Of each sample as printed, or of the batch's mean entropy as the paper's successor has it (ERRATA 8).

    >>> sure, unsure = torch.tensor([[9.0, 0.0], [0.0, 0.0]]).softmax(1).log().split(1)
    >>> [round(float(Entropy(0.5).of(each)), 3) for each in (sure, unsure)]
    [0.499, 0.0]
    """

    min_entropy: float | None = setting(
        None,
        "H_min in nats: outputs with less entropy are penalised; None: by the classes; not from the paper",
        least=0,
    )
    granularity: EntropyGranularity = setting(
        "samples", "whose entropy is held up (ERRATA 8)", one_of=("samples", "batch")
    )

    def __call__(self, context: LossContext) -> Tensor:
        return self.entropy_deficit(context.output)

    def entropy_deficit(self, output: Tensor) -> Tensor:
        """Of outputs ``[batch, classes]``."""
        logs = functional.log_softmax(output, 1)
        entropies = -(logs.exp() * logs).sum(1)
        min_entropy = (
            MIN_ENTROPY_FOR_TEN_CLASSES * math.log(output.shape[1]) / math.log(10)
            if self.min_entropy is None
            else self.min_entropy
        )
        return (min_entropy - (entropies.mean() if self.granularity == "batch" else entropies)).clamp(min=0).mean()


def EntropyRegularization(
    base: Algorithm = FedAvg(),  # noqa: B008  a frozen value
    min_entropy: float | None = None,
    coefficient: Schedule = 1.0,
    granularity: EntropyGranularity = "samples",
) -> Algorithm:
    """Parties stay unsure: outputs whose entropy is below H_min cost, eq. (8). In all experiments of the paper.

    Not from the paper: the coefficient, and H_min, which is 2 nats of the ln 10 = 2.3 that ten classes can have, as its
    successor has it, and unless it is given, the same share of ln C for C classes.
    """
    term = LossTerm("entropy", EntropyTerm(min_entropy, granularity), coefficient, symbol="coefficient")
    return replace(base, name=f"{base.name}+ER", terms=(*base.terms, term))


def divergence_term(context: LossContext) -> Tensor:
    """‖w_t - w_t^i‖², the paper's §4: all squares, without the half of FedProx."""
    return (context.w - context.received).square().sum()


def WeightDivergence(base: Algorithm = FedAvg(), coefficient: Schedule = 0.01) -> Algorithm:  # noqa: B008
    """Parties stay near the received weights: FA+WD of §4, FedProx with μ = 2·coefficient. Not from the paper: 0.01."""
    term = LossTerm("divergence", divergence_term, coefficient, symbol="coefficient")
    return replace(base, name=f"{base.name}+WD", terms=(*base.terms, term))
