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
from .order_statistics import centred_blocks, weighted_sum

FEW_COLUMNS = 64
"""With at most this many columns the rows themselves are the few-dimensional copy."""

FEW_ROWS = 256
"""With at most this many rows their Gram matrix gives one. Measured for K = 16 to 256 at d = 1e5 and 1e6 with one and
two threads: on easy stacks (3-5 Weiszfeld iterations) the Gram matrix takes 0.5 to 2 times as long as the passes, 2 at
K = 256; where models spread or 30 % are outliers (7-16 iterations) it takes 0.2 to 0.7 times as long at every K."""

_NEWTON_STEPS = 300
_SAMPLE = 256  # columns, at least, that tell which row is in the middle

Numbers: TypeAlias = NDArray[np.float64]
"""What has no dimension of size d: numpy needs a microsecond for an operation on it, torch four."""


@dataclass(frozen=True)
class View:
    """What one look at the stack from the point z tells."""

    z: Tensor  # [d], in the dtype of the models
    distances: Numbers  # [K]
    following: Tensor  # [d], in the same or in float64: where Weiszfeld's step leads
    gap: float
    step: float
    settled: bool  # the minimiser is within nu of z, which is a row
    resolution: float


@dataclass(frozen=True)
class Stack:
    """The models as they are read, their shares, and the dtype that answers are rounded to."""

    rows: Tensor  # [K, d]
    shares: Numbers  # [K]
    rho: float
    dtype: torch.dtype

    def rounded(self, z: Tensor) -> tuple[Tensor, float, float]:
        """z in the dtype of the models, what its last bits amount to, and rho or that where it is coarser."""
        z = z.to(self.dtype)
        rounding = 2 * torch.finfo(self.dtype).eps * float(torch.linalg.vector_norm(z, dtype=torch.float64))
        return z, rounding, max(self.rho, rounding)

    def mixture(self, coefficients: Numbers) -> Tensor:
        """Of the rows, in the dtype of the models."""
        return weighted_sum(self.rows, torch.from_numpy(coefficients).to(self.rows.device), dtype=self.dtype)

    def pulled(self, pulls: Numbers, z: Tensor) -> Tensor:
        """Where the rows pull to from z, in float64."""
        return weighted_sum(self.rows, torch.from_numpy(pulls).to(self.rows.device), z)


def geometric_median(
    models: Tensor, shares: Tensor, rho: float, tolerance: float, most_iterations: int
) -> tuple[Tensor, float, int]:
    """The smoothed geometric median, its gap, and how many times the stack was gone through.

    >>> corners = torch.tensor([[0.0, 0.0], [4.0, 0.0], [0.0, 4.0], [4.0, 4.0]])
    >>> geometric_median(corners, torch.full((4,), 0.25).double(), 1e-6, 1e-9, 100)[0].tolist()
    [2.0, 2.0]
    """
    leaping = min(models.shape[1] - FEW_COLUMNS, models.shape[0] - FEW_ROWS) <= 0
    small = models.numel() <= order_statistics.BLOCK
    if small:  # the mean is cheap to try first: it is the answer wherever no model is farther than rho
        mean = weighted_sum(models, shares).to(models.dtype)
        farthest = float(torch.linalg.vector_norm(models - mean, dim=1).max())
        if farthest <= (1 - 1e-4) * rho:  # beyond what rounding makes of a distance
            return mean, 0.0, 1
    # A small stack is widened once, not in every pass.
    stack = Stack(models.double() if small else models, shares.cpu().numpy(), rho, models.dtype)
    here = look(stack, _leap(stack, _middle_row(stack)) if leaping and not small else stack.mixture(stack.shares))
    fine = 16 * torch.finfo(stack.rows.dtype).eps  # no Gram matrix of this dtype leads much below such a gap
    tried, crawling = set[int](), False  # rows that were looked at as the answer; steps that did not halve the gap
    for iteration in range(1, most_iterations + 1):
        if here.gap <= tolerance or here.step <= here.resolution:
            return here.z, here.gap, iteration
        if leaping and (here.gap > fine or crawling):
            there = look(stack, _leap(stack, here.z))
            leaping = there.gap < here.gap / 2
            here = there if there.gap < here.gap else here
            continue
        row = _nearest(here.distances, stack.shares)
        if not leaping and row not in tried and here.distances[row] < 0.1 * here.distances.mean():
            tried.add(row)
            there = look(stack, models[row])
            here = there if there.settled else here
        there = look(stack, here.following)
        here, crawling = there, there.gap > here.gap / 2
    return here.z, here.gap, most_iterations


def look(stack: Stack, z: Tensor) -> View:
    """Distances, Weiszfeld's step and the gap at z, in two passes of float64 arithmetic over the columns.

    The gap is the norm of the smallest gradient that z may have within its own rounding. Only a row nearer than
    rho can make a difference there: as rho -> 0 this is the smallest subgradient at a data point.
    """
    z, rounding, nu = stack.rounded(z)
    squares = torch.zeros(len(stack.shares), dtype=torch.float64, device=z.device)
    offsets = stack.rows[:, :0]
    for _, offsets in centred_blocks(stack.rows, z, torch.float64):
        squares += torch.linalg.vector_norm(offsets, dim=1).square_()
    distances = np.sqrt(squares.cpu().numpy())
    near = float(stack.shares[distances <= nu].sum())
    pulls = stack.shares / np.maximum(distances, nu)
    whole = offsets if offsets.shape == stack.rows.shape else None
    downhill = stack.pulled(pulls, z) if whole is None else torch.from_numpy(pulls).to(z.device) @ whole
    slope, strength = float(torch.linalg.vector_norm(downhill)), float(pulls.sum())
    return View(
        z=z,
        distances=distances,
        following=_ahead(downhill, strength, z),
        gap=max(0.0, slope - near * rounding / nu),
        step=slope / strength,
        settled=slope <= near,
        resolution=rounding / 4,
    )


def _ahead(downhill: Tensor, strength: float, z: Tensor) -> Tensor:
    """z + downhill / strength; where they are large in the dtype of z, and some at a time: to add z torch widens it."""
    if len(z) <= order_statistics.BLOCK:
        return downhill.div_(strength).add_(z)
    found = torch.empty_like(z)
    for ahead, down, here in zip(*(torch.split(v, order_statistics.BLOCK) for v in (found, downhill, z)), strict=True):
        ahead.copy_(down.div_(strength).add_(here))
    return found


def _middle_row(stack: Stack) -> Tensor:
    """The row with the least mean distance to the others, by a sample of columns: no minority leads it away."""
    sample = stack.rows[:, :: max(1, stack.rows.shape[1] // _SAMPLE)].double()
    distances = torch.cdist(sample, sample, compute_mode="donot_use_mm_for_euclid_dist")
    return stack.rows[int(np.argmin(distances.cpu().numpy() @ stack.shares))]


def _leap(stack: Stack, origin: Tensor) -> Tensor:
    """The minimiser as found in a few-dimensional copy of the rows about the origin, brought back as their mixture."""
    origin, _, nu = stack.rounded(origin)
    if stack.rows.shape[1] <= FEW_COLUMNS:
        rows = (stack.rows.double() - origin).cpu().numpy()
    else:
        rows = _isometric_rows(stack, origin)
    best = _newton(rows, stack.shares, nu)
    pulls = stack.shares / np.maximum(_lengths(rows - best), nu)
    return stack.mixture(pulls / pulls.sum())


def _isometric_rows(stack: Stack, origin: Tensor) -> Numbers:
    """K points in K dimensions that lie to one another, and to 0, as the rows lie to one another and to the origin."""
    gram = _gram(stack.rows, origin, stack.rows.dtype)
    if not np.isfinite(gram).all():
        gram = _gram(stack.rows, origin, torch.float64)
    # Rows are scaled to length 1 before the factorisation, so that a far outlier does not drown the near rows.
    lengths = np.sqrt(gram.diagonal())
    units = np.divide(1.0, lengths, out=np.zeros_like(lengths), where=lengths > 0)
    # By torch: numpy takes 7 times as long for K = 100.
    values, vectors = torch.linalg.eigh(torch.from_numpy(gram * units[:, None] * units))
    rows: Numbers = lengths[:, None] * (vectors * values.clamp(min=0).sqrt()).numpy()
    return rows


def _gram(models: Tensor, origin: Tensor, dtype: torch.dtype) -> Numbers:
    """The inner products of the centred rows: a block in the given dtype, the sum of the blocks in float64."""
    gram = torch.zeros(len(models), len(models), dtype=torch.float64, device=models.device)
    for _, offsets in centred_blocks(models, origin, dtype):
        gram += offsets @ offsets.T
    return gram.cpu().numpy()


def _newton(rows: Numbers, shares: Numbers, nu: float) -> Numbers:
    """Newton's method on the smoothed objective; a step that does not serve gives way to Weiszfeld's.

    A Newton step must halve the least slope so far, and Weiszfeld's never climbs: whichever of them occurs without
    end leads to the minimiser.
    """
    # From the mean: where the minimisers are a segment, the answer is then the same for every order of the rows.
    here, tried = Pull(rows, shares, nu, shares @ rows), set[int]()
    least = here.slope
    for _ in range(_NEWTON_STEPS):
        if here.slope <= 1e-14 + 4e-16 * here.strength * math.sqrt(here.p @ here.p):  # a last bit of p makes as much
            break
        row = _nearest(here.distances, shares)
        if row not in tried:
            tried.add(row)
            there = Pull(rows, shares, nu, rows[row])
            if there.slope <= shares[there.distances <= nu].sum():  # the minimiser is within nu of this row
                here, least = there, min(least, there.slope)
                continue
        there = Pull(rows, shares, nu, here.p - here.newton_step())
        if not there.slope <= least / 2:
            there = Pull(rows, shares, nu, here.p - here.gradient / here.strength)
        if there.slope >= here.slope and here.slope < 1e-11:
            break  # rounding has the last word
        here, least = there, min(least, there.slope)
    return here.p


class Pull:
    """The gradient of mean Phi_nu(rows - p) in p, and what it is made of."""

    def __init__(self, rows: Numbers, shares: Numbers, nu: float, p: Numbers) -> None:
        self.p, self.nu = p, nu
        self.offsets = p - rows
        self.distances = _lengths(self.offsets)
        self.pulls = shares / np.maximum(self.distances, nu)
        self.strength = float(self.pulls.sum())
        self.gradient = self.pulls @ self.offsets
        self.slope = math.sqrt(self.gradient @ self.gradient)

    def newton_step(self) -> Numbers:
        bend = np.where(self.distances > self.nu, self.pulls / np.maximum(self.distances, self.nu) ** 2, 0.0)
        hessian = (self.offsets * -bend[:, None]).T @ self.offsets
        hessian.flat[:: len(hessian) + 1] += self.strength * (1 + 1e-12)  # flat directions have a long step, not none
        return np.asarray(np.linalg.solve(hessian, self.gradient), np.float64)


def _lengths(rows: Numbers) -> Numbers:
    lengths: Numbers = np.sqrt(np.einsum("kd,kd->k", rows, rows))
    return lengths


def _nearest(distances: Numbers, shares: Numbers) -> int:
    return int(np.where(shares > 0, distances, np.inf).argmin())
