"""Penalties phi on w_k - w̃, with their proximal maps: Fed+ v2, eq. (3)-(5), (11), (14), §5.2; v1, eq. (2)-(4).

Fed+: A Unified Approach to Robust Personalized Federated Learning (v2), Yu, Kundu, Wynter, Lim, 2021.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import ClassVar

import torch
from torch import Tensor

from ..errors import SettingError
from ..models.flat import Net, Unbound
from . import aggregators
from .aggregators import Aggregator, Ranges
from .norm_prox import norm, prox_max_norm, prox_p_norm


class Penalty(ABC):
    """A convex phi >= 0 with phi(0) = 0, of a vector or of each row of a stack [..., d]."""

    separable: ClassVar[bool] = False
    """True if phi is a sum of the same function over coordinates, so that columns may be split freely."""

    @abstractmethod
    def value(self, v: Tensor) -> Tensor:
        """Return phi(v): [..., d] -> [...]."""

    @abstractmethod
    def prox(self, v: Tensor, rho: float) -> Tensor:
        """Return the argmin over w' of phi(w') + ‖v - w'‖²/(2 rho), below eq. (5)."""

    @abstractmethod
    def center(self, rho: float) -> Aggregator:
        """Return the aggregator argmin over z of the mean of Phi_rho(w_k - z), eq. (4)."""


def envelope(penalty: Penalty, v: Tensor, rho: float) -> Tensor:
    """Return the Moreau envelope Phi_rho(v) = min over w' of phi(w') + ‖v - w'‖²/(2 rho), eq. (5).

    >>> envelope(Norm1(), torch.tensor([3.0, 0.5]), rho=1.0)  # Huber: (3 - 1/2) + 0.5²/2
    tensor(2.6250)
    """
    nearest = penalty.prox(v, rho)
    return penalty.value(nearest) + (v - nearest).square().sum(dim=-1) / (2 * rho)


def proximal_anchor(penalty: Penalty, personal_model: Tensor, global_model: Tensor, rho: float) -> Tensor:
    """Return the anchor z = w̃ + prox(w_k - w̃), eq. (11), of one model [d] or a stack [K, d].

    >>> proximal_anchor(Norm1(), torch.tensor([5.0, 0.3]), torch.tensor([1.0, 0.0]), rho=1.0)
    tensor([4., 0.])
    """
    v = personal_model - global_model
    prox_offset = penalty.prox(v, rho)
    if not torch.linalg.vector_norm(prox_offset, 1):  # a sixth of the time of prox_offset.any()
        return global_model.expand_as(v)
    # w̃ + (w_k - w̃) is not w_k in floating point: if the prox changes nothing, the party keeps its own bits.
    return torch.where(
        prox_offset == v, personal_model, torch.where(prox_offset == 0, global_model, global_model + prox_offset)
    )


@dataclass(frozen=True)
class HalfSquare(Penalty):
    """The penalty phi = ½‖·‖² of FedAvg+ (§5.2.1): z = (1 - λ_k) w_k + λ_k w̃ with λ_k = rho/(1 + rho).

    >>> HalfSquare().prox(torch.tensor([3.0]), rho=2.0)
    tensor([1.])
    """

    separable: ClassVar[bool] = True

    def value(self, v: Tensor) -> Tensor:
        return v.square().sum(dim=-1) / 2

    def prox(self, v: Tensor, rho: float) -> Tensor:
        return v / (1 + rho)

    def center(self, rho: float) -> Aggregator:
        return aggregators.Mean()


@dataclass(frozen=True)
class Norm2(Penalty):
    """The penalty phi = ‖·‖₂ of FedGeoMed+ (§5.2.2): λ_k = min(1, rho/‖w_k - w̃‖).

    >>> Norm2().prox(torch.tensor([3.0, 4.0]), rho=1.0)
    tensor([2.4000, 3.2000])
    """

    def value(self, v: Tensor) -> Tensor:
        return norm(v, 2.0)

    def prox(self, v: Tensor, rho: float) -> Tensor:
        length = torch.linalg.vector_norm(v, dim=-1, keepdim=True)
        return v * torch.where(length > rho, 1 - rho / length, 0.0)

    def center(self, rho: float) -> Aggregator:
        return aggregators.GeometricMedian(rho)


@dataclass(frozen=True)
class Norm1(Penalty):
    """The penalty phi = ‖·‖₁ of FedCoMed+ (§5.2.3), with the signed soft threshold (ERRATA 9).

    >>> Norm1().prox(torch.tensor([3.0, -3.0, 0.5]), rho=1.0)
    tensor([ 2., -2.,  0.])
    """

    separable: ClassVar[bool] = True

    def value(self, v: Tensor) -> Tensor:
        return v.abs().sum(dim=-1)

    def prox(self, v: Tensor, rho: float) -> Tensor:
        return v - v.clamp(-rho, rho)

    def center(self, rho: float) -> Aggregator:
        return aggregators.SmoothedCoordinateMedian(rho)


@dataclass(frozen=True, eq=False)
class DiagonalQ(Penalty):
    """The penalty phi = ½‖·‖_Q² with Q = diag(q), q >= 0: eq. (3) of either version.

    >>> DiagonalQ((0.0, 1.0)).prox(torch.tensor([2.0, 2.0]), rho=1.0)
    tensor([2., 1.])
    """

    q: tuple[float, ...] | Tensor  # one weight >= 0 per column

    def value(self, v: Tensor) -> Tensor:
        return (self._diagonal(v) * v.square()).sum(dim=-1) / 2

    def prox(self, v: Tensor, rho: float) -> Tensor:
        return v / (1 + rho * self._diagonal(v))

    def center(self, rho: float) -> Aggregator:
        return aggregators.Mean()  # each coordinate is quadratic; if q is 0 any point is a minimizer, so the mean too

    def _diagonal(self, v: Tensor) -> Tensor:
        q = torch.as_tensor(self.q, dtype=v.dtype, device=v.device)
        if q.shape != v.shape[-1:] or not (q >= 0).all():
            raise SettingError(
                f"The 'q' of DiagonalQ must be {v.shape[-1]} numbers >= 0, one per column. Got shape {tuple(q.shape)}"
                + (f" with a least value of {q.min().item()}." if q.numel() else ".")
            )
        return q


@dataclass(frozen=True)
class NormP(Penalty):
    """The penalty phi = ‖·‖_p, p in [1, inf]: the metrics that §4.1 allows besides the Euclidean one.

    >>> NormP(float("inf")).prox(torch.tensor([3.0, 1.0]), rho=1.0)
    tensor([2., 1.])
    """

    p: float  # 1 to infinity, so no plain bounds

    def value(self, v: Tensor) -> Tensor:
        return norm(v, self._exponent())

    def prox(self, v: Tensor, rho: float) -> Tensor:
        p = self._exponent()
        if p == 1:
            return Norm1().prox(v, rho)
        if p == 2:
            return Norm2().prox(v, rho)
        return prox_max_norm(v, rho) if p == float("inf") else prox_p_norm(v, rho, p)

    def center(self, rho: float) -> Aggregator:
        p = self._exponent()
        if p == 1:
            return aggregators.SmoothedCoordinateMedian(rho)
        return aggregators.GeometricMedian(rho) if p == 2 else aggregators.ProximalAggregator(self, rho)

    def _exponent(self) -> float:
        if not self.p >= 1:
            raise SettingError(f"The 'p' of NormP must be >= 1, or infinity. Got {self.p!r}.")
        return self.p


@dataclass(frozen=True)
class Zero(Penalty):
    """The penalty phi = 0: no federation, R(w̃, w_k) = w_k (Corollary 1a); any point is an aggregate, here the mean.

    >>> Zero().prox(torch.tensor([3.0]), rho=1.0)
    tensor([3.])
    """

    separable: ClassVar[bool] = True

    def value(self, v: Tensor) -> Tensor:
        return v.new_zeros(v.shape[:-1])

    def prox(self, v: Tensor, rho: float) -> Tensor:
        return v.clone()

    def center(self, rho: float) -> Aggregator:
        return aggregators.Mean()


@dataclass(frozen=True)
class Indicator(Penalty):
    """The penalty phi = 0 at 0, infinite elsewhere: no personalization, R(w̃, w_k) = w̃ (Corollary 1b).

    >>> Indicator().value(torch.tensor([[0.0, 0.0], [0.0, 1.0]]))
    tensor([0., inf])
    """

    separable: ClassVar[bool] = True

    def value(self, v: Tensor) -> Tensor:
        away = (v != 0).any(dim=-1)
        return torch.where(away, torch.inf, torch.zeros_like(away, dtype=v.dtype))

    def prox(self, v: Tensor, rho: float) -> Tensor:
        return torch.zeros_like(v)

    def center(self, rho: float) -> Aggregator:
        return aggregators.Mean()


@dataclass(frozen=True)
class LayerSum(Penalty):
    """The sum of penalties over layers, phi(w) = Σ_l phi_l(w_[l]), eq. (14); other columns have phi = 0.

    >>> hybrid = LayerSum(((((0, 1),), Indicator()), (((2, 3),), HalfSquare())))
    >>> hybrid.prox(torch.tensor([8.0, 8.0, 8.0]), rho=1.0)
    tensor([0., 8., 4.])
    """

    parts: tuple[tuple[Ranges, Penalty], ...]

    def value(self, v: Tensor) -> Tensor:
        total = v.new_zeros(v.shape[:-1])
        for ranges, penalty in self._split_parts(v.shape[-1]):
            total = total + penalty.value(aggregators.take_columns(v, ranges))
        return total

    def prox(self, v: Tensor, rho: float) -> Tensor:
        result = v.clone()
        for ranges, penalty in self._split_parts(v.shape[-1]):
            aggregators.write_columns(result, ranges, penalty.prox(aggregators.take_columns(v, ranges), rho))
        return result

    def center(self, rho: float) -> Aggregator:
        return aggregators.LayerwiseAggregator(
            tuple((ranges, penalty.center(rho)) for ranges, penalty in self._split_parts())
        )

    def _split_parts(self, d: int | None = None) -> list[tuple[Ranges, Penalty]]:
        """Return ranges with their penalty; a separable one range by range, because one range is a view, not a copy."""
        if d is not None:
            aggregators.uncovered_columns(tuple(pair for ranges, _ in self.parts for pair in ranges), d)
        pieces: list[tuple[Ranges, Penalty]] = []
        for ranges, penalty in self.parts:
            pieces += [((pair,), penalty) for pair in ranges] if penalty.separable else [(ranges, penalty)]
        return pieces


@dataclass(frozen=True)
class ByLayer(Unbound):
    """Penalties by layer names, as shell patterns: the first pattern that matches a name counts.

    All names that a pattern matches are one layer of eq. (14): phi sees their columns together.

    >>> ByLayer({"head.*": Norm1(), "*": HalfSquare()}).parts["head.*"]
    Norm1()
    """

    parts: Mapping[str, Penalty] | tuple[tuple[str, Penalty], ...]

    def bind(self, net: Net) -> LayerSum:
        """Return the sum of the penalties over the layers of this model."""
        layout = net.layout
        unassigned = list(layout.parameter_names)
        bound = []
        for pattern, penalty in self.parts.items() if isinstance(self.parts, Mapping) else self.parts:
            matched = [name for name in unassigned if fnmatchcase(name, pattern)]
            if not matched:
                known = any(fnmatchcase(name, pattern) for name in layout.parameter_names)
                reason = "comes after patterns that match all its layers" if known else "matches no layer"
                raise SettingError(f"The pattern {pattern!r} {reason}. Layers: {', '.join(layout.parameter_names)}.")
            unassigned = [name for name in unassigned if name not in matched]
            bound.append((_merge_ranges([layout.column_range(name) for name in matched]), penalty))
        return LayerSum(tuple(bound))


def _merge_ranges(ranges: list[tuple[int, int]]) -> Ranges:
    """Sort ranges and join neighbors, so that a layer is one view of the stack if possible."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if merged and merged[-1][1] == start:
            start = merged.pop()[0]
        merged.append((start, stop))
    return tuple(merged)
