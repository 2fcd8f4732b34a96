"""Medians and trimmed means of every column of a stack, block by block: the arithmetic under :mod:`descant.centers`.

Everything here takes `shares [K]`, float64 weights > 0 that sum to 1, and a block `[K, c]` of columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

BLOCK = 2**20
"""Elements of the stack looked at together: 8 MB in float64. Measured at 100 x 1e6: 2**19 to 2**20 is fastest."""

_TIE = 1e-12
"""Sums of weights that differ by less are equal, so that 0.1 + 0.2 against 0.3 is still a tie."""

_IN_BAND = 1 - 1e-10
"""A row nearer than this to the edge of the Huber band counts as outside: an end of a flat stretch is in it."""


def column_blocks(models: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Cut a stack [K, d] into views of at most BLOCK elements, whole columns each.

    >>> [(cut.start, cut.stop) for cut, _ in column_blocks(torch.zeros(2**19, 3))]
    [(0, 2), (2, 3)]
    """
    count, d = models.shape
    width = max(1, BLOCK // count)
    for start in range(0, d, width):
        cut = slice(start, min(start + width, d))
        yield cut, models[:, cut]


def sorted_columns(block: Tensor) -> Tensor:
    """The values of every column in ascending order, one column a row: [K, c] -> [c, K].

    >>> sorted_columns(torch.tensor([[3.0, 1.0], [2.0, 5.0]])).tolist()
    [[2.0, 3.0], [1.0, 5.0]]
    """
    columns = block.T.clone(memory_format=torch.contiguous_format)
    if columns.device.type != "cpu":
        return columns.sort(dim=1).values
    # numpy sorts short rows with vector instructions: 8 times as fast as torch.sort for K = 100.
    columns.numpy().sort(axis=1)
    return columns


def _argsorted_columns(block: Tensor, stable: bool) -> tuple[Tensor, Tensor]:
    """As above with the row of every value; if stable, rows of equal values stay in their order."""
    columns = block.T.contiguous()
    if columns.device.type == "cpu":
        order = torch.from_numpy(columns.numpy().argsort(axis=1, kind="stable" if stable else "quicksort"))
    else:
        order = columns.argsort(dim=1, stable=stable)
    return columns.gather(1, order), order


def equal(shares: Tensor) -> bool:
    """Whether all weights are the same number, so that the unweighted formula holds exactly."""
    return bool((shares == shares[0]).all())


def median_interval(block: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the greatest weighted median of every column: argmin of mean |x_k - z| is [low, high].

    >>> low, high = median_interval(torch.tensor([[0.0], [1.0], [5.0]]), torch.tensor([0.25, 0.25, 0.5]))
    >>> low.item(), high.item()
    (1.0, 5.0)
    """
    count = block.shape[0]
    if equal(shares):
        values = sorted_columns(block)
        return values[:, (count - 1) // 2], values[:, count // 2]
    values, order = _argsorted_columns(block, stable=False)
    mass = shares[order].cumsum(dim=1)
    first = (mass < 0.5 - _TIE).sum(dim=1, keepdim=True)
    last = (mass <= 0.5 + _TIE).sum(dim=1, keepdim=True).clamp(max=count - 1)
    return values.gather(1, first).squeeze(1), values.gather(1, last).squeeze(1)


def median(block: Tensor, shares: Tensor) -> Tensor:
    """The midpoint of the medians of every column; the lower middle would break eq. (28) (ERRATA 25).

    >>> median(torch.tensor([[1.0], [2.0], [3.0], [10.0]]), torch.full((4,), 0.25)).item()
    2.5
    """
    low, high = median_interval(block, shares)
    return (low + high) / 2


def huber_location(block: Tensor, shares: Tensor, rho: float) -> tuple[Tensor, Tensor]:
    """The minimiser of the mean Huber loss of every column, and its slope there: eq. (4)-(5) with phi = l1.

    >>> values = torch.tensor([[0.0], [0.5], [9.0]], dtype=torch.float64)
    >>> z, slope = huber_location(values, torch.full((3,), 1 / 3, dtype=torch.float64), 1.0)
    >>> round(z.item(), 12), round(slope.item(), 12)
    (0.75, 0.0)
    """
    block = block.double()
    point = shares @ block
    far = (block - point).abs().amax(dim=0) > rho
    slope = torch.zeros_like(point)
    if far.any():  # where every row is within rho of the mean, the loss is quadratic and the mean its minimiser
        point[far], slope[far] = _huber_root(block[:, far], shares, rho)
    return point, slope


def _huber_root(x: Tensor, shares: Tensor, rho: float) -> tuple[Tensor, Tensor]:
    """The zero of psi(z) = mean clip((z - x_k)/rho, -1, 1) by Newton steps that bisection keeps in a bracket.

    psi is piecewise linear with its 2K breakpoints at x_k ± rho, so a Newton step from the right piece is exact;
    and it is <= 0 at (least median - rho), >= 0 at (greatest median + rho): a bracket that no outlier widens.
    """
    low, high = median_interval(x, shares)
    origin = (low + high) / 2
    x, low, high = x - origin, low - origin - rho, high - origin + rho
    z = torch.zeros_like(origin)
    todo = torch.arange(len(z), device=z.device)  # columns that still move
    band = x
    for turn in range(150):
        psi, steepness = _psi(band, z[todo], shares, rho)
        low[todo] = torch.where(psi < 0, z[todo], low[todo])
        high[todo] = torch.where(psi > 0, z[todo], high[todo])
        newton = z[todo] - rho * psi / steepness
        usable = (newton > low[todo]) & (newton < high[todo]) & (turn % 4 != 3)  # every fourth step halves: no crawl
        target = torch.where(usable, newton, (low[todo] + high[todo]) / 2)
        moving = (psi.abs() > 1e-14) & (target != z[todo])
        if not moving.any():
            break
        todo, band = todo[moving], band[:, moving]
        z[todo] = target[moving]
    psi, steepness = _psi(x, z, shares, rho)
    # No row in the band and psi = 0: every point between the nearest bands is a minimiser; take the midpoint.
    left = torch.where(x < z, x, -math.inf).amax(dim=0) + rho
    right = torch.where(x > z, x, math.inf).amin(dim=0) - rho
    flat = (steepness == 0) & (psi.abs() <= 1e-9)
    return torch.where(flat, (left + right) / 2, z) + origin, psi


def _psi(x: Tensor, z: Tensor, shares: Tensor, rho: float) -> tuple[Tensor, Tensor]:
    lean = ((z - x) / rho).clamp_(-1, 1)  # [K, c]
    return shares @ lean, shares @ (lean.abs() < _IN_BAND).double()


def trimmed_mean(block: Tensor, shares: Tensor, cut: int) -> Tensor:
    """The mean of what remains when `cut` rows are dropped at either end of every column.

    >>> trimmed_mean(torch.tensor([[1.0], [2.0], [4.0], [99.0]]), torch.full((4,), 0.25), 1).item()
    3.0
    """
    kept = slice(cut, block.shape[0] - cut)
    if equal(shares):
        return sorted_columns(block)[:, kept].double().mean(dim=1)
    # Which of two equal values is dropped matters when their weights differ: average the light-first and the
    # heavy-first order, so that neither the order of the rows nor their sign plays a part.
    light_first = shares.argsort()
    both = [_weighted_trim(block[order], shares[order], kept) for order in (light_first, light_first.flip(0))]
    return (both[0] + both[1]) / 2


def _weighted_trim(block: Tensor, shares: Tensor, kept: slice) -> Tensor:
    values, order = _argsorted_columns(block, stable=True)
    weight = shares[order][:, kept]
    return (weight * values[:, kept]).sum(dim=1) / weight.sum(dim=1)


def weighted_sum(models: Tensor, coefficients: Tensor, origin: Tensor | None = None) -> Tensor:
    """Σ c_k x_k, or Σ c_k (x_k - origin), in float64 whatever the dtype of the stack: [K, d] -> [d].

    >>> weighted_sum(torch.tensor([[1.0], [3.0]]), torch.tensor([0.5, 0.5]).double()).item()
    2.0
    """
    total = torch.empty(models.shape[1], dtype=torch.float64, device=models.device)
    for cut, block in column_blocks(models):
        wide = block.double() if origin is None else block - origin[cut].double()
        total[cut] = coefficients @ wide
    return total
