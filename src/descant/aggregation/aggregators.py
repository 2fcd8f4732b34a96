"""Aggregators of K models: A(W) = argmin_z of the mean of Phi_rho(w_k - z), eq. (4)-(5), and others.

Fed+: A Unified Approach to Robust Personalized Federated Learning (v2), Yu, Kundu, Wynter, Lim, 2021.

K models are the rows of `models [K, d]`, float32 or float64. `weights [K]` are non-negative and need not sum to 1;
None means equal weights, and a row of weight 0 is absent. Sums are float64. The stack is read in blocks of columns (of
rows if a prox needs whole rows). It is never changed or copied as a whole. An empty stack is an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from ..core.settings import check_settings, setting
from ..errors import SettingError
from .geometric_median import geometric_median
from .order_statistics import BLOCK, column_blocks, huber_location, median, trimmed_mean, weighted_sum

Ranges: TypeAlias = tuple[tuple[int, int], ...]
"""Columns of a flat model, as (start, stop) pairs."""

ColumnLocation: TypeAlias = Callable[[Tensor, Tensor], Tensor]  # a block [K, c] and the shares of its rows -> [c]
MAX_MAGNITUDE = 1e50  # larger numbers in a float64 row are scaled down before squares and sums overflow


@dataclass(frozen=True)
class AggregatePoint:
    """An aggregate and its gap: the norm of the smallest (sub)gradient of the mean objective there.

    >>> AggregatePoint(torch.zeros(2), gap=0.0)
    AggregatePoint(point=tensor([0., 0.]), gap=0.0, iterations=0)
    """

    point: Tensor  # [d], in the dtype of the models
    gap: float  # for weights that sum to 1; 0.0 if a closed form is exact
    iterations: int = 0


class Aggregator(Protocol):
    """A function that combines models into one."""

    def __call__(self, models: Tensor, weights: Tensor | None = None) -> AggregatePoint: ...


class Proximal(Protocol):
    """The part of a penalty that eq. (34) needs."""

    def prox(self, v: Tensor, rho: float) -> Tensor: ...


@dataclass(frozen=True)
class Mean:
    """The weighted mean: eq. (4) with phi = ½‖·‖².

    >>> Mean()(torch.tensor([[0.0, 1.0], [4.0, 1.0]]), torch.tensor([3, 1])).point
    tensor([1., 1.])
    """

    def __call__(self, models: Tensor, weights: Tensor | None = None) -> AggregatePoint:
        shares = normalized_weights(models, weights)
        return AggregatePoint(weighted_sum(models, shares, dtype=models.dtype), gap=0.0)


@dataclass(frozen=True)
class GeometricMedian:
    """The rho-smoothed geometric median: eq. (4)-(5) with phi = ‖·‖₂; a tiny rho is RFA's.

    >>> result = GeometricMedian()(torch.tensor([[0.0, 0.0], [0.0, 0.1], [0.1, 0.0], [900.0, 900.0]]))
    >>> [round(x, 3) for x in result.point.tolist()], result.gap < 1e-6
    ([0.05, 0.05], True)
    """

    rho: float = setting(1e-6, "ρ: models within this distance of the median are averaged", above=0)
    tolerance: float = setting(1e-9, "stop at this gap, or at the limit of rounding", least=0)
    max_iterations: int = setting(1000, "the most passes over the stack", least=1)

    def __call__(self, models: Tensor, weights: Tensor | None = None) -> AggregatePoint:
        check_settings(self)
        shares = normalized_weights(models, weights)
        bounded = _bound_far_rows(models) if models.dtype == torch.float64 else models
        return AggregatePoint(
            *geometric_median(bounded, shares, self.rho, tolerance=self.tolerance, max_iterations=self.max_iterations)
        )


def _bound_far_rows(models: Tensor) -> Tensor:
    """Scale down rows whose squares would overflow: only their direction counts."""
    magnitudes = torch.linalg.vector_norm(models, torch.inf, dim=1)
    far = magnitudes > MAX_MAGNITUDE
    if not far.any():
        return models
    bounded = models.clone()
    bounded[far] *= (MAX_MAGNITUDE / magnitudes[far]).unsqueeze(1)
    return bounded


@dataclass(frozen=True)
class CoordinateMedian:
    """The median of each coordinate, or the midpoint if there are two (ERRATA 25).

    >>> CoordinateMedian()(torch.tensor([[1.0], [2.0], [3.0], [100.0]])).point
    tensor([2.5000])
    """

    def __call__(self, models: Tensor, weights: Tensor | None = None) -> AggregatePoint:
        return AggregatePoint(_aggregate_columns(models, weights, median, size=8), gap=0.0)


@dataclass(frozen=True)
class SmoothedCoordinateMedian:
    """The Huber location of each coordinate: eq. (4)-(5) with phi = ‖·‖₁; the midpoint if it is an interval.

    >>> SmoothedCoordinateMedian(rho=1.0)(torch.tensor([[0.0], [0.5], [9.0]])).point
    tensor([0.7500])
    """

    rho: float = setting(help="ρ: coordinates within this distance of the median are averaged", above=0)

    def __call__(self, models: Tensor, weights: Tensor | None = None) -> AggregatePoint:
        check_settings(self)
        squared_slopes = 0.0

        def locate(block: Tensor, shares: Tensor) -> Tensor:
            nonlocal squared_slopes
            z, slope = huber_location(block, shares, self.rho)
            squared_slopes += float(slope @ slope)
            return z

        point = _aggregate_columns(models, weights, locate, size=8)
        return AggregatePoint(point, gap=math.sqrt(squared_slopes))


@dataclass(frozen=True)
class TrimmedMean:
    """The mean of each coordinate without its floor(share · K) least and greatest values.

    >>> TrimmedMean(0.25)(torch.tensor([[1.0], [2.0], [4.0], [99.0]])).point
    tensor([3.])
    """

    share: float = setting(0.1, "the share of the models dropped at either end", least=0, below=0.5)

    def __call__(self, models: Tensor, weights: Tensor | None = None) -> AggregatePoint:
        check_settings(self)

        def trim(block: Tensor, shares: Tensor) -> Tensor:
            # 0.29 · 100 is 28.999999999999996 in floating point, and means 29.
            return trimmed_mean(block, shares, math.floor(self.share * len(shares) + 1e-9))

        return AggregatePoint(_aggregate_columns(models, weights, trim), gap=0.0)


@dataclass(frozen=True)
class ProximalAggregator:
    """Eq. (4)-(5) for any phi with a prox: eq. (34) with Nesterov's momentum, restarted if it goes uphill.

    The gradient of the objective is (z - step(z))/rho with step(z) the right side of (34), and 1/rho its constant.

    >>> from descant.aggregation.penalties import NormP
    >>> result = ProximalAggregator(NormP(3.0), rho=1.0)(torch.tensor([[0.0, 0.0], [2.0, 0.0], [1.0, 6.0]]))
    >>> round(result.point[0].item(), 4), result.gap < 1e-6
    (1.0, True)
    """

    penalty: Proximal
    rho: float = setting(help="ρ: the smoothing of the penalty", above=0)
    tolerance: float = setting(1e-9, "stop at this gap, or at the limit of rounding", least=0)
    max_iterations: int = setting(10_000, "the most passes over the stack", least=1)

    def __call__(self, models: Tensor, weights: Tensor | None = None) -> AggregatePoint:
        check_settings(self)
        # Start at the median, not the mean: a step is at most rho long, and an outlier moves the mean far away.
        last = lookahead = CoordinateMedian()(models, weights).point.double()
        momentum = 1.0
        iterations = 0
        while iterations < self.max_iterations:
            iterations += 1
            step = fixed_point_step(models, lookahead, self.penalty, rho=self.rho, weights=weights)
            scaled_gradient = lookahead - step  # rho times the gradient
            size = float(scaled_gradient.norm())
            if size <= max(self.rho * self.tolerance, 1e-16 * float(lookahead.norm())):
                break
            momentum = 1.0 if scaled_gradient @ (step - last) > 0 else momentum
            next_momentum = (1 + math.sqrt(1 + 4 * momentum**2)) / 2
            lookahead = step + (momentum - 1) / next_momentum * (step - last)
            last = step
            momentum = next_momentum
        point = lookahead.to(models.dtype)
        residual = point.double() - fixed_point_step(
            models, point.double(), self.penalty, rho=self.rho, weights=weights
        )
        distance = normalized_weights(models, weights) @ (models - point).double().norm(dim=1)
        rounding_error = 2**-52 * float(distance)  # of the prox
        return AggregatePoint(point, (float(residual.norm()) + rounding_error) / self.rho, iterations)


def fixed_point_step(models: Tensor, z: Tensor, penalty: Proximal, rho: float, weights: Tensor | None = None) -> Tensor:
    """One step of eq. (34): Mean{w_k} - Mean{prox(w_k - z)}, with the signed prox and the running z (ERRATA 9, 10).

    >>> from descant.aggregation.penalties import HalfSquare
    >>> fixed_point_step(torch.tensor([[0.0], [4.0]]), torch.tensor([0.0]), HalfSquare(), rho=1.0)
    tensor([1.])
    """
    shares = normalized_weights(models, weights)
    total = torch.zeros_like(z, dtype=torch.float64)
    height = max(1, BLOCK // max(1, models.shape[1]))  # a prox needs whole rows
    for start in range(0, models.shape[0], height):
        rows = models[start : start + height].double()
        total += shares[start : start + height] @ (rows - penalty.prox(rows - z, rho))
    return total.to(z.dtype)


@dataclass(frozen=True)
class LayerwiseAggregator:
    """An aggregator for each group of columns, eq. (14), and the mean for the rest. The gap is the norm of the gaps.

    >>> by_layer = LayerwiseAggregator(((((0, 1),), CoordinateMedian()),))
    >>> by_layer(torch.tensor([[0.0, 0.0], [1.0, 0.0], [8.0, 9.0]])).point
    tensor([1., 3.])
    """

    groups: tuple[tuple[Ranges, Aggregator], ...]

    def __call__(self, models: Tensor, weights: Tensor | None = None) -> AggregatePoint:
        shares = normalized_weights(models, weights)
        point = torch.empty_like(models[0])
        rest = uncovered_columns(tuple(pair for ranges, _ in self.groups for pair in ranges), models.shape[1])
        results: list[AggregatePoint] = []
        for ranges, aggregator in (*self.groups, *(((pair,), Mean()) for pair in rest)):
            results.append(aggregator(take_columns(models, ranges), shares))
            write_columns(point, ranges, results[-1].point)
        gap = math.hypot(*(result.gap for result in results))
        return AggregatePoint(point, gap, max((result.iterations for result in results), default=0))


def take_columns(v: Tensor, ranges: Ranges) -> Tensor:
    """Return columns of a model or a stack: a view of one range, a copy of several."""
    if len(ranges) == 1:
        return v[..., ranges[0][0] : ranges[0][1]]
    return torch.cat([v[..., start:stop] for start, stop in ranges], dim=-1)


def write_columns(target: Tensor, ranges: Ranges, values: Tensor) -> None:
    """Write values back to their columns: the inverse of :func:`take_columns`."""
    parts = torch.split_with_sizes(values, [stop - start for start, stop in ranges], dim=-1)
    for (start, stop), part in zip(ranges, parts, strict=True):
        target[..., start:stop] = part


def uncovered_columns(ranges: Ranges, d: int) -> Ranges:
    """Return the columns of 0..d that are in no range.

    >>> uncovered_columns(((2, 4), (4, 5)), 7)
    ((0, 2), (5, 7))
    """
    rest = []
    reached = 0
    for start, stop in sorted(ranges):
        if start < reached or stop < start or stop > d:
            raise SettingError(
                f"The columns of the layers must be disjoint and within 0..{d}. Got {start}..{stop} after {reached}."
            )
        rest.append((reached, start))
        reached = stop
    return tuple(pair for pair in (*rest, (reached, d)) if pair[0] < pair[1])


def normalized_weights(models: Tensor, weights: Tensor | None) -> Tensor:
    """Return the weights as float64 shares that sum to 1, or raise if the stack or the weights are invalid.

    >>> normalized_weights(torch.zeros(2, 3), torch.tensor([1, 3]))
    tensor([0.2500, 0.7500], dtype=torch.float64)
    """
    if models.ndim != 2 or not models.is_floating_point():
        raise SettingError(
            f"A stack of models must be a float tensor [K, d], one model per row. "
            f"Got {models.dtype} of shape {tuple(models.shape)}."
        )
    count = models.shape[0]
    if count == 0:
        raise SettingError("An aggregator needs at least one model. Got none: at least one party must reply.")
    if weights is None:
        return torch.full((count,), 1 / count, dtype=torch.float64, device=models.device)
    if weights.shape != (count,):
        raise SettingError(f"Weights must be one number per model: [{count}]. Got shape {tuple(weights.shape)}.")
    weights64 = weights.to(models.device, torch.float64)
    numbers = weights64.tolist()
    largest = max(numbers)
    if not (all(0 <= number < math.inf for number in numbers) and largest > 0):
        raise SettingError(f"Weights must be finite, not negative and not all 0. Got {weights.tolist()}.")
    weights64 = weights64.div(largest)  # the sum of huge weights must not overflow
    return weights64 / weights64.sum()


def _aggregate_columns(models: Tensor, weights: Tensor | None, locate: ColumnLocation, size: int = 1) -> Tensor:
    """Apply a location estimate to each column, over the rows that are present."""
    shares = normalized_weights(models, weights)
    present = shares > 0
    all_present = bool(present.all())
    point = torch.empty_like(models[0])
    for columns, block in column_blocks(models, size):
        point[columns] = locate(block if all_present else block[present], shares if all_present else shares[present])
    return point
