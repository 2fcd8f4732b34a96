"""The smoothed geometric median: argmin of the mean of Phi_rho(x_k - z), phi the l2 norm (Fed+ v2, eq. 4 and 5).

Weiszfeld's weights a_k / max(rho, |x_k - z|) have the same minimiser as eq. (34), which needs thousands of passes.
Three things make it quick and sure: where the stack is small in one direction, an isometric copy of the rows in
few dimensions is solved by Newton steps first; a row that is itself the answer is recognised, not crawled to; and
the answer is judged where it is returned, in float64, rounded to the dtype of the models.

Pillutla, Kakade, Harchaoui: Robust Aggregation for Federated Learning (2019) names the method RFA.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .medians import column_blocks, weighted_sum

FEW_COLUMNS = 64
"""With at most this many columns the rows themselves are the few-dimensional copy."""

FEW_ROWS = 256
"""With at most this many rows their Gram matrix gives one. Measured for K = 16 to 256 at d = 1e5 and 1e6 with one and
two threads: on easy stacks (3-5 Weiszfeld iterations) the Gram matrix takes 0.5 to 2 times as long as the passes, 2 at
K = 256; where models spread or 30 % are outliers (7-16 iterations) it takes 0.2 to 0.7 times as long at every K."""

_NEWTON_STEPS = 100


@dataclass(frozen=True)
class View:
    """What one look at the stack from the point z tells."""

    z: Tensor  # [d], in the dtype of the models
    nu: float  # rho, or the rounding of z where that is coarser
    distances: Tensor  # [K]
    following: Tensor  # [d], float64: where Weiszfeld's step leads
    gap: float
    step: float
    settled: bool  # the minimiser is within nu of z, which is a row
    resolution: float


def geometric_median(
    models: Tensor, shares: Tensor, rho: float, tolerance: float, most_iterations: int
) -> tuple[Tensor, float, int]:
    """The smoothed geometric median, its gap, and how many times the stack was gone through.

    >>> corners = torch.tensor([[0.0, 0.0], [4.0, 0.0], [0.0, 4.0], [4.0, 4.0]])
    >>> geometric_median(corners, torch.full((4,), 0.25).double(), 1e-6, 1e-9, 100)[0].tolist()
    [2.0, 2.0]
    """
    leaping = min(models.shape[1] - FEW_COLUMNS, models.shape[0] - FEW_ROWS) <= 0
    z = weighted_sum(models, shares).to(models.dtype)
    if leaping:
        z = _leap(models, shares, z, rho)
    here = look(models, shares, z, rho)
    tried: set[int] = set()  # rows that were looked at as the answer
    for iteration in range(1, most_iterations + 1):
        if here.gap <= tolerance or here.step <= here.resolution:
            return here.z, here.gap, iteration
        if leaping:
            there = look(models, shares, _leap(models, shares, here.z, rho), rho)
            leaping = there.gap < here.gap / 2
            here = there if there.gap < here.gap else here
            continue
        row = _nearest(here.distances, shares)
        if row not in tried and here.distances[row] < 0.1 * here.distances.mean():
            tried.add(row)
            there = look(models, shares, models[row], rho)
            here = there if there.settled else here
        here = look(models, shares, here.following.to(models.dtype), rho)
    return here.z, here.gap, most_iterations


def look(models: Tensor, shares: Tensor, z: Tensor, rho: float) -> View:
    """Distances, Weiszfeld's step and the gap at z, in two passes of float64 arithmetic over the columns.

    The gap is the norm of the smallest gradient that z may have within its own rounding. Only a row nearer than
    rho can make a difference there: as rho -> 0 this is the smallest subgradient at a data point.
    """
    squares = torch.zeros_like(shares)
    for cut, block in column_blocks(models):
        squares += torch.linalg.vector_norm(block - z[cut].double(), dim=1) ** 2
    distances = squares.sqrt()
    rounding = 2 * torch.finfo(models.dtype).eps * float(torch.linalg.vector_norm(z, dtype=torch.float64))
    nu = max(rho, rounding)
    near = float(shares[distances <= nu].sum())
    pulls = shares / distances.clamp(min=nu)
    downhill = weighted_sum(models, pulls, origin=z)
    slope, strength = float(downhill.norm()), float(pulls.sum())
    return View(
        z=z,
        nu=nu,
        distances=distances,
        following=z + downhill / strength,
        gap=max(0.0, slope - near * rounding / nu),
        step=slope / strength,
        settled=slope <= near,
        resolution=rounding / 4,
    )


def _leap(models: Tensor, shares: Tensor, z: Tensor, rho: float) -> Tensor:
    """The minimiser as found in a few-dimensional copy of the rows about z, brought back as a mixture of rows."""
    rounding = 2 * torch.finfo(models.dtype).eps * float(torch.linalg.vector_norm(z, dtype=torch.float64))
    nu = max(rho, rounding)
    rows = models.double() - z if models.shape[1] <= FEW_COLUMNS else _isometric_rows(models, z)
    best = _newton(rows, shares, nu)
    pulls = shares / torch.linalg.vector_norm(rows - best, dim=1).clamp(min=nu)
    return (z + weighted_sum(models, pulls / pulls.sum(), origin=z)).to(models.dtype)


def _isometric_rows(models: Tensor, z: Tensor) -> Tensor:
    """K points in K dimensions that lie to one another, and to 0, as the rows lie to one another and to z."""
    count = models.shape[0]
    gram = torch.zeros(count, count, dtype=torch.float64, device=models.device)
    for cut, block in column_blocks(models):
        centred = block - z[cut].double()
        gram.addmm_(centred, centred.T)
    # Rows are scaled to length 1 before the factorisation, so that a far outlier does not drown the near rows.
    lengths = gram.diagonal().sqrt()
    units = torch.where(lengths > 0, 1 / lengths, 0.0)
    values, vectors = torch.linalg.eigh(gram * units[:, None] * units)
    rows: Tensor = lengths[:, None] * vectors * values.clamp(min=0).sqrt()
    return rows


def _newton(rows: Tensor, shares: Tensor, nu: float) -> Tensor:
    """Newton's method on the smoothed objective from 0; a step that does not serve gives way to Weiszfeld's."""
    p, tried = torch.zeros_like(rows[0]), set[int]()
    objective, gradient = _objective(rows, shares, nu, p)
    for _ in range(_NEWTON_STEPS):
        steepness = float(gradient.norm())
        offsets = rows - p
        distances = torch.linalg.vector_norm(offsets, dim=1)
        strength = (shares / distances.clamp(min=nu)).sum()
        if steepness <= 1e-14 + 4e-16 * strength * p.norm():  # what a change of p in its last bit makes
            break
        row = _nearest(distances, shares)
        if row not in tried:
            tried.add(row)
            near = shares[torch.linalg.vector_norm(rows - rows[row], dim=1) <= nu].sum()
            at_row = _objective(rows, shares, nu, rows[row])
            if at_row[1].norm() <= near:  # the minimiser is within nu of this row
                p, (objective, gradient) = rows[row], at_row
                continue
        trial = p - _newton_step(offsets, distances, shares, nu, gradient)
        after = _objective(rows, shares, nu, trial)
        if not (after[0] <= objective * (1 + 1e-14) and after[1].norm() <= steepness / 2):
            trial = p - gradient / strength
            after = _objective(rows, shares, nu, trial)
        if after[1].norm() >= steepness and steepness < 1e-11:
            break  # rounding has the last word
        p, (objective, gradient) = trial, after
    return p


def _nearest(distances: Tensor, shares: Tensor) -> int:
    return int(torch.where(shares > 0, distances, torch.inf).argmin())


def _newton_step(offsets: Tensor, distances: Tensor, shares: Tensor, nu: float, gradient: Tensor) -> Tensor:
    pulls = shares / distances.clamp(min=nu)
    bend = torch.where(distances > nu, pulls / distances**2, 0.0)
    hessian = pulls.sum() * torch.eye(len(gradient), dtype=gradient.dtype) - (offsets * bend[:, None]).T @ offsets
    step, _ = torch.linalg.solve_ex(hessian, gradient)
    return torch.nan_to_num(step, nan=0.0, posinf=0.0, neginf=0.0)  # a flat direction: the trial then fails


def _objective(rows: Tensor, shares: Tensor, nu: float, p: Tensor) -> tuple[Tensor, Tensor]:
    """Mean Phi_nu(rows - p) and its gradient in p."""
    offsets = p - rows
    distances = torch.linalg.vector_norm(offsets, dim=1)
    losses = torch.where(distances > nu, distances - nu / 2, distances**2 / (2 * nu))
    return shares @ losses, (shares / distances.clamp(min=nu)) @ offsets
