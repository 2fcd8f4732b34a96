"""The discrete Gaussian of §3.3: P(h|ψ) ∝ N(h|μ, A) on a grid of hyper-parameters, with ψ = {μ, A}.

H. Mostafa (2019), Robust federated learning through representation matching and adaptive hyper-parameters.

ψ is one array of P = D + D(D+1)/2 numbers: the mean μ, then the Cholesky factor L of the precision A = LLᵀ, the
logarithms of its diagonal first and what is below it after them. So A is positive definite whatever the update
(ERRATA 4).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from ...errors import SettingError

Numbers = NDArray[np.float64]

MIN_PRECISION = 1.0  # ours: no precision is below it, at which a draw is from all over the grid
MAX_CONCENTRATION = (
    2.0  # ours: nor is a deviation below the grid's spacing divided by it, or nothing would be tried any more
)


def invalid_grid_error(name: str, given: object) -> SettingError:
    """The error for what cannot be a grid."""
    return SettingError(
        f"The grid {name!r} of AdaptiveHyper must be two or more rising numbers > 0, or None to leave the solver's own "
        f"{name} alone. Got {given!r}."
    )


@dataclass(frozen=True)
class GridAxis:
    """The values that one hyper-parameter may take, and where they stand on an axis from -0.5 to 0.5.

    Mid-range is 0, not the mean, which cannot be 0 as well where values lie unevenly (ERRATA 3).

    >>> Axis("lr", (0.001, 0.01, 0.1), log=True).places
    array([-0.5,  0. ,  0.5])
    """

    name: str
    values: tuple[float, ...]
    log: bool = False

    def __post_init__(self) -> None:
        wrong = [value for value in self.values if not (math.isfinite(value) and value > 0)]
        if wrong or len(self.values) < 2 or not (np.diff(self._scaled(np.array(self.values, dtype=float))) > 0).all():
            raise invalid_grid_error(self.name, self.values)

    @property
    def positions(self) -> Numbers:
        """Where the values stand."""
        scaled = self._scaled(np.array(self.values, dtype=float))
        low, high = self._bounds
        positions: Numbers = (scaled - (low + high) / 2) / (high - low)
        return positions

    def value_at(self, position: float) -> float:
        """The value at any place, between those of the grid too."""
        low, high = self._bounds
        found = (low + high) / 2 + position * (high - low)
        return math.exp(found) if self.log else found

    @property
    def _bounds(self) -> tuple[float, float]:
        low, high = self._scaled(np.array([self.values[0], self.values[-1]], dtype=float)).tolist()
        return low, high

    def _scaled(self, values: Numbers) -> Numbers:
        return np.log(values) if self.log else values


def grid_points(axes: Sequence[GridAxis]) -> Numbers:
    """H: every combination of the axes' places, ``[points, D]``; the last axis counts fastest."""
    found: Numbers = np.stack(np.meshgrid(*(axis.positions for axis in axes), indexing="ij"), axis=-1)
    return found.reshape(-1, len(axes))


def grid_spacing(axes: Sequence[GridAxis]) -> Numbers:
    """How far neighbours stand from one another, ``[D]``."""
    return np.array([1 / (len(axis.values) - 1) for axis in axes])


def initial_psi(size: int, precision: float) -> Numbers:
    """ψ_1: the middle of the grid, with the same precision on every axis.

    >>> factor_of(initial(2, 4.0), 2)
    array([[2., 0.],
           [0., 2.]])
    """
    return np.concatenate([np.zeros(size), np.full(size, math.log(precision) / 2), np.zeros(size * (size - 1) // 2)])


@cache
def _below_diagonal(size: int) -> tuple[NDArray[np.int64], ...]:
    """Where the numbers below a diagonal stand."""
    return np.tril_indices(size, -1)


def cholesky_factor(psi: Numbers, size: int) -> Numbers:
    """L of A = LLᵀ, ``[D, D]``."""
    factor = np.diag(np.exp(psi[size : 2 * size]))
    factor[_below_diagonal(size)] = psi[2 * size :]
    return factor


def log_probabilities(psi: Numbers, points: Numbers) -> Numbers:
    """log P(h|ψ) of every point of the grid, ``[points]``: §3.3."""
    size = points.shape[1]
    exponents = -0.5 * (((points - psi[:size]) @ cholesky_factor(psi, size)) ** 2).sum(axis=1)
    highest = exponents.max()
    found: Numbers = exponents - highest - math.log(np.exp(exponents - highest).sum())
    return found


def score(psi: Numbers, points: Numbers, drawn: int) -> Numbers:
    """∇_ψ log P(h|ψ) of eq. (4)-(5) at one point of the grid, in closed form, ``[P]``.

    With d = h - μ it is A(d - E d) for μ, and -(ddᵀ - E ddᵀ)L for L: the normalising sum over the grid brings in the
    expectations, which a continuous Gaussian would have as 0 and A⁻¹.
    """
    size = points.shape[1]
    factor = cholesky_factor(psi, size)
    offsets = points - psi[:size]
    weights = np.exp(log_probabilities(psi, points))
    off_mean = offsets[drawn] - weights @ offsets
    off_square = np.outer(offsets[drawn], offsets[drawn]) - offsets.T @ (weights[:, None] * offsets)
    for_factor = -off_square @ factor
    diagonal = np.diag(for_factor) * np.diag(factor)  # of its logarithm
    return np.concatenate([factor @ factor.T @ off_mean, diagonal, for_factor[_below_diagonal(size)]])


def draw_point(psi: Numbers, points: Numbers, rng: np.random.Generator) -> int:
    """The number of a point that is drawn from P(·|ψ)."""
    weights = np.exp(log_probabilities(psi, points))
    return int(rng.choice(len(points), p=weights / weights.sum()))


def clip_psi(psi: Numbers, spacing: Numbers) -> Numbers:
    """ψ with its mean on the grid, as the paper has it, and a precision that still tries neighbours (ours)."""
    size = len(spacing)
    max_factor = MAX_CONCENTRATION / spacing
    logs = np.clip(psi[size : 2 * size], math.log(MIN_PRECISION) / 2, np.log(max_factor))
    return np.concatenate(
        [np.clip(psi[:size], -0.5, 0.5), logs, np.clip(psi[2 * size :], -max_factor.max(), max_factor.max())]
    )


def scale_precision(psi: Numbers, size: int, multiplier: float) -> Numbers:
    """ψ with its precision so many times as large."""
    logs = psi[size : 2 * size] + math.log(multiplier) / 2
    return np.concatenate([psi[:size], logs, psi[2 * size :] * math.sqrt(multiplier)])
