"""The smoothed geometric median: argmin of the mean of Phi_rho(x_k - z), phi the l2 norm (Fed+ v2, eq. 4 and 5).

Weiszfeld's weights a_k / max(rho, |x_k - z|) have the same minimizer as eq. (34), which needs thousands of passes.
Three measures make it fast and accurate. If the stack has few rows or few columns, Newton's method first solves an
isometric copy of the rows in few dimensions. A row that is itself the minimizer is detected directly. And the result is
checked in float64 after it is rounded to the dtype of the models.

So it takes four passes: one for the Gram matrix, one for the result as a mixture of rows, two to check it.

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
"""With at most this many columns the rows themselves serve as the few-dimensional copy."""

MAX_GRAM_ROWS = 256
"""With at most this many rows their Gram matrix gives the copy.

Measured for K = 16 to 256 at d = 1e5 and 1e6 with one and two threads. On easy stacks (3-5 Weiszfeld iterations) the
Gram matrix takes 0.5 to 2 times as long as the passes (2 at K = 256). Where models spread or 30 % are outliers (7-16
iterations) it takes 0.2 to 0.7 times as long at every K.
"""

_MAX_NEWTON_STEPS = 300
_SAMPLE_COLUMNS = 256  # the least number of columns by which the medoid row is found

FloatArray: TypeAlias = NDArray[np.float64]
"""Arrays without a dimension of size d: numpy takes a microsecond per operation on them, torch four."""


@dataclass(frozen=True)
class PointEvaluation:
    """The models' distances from a point z, its optimality gap, and the Weiszfeld step from there."""

    z: Tensor  # [d], in the dtype of the models
    distances: FloatArray  # [K]
    weiszfeld_point: Tensor  # [d], in the same dtype or in float64: the result of Weiszfeld's step
    gap: float
    step_length: float
    is_minimizer: bool  # the minimizer is within nu of z, which is a row
    resolution: float


@dataclass(frozen=True)
class WeightedStack:
    """The models, their shares, and the dtype of results."""

    rows: Tensor  # [K, d]
    shares: FloatArray  # [K]
    rho: float
    dtype: torch.dtype

    def round_to_dtype(self, z: Tensor) -> tuple[Tensor, float, float]:
        """Return z in the dtype of the models, its rounding error, and rho or that error if it is larger."""
        z = z.to(self.dtype)
        rounding = 2 * torch.finfo(self.dtype).eps * float(torch.linalg.vector_norm(z, dtype=torch.float64))
        return z, rounding, max(self.rho, rounding)

    def mixture(self, coefficients: FloatArray) -> Tensor:
        """Return a weighted sum of the rows, in the dtype of the models."""
        return weighted_sum(self.rows, torch.from_numpy(coefficients).to(self.rows.device), dtype=self.dtype)

    def weighted_residual(self, coefficients: FloatArray, z: Tensor) -> Tensor:
        """Return the weighted sum of the offsets of the rows from z, in float64."""
        return weighted_sum(self.rows, torch.from_numpy(coefficients).to(self.rows.device), z)


def geometric_median(
    models: Tensor, shares: Tensor, rho: float, tolerance: float, max_iterations: int
) -> tuple[Tensor, float, int]:
    """Return the smoothed geometric median, its gap, and the number of passes over the stack.

    >>> corners = torch.tensor([[0.0, 0.0], [4.0, 0.0], [0.0, 4.0], [4.0, 4.0]])
    >>> geometric_median(corners, torch.full((4,), 0.25).double(), 1e-6, 1e-9, 100)[0].tolist()
    [2.0, 2.0]
    """
    use_reduced_solve = min(models.shape[1] - MAX_DIRECT_COLUMNS, models.shape[0] - MAX_GRAM_ROWS) <= 0
    is_small = models.numel() <= order_statistics.BLOCK
    if is_small:  # the mean is cheap to try first: it is the minimizer if no model is farther than rho
        mean = weighted_sum(models, shares).to(models.dtype)
        farthest = float(torch.linalg.vector_norm(models - mean, dim=1).max())
        if farthest <= (1 - 1e-4) * rho:  # the margin covers the rounding of a distance
            return mean, 0.0, 1
    # A small stack is widened once, not in every pass.
    stack = WeightedStack(models.double() if is_small else models, shares.cpu().numpy(), rho, dtype=models.dtype)
    if use_reduced_solve and not is_small:
        current = evaluate_point(stack, _reduced_solve(stack, _medoid_row(stack)))
    else:
        current = evaluate_point(stack, stack.mixture(stack.shares))
    gram_precision = 16 * torch.finfo(stack.rows.dtype).eps  # a Gram matrix of this dtype reaches no smaller gap
    tried_rows = set[int]()  # rows that were checked as the minimizer
    is_slow = False  # whether the last step did not halve the gap
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
    """Compute distances, Weiszfeld's step and the gap at z, in two float64 passes over the columns.

    The gap is the norm of the smallest gradient that z may have within its own rounding. Only a row nearer than
    rho matters there: as rho -> 0 this is the smallest subgradient at a data point.
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
    """Return z + residual / total_weight; long vectors by blocks in the dtype of z, to avoid a float64 copy of z."""
    if len(z) <= order_statistics.BLOCK:
        return residual.div_(total_weight).add_(z)
    result = torch.empty_like(z)
    for target, part, start in zip(
        *(torch.split(v, order_statistics.BLOCK) for v in (result, residual, z)), strict=True
    ):
        target.copy_(part.div_(total_weight).add_(start))
    return result


def _medoid_row(stack: WeightedStack) -> Tensor:
    """Return the row with the least mean distance to the others, by a sample of columns; it resists outliers."""
    sample = stack.rows[:, :: max(1, stack.rows.shape[1] // _SAMPLE_COLUMNS)].double()
    distances = torch.cdist(sample, sample, compute_mode="donot_use_mm_for_euclid_dist")
    return stack.rows[int(np.argmin(distances.cpu().numpy() @ stack.shares))]


def _reduced_solve(stack: WeightedStack, origin: Tensor) -> Tensor:
    """Solve a few-dimensional copy of the rows about the origin, and return the result as a mixture of rows."""
    origin, _, nu = stack.round_to_dtype(origin)
    if stack.rows.shape[1] <= MAX_DIRECT_COLUMNS:
        rows = (stack.rows.double() - origin).cpu().numpy()
    else:
        rows = _isometric_rows(stack, origin)
    best = _newton(rows, stack.shares, nu)
    coefficients = stack.shares / np.maximum(_row_norms(rows - best), nu)
    return stack.mixture(coefficients / coefficients.sum())


def _isometric_rows(stack: WeightedStack, origin: Tensor) -> FloatArray:
    """Return K points in K dimensions with the same distances to one another and to 0 as the rows to the origin."""
    gram = _gram(stack.rows, origin, stack.rows.dtype)
    if not np.isfinite(gram).all():
        gram = _gram(stack.rows, origin, torch.float64)
    # Rows are scaled to length 1 before the factorization, so that a far outlier does not swamp the near rows.
    lengths = np.sqrt(gram.diagonal())
    units = np.divide(1.0, lengths, out=np.zeros_like(lengths), where=lengths > 0)
    # By torch: numpy takes 7 times as long for K = 100.
    values, vectors = torch.linalg.eigh(torch.from_numpy(gram * units[:, None] * units))
    rows: FloatArray = lengths[:, None] * (vectors * values.clamp(min=0).sqrt()).numpy()
    return rows


def _gram(models: Tensor, origin: Tensor, dtype: torch.dtype) -> FloatArray:
    """Return the inner products of the centered rows: blocks in the given dtype, their sum in float64."""
    gram = torch.zeros(len(models), len(models), dtype=torch.float64, device=models.device)
    for _, offsets in centered_blocks(models, origin, dtype):
        gram += offsets @ offsets.T
    return gram.cpu().numpy()


def _newton(rows: FloatArray, shares: FloatArray, nu: float) -> FloatArray:
    """Minimize the smoothed objective by Newton's method, with Weiszfeld's step as the fallback.

    A Newton step must halve the least slope so far, and Weiszfeld's step never increases the objective. So either
    sequence leads to the minimizer.
    """
    # From the mean: if the minimizers form a segment, the result does not depend on the order of the rows.
    current = MedianGradient(rows, shares, nu, p=shares @ rows)
    tried_rows = set[int]()
    smallest_gradient = current.gradient_norm
    for _ in range(_MAX_NEWTON_STEPS):
        # One last bit of p changes the gradient by as much.
        rounding_slope = 4e-16 * current.total_weight * math.sqrt(current.p @ current.p)
        if current.gradient_norm <= 1e-14 + rounding_slope:
            break
        row = _nearest_row(current.distances, shares)
        if row not in tried_rows:
            tried_rows.add(row)
            candidate = MedianGradient(rows, shares, nu, p=rows[row])
            near_share = shares[candidate.distances <= nu].sum()
            if candidate.gradient_norm <= near_share:  # the minimizer is within nu of this row
                current = candidate
                smallest_gradient = min(smallest_gradient, candidate.gradient_norm)
                continue
        candidate = MedianGradient(rows, shares, nu, p=current.p - current.newton_step())
        if not candidate.gradient_norm <= smallest_gradient / 2:
            candidate = MedianGradient(rows, shares, nu, p=current.p - current.gradient / current.total_weight)
        if candidate.gradient_norm >= current.gradient_norm and current.gradient_norm < 1e-11:
            break  # the limit of rounding
        current = candidate
        smallest_gradient = min(smallest_gradient, candidate.gradient_norm)
    return current.p


class MedianGradient:
    """The gradient of mean Phi_nu(rows - p) in p, and its parts."""

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
        damped_weight = self.total_weight * (1 + 1e-12)  # keeps the Hessian invertible in flat directions
        hessian.flat[:: len(hessian) + 1] += damped_weight
        return np.asarray(np.linalg.solve(hessian, self.gradient), np.float64)


def _row_norms(rows: FloatArray) -> FloatArray:
    lengths: FloatArray = np.sqrt(np.einsum("kd,kd->k", rows, rows))
    return lengths


def _nearest_row(distances: FloatArray, shares: FloatArray) -> int:
    return int(np.where(shares > 0, distances, np.inf).argmin())
