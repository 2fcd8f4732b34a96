"""The smoothed geometric median: argmin of the mean of Phi_rho(x_k - z), phi the l2 norm (Fed+ v2, eq. 4 and 5).

Weiszfeld's weights a_k / max(rho, |x_k - z|) have the same minimiser as eq. (34), which needs thousands of passes.
Three things make it quick and sure: where the stack is small in one direction, an isometric copy of the rows in
few dimensions is solved by Newton steps first; a row that is itself the answer is recognised, not crawled to; and
the answer is judged where it is returned, in float64, rounded to the dtype of the models.

So it takes four passes: one for the Gram matrix, one for the answer as a mixture of rows, two to judge it.

Pillutla, Kakade, Harchaoui: Robust Aggregation for Federated Learning (2019) names the method RFA.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from . import order_statistics
from .order_statistics import centered_blocks, weighted_sum

MAX_DIRECT_COLUMNS = 64
"""With at most this many columns the rows themselves are the few-dimensional copy."""

MAX_GRAM_ROWS = 256
"""With at most this many rows their Gram matrix gives one. Measured for K = 16 to 256 at d = 1e5 and 1e6 with one and
two threads: on easy stacks (3-5 Weiszfeld iterations) the Gram matrix takes 0.5 to 2 times as long as the passes, 2 at
K = 256; where models spread or 30 % are outliers (7-16 iterations) it takes 0.2 to 0.7 times as long at every K."""

_MAX_NEWTON_STEPS = 300
_SAMPLE_COLUMNS = 256  # columns, at least, that tell which row is in the middle

FloatArray: TypeAlias = NDArray[np.float64]
"""What has no dimension of size d: numpy needs a microsecond for an operation on it, torch four."""


@dataclass(frozen=True)
class PointEvaluation:
    """What one look at the stack from the point z tells."""

    z: Tensor  # [d], in the dtype of the models
    distances: FloatArray  # [K]
    weiszfeld_point: Tensor  # [d], in the same or in float64: where Weiszfeld's step leads
    gap: float
    step_length: float
    is_minimizer: bool  # the minimiser is within nu of z, which is a row
    resolution: float


@dataclass(frozen=True)
class WeightedStack:
    """The models as they are read, their shares, and the dtype that answers are rounded to."""

    rows: Tensor  # [K, d]
    shares: FloatArray  # [K]
    rho: float
    dtype: torch.dtype

    def round_to_dtype(self, z: Tensor) -> tuple[Tensor, float, float]:
        """z in the dtype of the models, what its last bits amount to, and rho or that where it is coarser."""
        z = z.to(self.dtype)
        rounding = 2 * torch.finfo(self.dtype).eps * float(torch.linalg.vector_norm(z, dtype=torch.float64))
        return z, rounding, max(self.rho, rounding)

    def mixture(self, coefficients: FloatArray) -> Tensor:
        """Of the rows, in the dtype of the models."""
        return weighted_sum(self.rows, torch.from_numpy(coefficients).to(self.rows.device), dtype=self.dtype)

    def weighted_residual(self, coefficients: FloatArray, z: Tensor) -> Tensor:
        """Where the rows pull to from z, in float64."""
        return weighted_sum(self.rows, torch.from_numpy(coefficients).to(self.rows.device), z)


def geometric_median(
    models: Tensor, shares: Tensor, rho: float, tolerance: float, max_iterations: int
) -> tuple[Tensor, float, int]:
    """The smoothed geometric median, its gap, and how many times the stack was gone through.

    >>> corners = torch.tensor([[0.0, 0.0], [4.0, 0.0], [0.0, 4.0], [4.0, 4.0]])
    >>> geometric_median(corners, torch.full((4,), 0.25).double(), 1e-6, 1e-9, 100)[0].tolist()
    [2.0, 2.0]
    """
    use_reduced_solve = min(models.shape[1] - MAX_DIRECT_COLUMNS, models.shape[0] - MAX_GRAM_ROWS) <= 0
    is_small = models.numel() <= order_statistics.BLOCK
    if is_small:  # the mean is cheap to try first: it is the answer wherever no model is farther than rho
        mean = weighted_sum(models, shares).to(models.dtype)
        farthest = float(torch.linalg.vector_norm(models - mean, dim=1).max())
        if farthest <= (1 - 1e-4) * rho:  # beyond what rounding makes of a distance
            return mean, 0.0, 1
    # A small stack is widened once, not in every pass.
    stack = WeightedStack(models.double() if is_small else models, shares.cpu().numpy(), rho, dtype=models.dtype)
    current = evaluate_point(
        stack,
        _reduced_solve(stack, _medoid_row(stack))
        if use_reduced_solve and not is_small
        else stack.mixture(stack.shares),
    )
    gram_precision = 16 * torch.finfo(stack.rows.dtype).eps  # no Gram matrix of this dtype leads much below such a gap
    tried_rows = set[int]()
    is_slow = False  # rows that were looked at as the answer; steps that did not halve the gap
    for iteration in range(1, max_iterations + 1):
        if current.gap <= tolerance or current.step_length <= current.resolution:
            return current.z, current.gap, iteration
        if use_reduced_solve and (current.gap > gram_precision or is_slow):
            candidate = evaluate_point(stack, _reduced_solve(stack, current.z))
            use_reduced_solve = candidate.gap < current.gap / 2
            current = candidate if candidate.gap < current.gap else current
            continue
        row = _nearest_row(current.distances, stack.shares)
        if not use_reduced_solve and row not in tried_rows and current.distances[row] < 0.1 * current.distances.mean():
            tried_rows.add(row)
            candidate = evaluate_point(stack, models[row])
            current = candidate if candidate.is_minimizer else current
        candidate = evaluate_point(stack, current.weiszfeld_point)
        current, is_slow = candidate, candidate.gap > current.gap / 2
    return current.z, current.gap, max_iterations


def evaluate_point(stack: WeightedStack, z: Tensor) -> PointEvaluation:
    """Distances, Weiszfeld's step and the gap at z, in two passes of float64 arithmetic over the columns.

    The gap is the norm of the smallest gradient that z may have within its own rounding. Only a row nearer than
    rho can make a difference there: as rho -> 0 this is the smallest subgradient at a data point.
    """
    z, rounding, nu = stack.round_to_dtype(z)
    squares = torch.zeros(len(stack.shares), dtype=torch.float64, device=z.device)
    offsets = stack.rows[:, :0]
    for _, offsets in centered_blocks(stack.rows, z, torch.float64):
        squares += torch.linalg.vector_norm(offsets, dim=1).square_()
    distances = np.sqrt(squares.cpu().numpy())
    near_share = float(stack.shares[distances <= nu].sum())
    coefficients = stack.shares / np.maximum(distances, nu)
    all_offsets = offsets if offsets.shape == stack.rows.shape else None
    residual = (
        stack.weighted_residual(coefficients, z)
        if all_offsets is None
        else torch.from_numpy(coefficients).to(z.device) @ all_offsets
    )
    gradient_norm = float(torch.linalg.vector_norm(residual))
    total_weight = float(coefficients.sum())
    return PointEvaluation(
        z=z,
        distances=distances,
        weiszfeld_point=_weiszfeld_step(residual, total_weight, z),
        gap=max(0.0, gradient_norm - near_share * rounding / nu),
        step_length=gradient_norm / total_weight,
        is_minimizer=gradient_norm <= near_share,
        resolution=rounding / 4,
    )


def _weiszfeld_step(residual: Tensor, total_weight: float, z: Tensor) -> Tensor:
    """z + downhill / strength; where they are large in the dtype of z, and some at a time: to add z torch widens it."""
    if len(z) <= order_statistics.BLOCK:
        return residual.div_(total_weight).add_(z)
    result = torch.empty_like(z)
    for target, part, start in zip(
        *(torch.split(v, order_statistics.BLOCK) for v in (result, residual, z)), strict=True
    ):
        target.copy_(part.div_(total_weight).add_(start))
    return result


def _medoid_row(stack: WeightedStack) -> Tensor:
    """The row with the least mean distance to the others, by a sample of columns: no minority leads it away."""
    sample = stack.rows[:, :: max(1, stack.rows.shape[1] // _SAMPLE_COLUMNS)].double()
    distances = torch.cdist(sample, sample, compute_mode="donot_use_mm_for_euclid_dist")
    return stack.rows[int(np.argmin(distances.cpu().numpy() @ stack.shares))]


def _reduced_solve(stack: WeightedStack, origin: Tensor) -> Tensor:
    """The minimiser as found in a few-dimensional copy of the rows about the origin, brought back as their mixture."""
    origin, _, nu = stack.round_to_dtype(origin)
    if stack.rows.shape[1] <= MAX_DIRECT_COLUMNS:
        rows = (stack.rows.double() - origin).cpu().numpy()
    else:
        rows = _isometric_rows(stack, origin)
    best = _newton(rows, stack.shares, nu)
    coefficients = stack.shares / np.maximum(_row_norms(rows - best), nu)
    return stack.mixture(coefficients / coefficients.sum())


def _isometric_rows(stack: WeightedStack, origin: Tensor) -> FloatArray:
    """K points in K dimensions that lie to one another, and to 0, as the rows lie to one another and to the origin."""
    gram = _gram(stack.rows, origin, stack.rows.dtype)
    if not np.isfinite(gram).all():
        gram = _gram(stack.rows, origin, torch.float64)
    # Rows are scaled to length 1 before the factorisation, so that a far outlier does not drown the near rows.
    lengths = np.sqrt(gram.diagonal())
    units = np.divide(1.0, lengths, out=np.zeros_like(lengths), where=lengths > 0)
    # By torch: numpy takes 7 times as long for K = 100.
    values, vectors = torch.linalg.eigh(torch.from_numpy(gram * units[:, None] * units))
    rows: FloatArray = lengths[:, None] * (vectors * values.clamp(min=0).sqrt()).numpy()
    return rows


def _gram(models: Tensor, origin: Tensor, dtype: torch.dtype) -> FloatArray:
    """The inner products of the centred rows: a block in the given dtype, the sum of the blocks in float64."""
    gram = torch.zeros(len(models), len(models), dtype=torch.float64, device=models.device)
    for _, offsets in centered_blocks(models, origin, dtype):
        gram += offsets @ offsets.T
    return gram.cpu().numpy()


def _newton(rows: FloatArray, shares: FloatArray, nu: float) -> FloatArray:
    """Newton's method on the smoothed objective; a step that does not serve gives way to Weiszfeld's.

    A Newton step must halve the least slope so far, and Weiszfeld's never climbs: whichever of them occurs without
    end leads to the minimiser.
    """
    # From the mean: where the minimisers are a segment, the answer is then the same for every order of the rows.
    current = MedianGradient(rows, shares, nu, p=shares @ rows)
    tried_rows = set[int]()
    smallest_gradient = current.gradient_norm
    for _ in range(_MAX_NEWTON_STEPS):
        if current.gradient_norm <= 1e-14 + 4e-16 * current.total_weight * math.sqrt(
            current.p @ current.p
        ):  # a last bit of p makes as much
            break
        row = _nearest_row(current.distances, shares)
        if row not in tried_rows:
            tried_rows.add(row)
            candidate = MedianGradient(rows, shares, nu, p=rows[row])
            if (
                candidate.gradient_norm <= shares[candidate.distances <= nu].sum()
            ):  # the minimiser is within nu of this row
                current = candidate
                smallest_gradient = min(smallest_gradient, candidate.gradient_norm)
                continue
        candidate = MedianGradient(rows, shares, nu, p=current.p - current.newton_step())
        if not candidate.gradient_norm <= smallest_gradient / 2:
            candidate = MedianGradient(rows, shares, nu, p=current.p - current.gradient / current.total_weight)
        if candidate.gradient_norm >= current.gradient_norm and current.gradient_norm < 1e-11:
            break  # rounding has the last word
        current = candidate
        smallest_gradient = min(smallest_gradient, candidate.gradient_norm)
    return current.p


class MedianGradient:
    """The gradient of mean Phi_nu(rows - p) in p, and what it is made of."""

    def __init__(self, rows: FloatArray, shares: FloatArray, nu: float, p: FloatArray) -> None:
        self.p = p
        self.nu = nu
        self.offsets = p - rows
        self.distances = _row_norms(self.offsets)
        self.coefficients = shares / np.maximum(self.distances, nu)
        self.total_weight = float(self.coefficients.sum())
        self.gradient = self.coefficients @ self.offsets
        self.gradient_norm = math.sqrt(self.gradient @ self.gradient)

    def newton_step(self) -> FloatArray:
        curvature = np.where(
            self.distances > self.nu, self.coefficients / np.maximum(self.distances, self.nu) ** 2, 0.0
        )
        hessian = (self.offsets * -curvature[:, None]).T @ self.offsets
        hessian.flat[:: len(hessian) + 1] += self.total_weight * (
            1 + 1e-12
        )  # flat directions have a long step, not none
        return np.asarray(np.linalg.solve(hessian, self.gradient), np.float64)


def _row_norms(rows: FloatArray) -> FloatArray:
    lengths: FloatArray = np.sqrt(np.einsum("kd,kd->k", rows, rows))
    return lengths


def _nearest_row(distances: FloatArray, shares: FloatArray) -> int:
    return int(np.where(shares > 0, distances, np.inf).argmin())
