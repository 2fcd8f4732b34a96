"""The discrete Gaussian of §3.3: P(h|ψ) ∝ N(h|μ, A) on a grid of hyper-parameters, with ψ = {μ, A}.

H. Mostafa (2019), Robust federated learning through representation matching and adaptive hyper-parameters.

ψ is one array of P = D + D(D+1)/2 numbers: the mean μ, then the Cholesky factor L of the precision A = LLᵀ, first the
logarithms of its diagonal, then the entries below it. So A is positive definite after any update (ERRATA 4).
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

MIN_PRECISION = 1.0  # ours: the lowest precision, at which draws come from the whole grid
# Ours: a deviation is at least the grid's spacing divided by this, so that neighbors are still tried.
MAX_CONCENTRATION = 2.0


def invalid_grid_error(name: str, given: object) -> SettingError:
    """Return the error for values that are not a grid."""
    return SettingError(
        f"The grid {name!r} of AdaptiveHyper must be two or more rising numbers > 0, or None to leave the solver's own "
        f"{name} alone. Got {given!r}."
    )


@dataclass(frozen=True)
class GridAxis:
    """The grid of one hyper-parameter, and the positions of its values on an axis from -0.5 to 0.5.

    Mid-range is 0, not the mean, which cannot be 0 as well if values are unevenly spaced (ERRATA 3).

    >>> GridAxis("lr", (0.001, 0.01, 0.1), log=True).positions
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
        """The positions of the values, from -0.5 to 0.5."""
        scaled = self._scaled(np.array(self.values, dtype=float))
        low, high = self._bounds
        positions: Numbers = (scaled - (low + high) / 2) / (high - low)
        return positions

    def value_at(self, position: float) -> float:
        """Return the value at any position, also between grid points."""
        low, high = self._bounds
        scaled = (low + high) / 2 + position * (high - low)
        return math.exp(scaled) if self.log else scaled

    @property
    def _bounds(self) -> tuple[float, float]:
        low, high = self._scaled(np.array([self.values[0], self.values[-1]], dtype=float)).tolist()
        return low, high

    def _scaled(self, values: Numbers) -> Numbers:
        return np.log(values) if self.log else values


def grid_points(axes: Sequence[GridAxis]) -> Numbers:
    """Return H: every combination of the axes' positions, ``[points, D]``; the last axis varies fastest."""
    grid: Numbers = np.stack(np.meshgrid(*(axis.positions for axis in axes), indexing="ij"), axis=-1)
    return grid.reshape(-1, len(axes))


def grid_spacing(axes: Sequence[GridAxis]) -> Numbers:
    """Return the distance between neighbors on each axis, ``[D]``."""
    return np.array([1 / (len(axis.values) - 1) for axis in axes])


def initial_psi(size: int, precision: float) -> Numbers:
    """Return ψ_1: the middle of the grid, with the same precision on every axis.

    >>> cholesky_factor(initial_psi(2, 4.0), 2)
    array([[2., 0.],
           [0., 2.]])
    """
    return np.concatenate([np.zeros(size), np.full(size, math.log(precision) / 2), np.zeros(size * (size - 1) // 2)])


@cache
def _below_diagonal(size: int) -> tuple[NDArray[np.int64], ...]:
    return np.tril_indices(size, -1)


def cholesky_factor(psi: Numbers, size: int) -> Numbers:
    """Return L of A = LLᵀ, ``[D, D]``."""
    factor = np.diag(np.exp(psi[size : 2 * size]))
    factor[_below_diagonal(size)] = psi[2 * size :]
    return factor


def log_probabilities(psi: Numbers, points: Numbers) -> Numbers:
    """Return log P(h|ψ) of every grid point, ``[points]``: §3.3."""
    size = points.shape[1]
    exponents = -0.5 * (((points - psi[:size]) @ cholesky_factor(psi, size)) ** 2).sum(axis=1)
    highest = exponents.max()
    logs: Numbers = exponents - highest - math.log(np.exp(exponents - highest).sum())
    return logs


def score(psi: Numbers, points: Numbers, drawn: int) -> Numbers:
    """Return ∇_ψ log P(h|ψ) of eq. (4)-(5) at one grid point, in closed form, ``[P]``.

    With d = h - μ it is A(d - E d) for μ, and -(ddᵀ - E ddᵀ)L for L. The expectations come from the normalizing sum
    over the grid; for a continuous Gaussian they are 0 and A⁻¹.
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
    """Return the index of a point drawn from P(·|ψ)."""
    weights = np.exp(log_probabilities(psi, points))
    return int(rng.choice(len(points), p=weights / weights.sum()))


def clip_psi(psi: Numbers, spacing: Numbers) -> Numbers:
    """Return ψ with its mean clipped to the grid, as in the paper, and its precision clipped (ours)."""
    size = len(spacing)
    max_factor = MAX_CONCENTRATION / spacing
    logs = np.clip(psi[size : 2 * size], math.log(MIN_PRECISION) / 2, np.log(max_factor))
    return np.concatenate(
        [np.clip(psi[:size], -0.5, 0.5), logs, np.clip(psi[2 * size :], -max_factor.max(), max_factor.max())]
    )


def scale_precision(psi: Numbers, size: int, multiplier: float) -> Numbers:
    """Return ψ with its precision multiplied."""
    logs = psi[size : 2 * size] + math.log(multiplier) / 2
    return np.concatenate([psi[:size], logs, psi[2 * size :] * math.sqrt(multiplier)])
