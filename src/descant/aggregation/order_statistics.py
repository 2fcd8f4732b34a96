"""Medians and trimmed means of every column of a stack, block by block.

All functions take `shares [K]`, float64 weights > 0 that sum to 1, and a block `[K, c]` of columns.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BLOCK = 2**20
"""Elements of the stack per block: 8 MB in float64. Measured at 100 x 1e6: 2**19 to 2**20 is fastest."""

_MAX_NETWORK_ROWS = 64
"""Up to this many rows a sorting network of minima and maxima is faster than sorting: it takes a fifth of the time for
K = 10, two thirds for K = 64. Its time grows with K log(K)²."""

_NETWORK_COLUMNS = 2**14  # columns per run of the network: 64 KB per row

_TIE_TOLERANCE = 1e-12
"""Sums of weights that differ by less count as equal, so that 0.1 + 0.2 against 0.3 is a tie."""

_BAND_EDGE = 1 - 1e-10
"""A row beyond this part of the Huber band counts as outside, so that the ends of a flat stretch belong to it."""


def column_blocks(models: Tensor, size: float = 1) -> Iterator[tuple[slice, Tensor]]:
    """Yield views of a stack [K, d] with at most BLOCK · size elements each, in whole columns.

    >>> [(cut.start, cut.stop) for cut, _ in column_blocks(torch.zeros(2**19, 3))]
    [(0, 2), (2, 3)]
    """
    count, d = models.shape
    width = max(1, int(size * BLOCK) // count)
    for start in range(0, d, width):
        cut = slice(start, min(start + width, d))
        yield cut, models[:, cut]


def sorted_columns(block: Tensor) -> Tensor:
    """Return the values of each column in ascending order, one column per row: [K, c] -> [c, K].

    >>> sorted_columns(torch.tensor([[3.0, 1.0], [2.0, 5.0]])).tolist()
    [[2.0, 3.0], [1.0, 5.0]]
    """
    if block.device.type != "cpu":
        return block.T.sort(dim=1).values
    columns = block.new_empty(block.shape[1], block.shape[0])
    source = block.numpy()
    target = columns.numpy()

    def sort(cut: slice) -> None:
        target[cut] = source[:, cut].T
        target[cut].sort(axis=1)  # numpy sorts short rows with vector instructions: 8 times as fast as torch.sort

    _run_in_pieces(sort, block.shape[1], max(256, 2**17 // len(block)))
    return columns


def _run_in_pieces(function: Callable[[slice], None], d: int, width: int) -> None:
    """Apply a numpy function to pieces of d columns, in as many threads as torch uses; pieces are independent."""
    pieces = [slice(start, min(start + width, d)) for start in range(0, d, width)]
    if len(pieces) <= 1 or torch.get_num_threads() == 1:
        for piece in pieces:
            function(piece)
        return
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        list(pool.map(function, pieces))


def all_equal(shares: Tensor) -> bool:
    """Return whether all weights are equal, so that the unweighted formula holds exactly."""
    return bool((shares == shares[0]).all())


def median_interval(block: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
    """Return the least and the greatest weighted median of each column: argmin of mean |x_k - z| is [low, high].

    >>> low, high = median_interval(torch.tensor([[0.0], [1.0], [5.0]]), torch.tensor([0.25, 0.25, 0.5]).double())
    >>> low.item(), high.item()
    (1.0, 5.0)
    """
    count = block.shape[0]
    if not all_equal(shares):
        return _weighted_interval(block, shares)
    if block.device.type == "cpu":
        return _middle_rows(block)
    values = sorted_columns(block)
    return values[:, (count - 1) // 2], values[:, count // 2]


def _middle_rows(block: Tensor) -> tuple[Tensor, Tensor]:
    """Return the two middle values of each column, identical if K is odd."""
    count = block.shape[0]
    middle = sorted({(count - 1) // 2, count // 2})
    medians = block.new_empty(len(middle), block.shape[1])
    source = block.numpy()
    target = medians.numpy()

    def by_sorting(cut: slice) -> None:
        columns = np.ascontiguousarray(source[:, cut].T)
        columns.sort(axis=1)
        target[:, cut] = columns[:, middle].T

    def by_network(cut: slice) -> None:
        rows: list[NDArray[Any]] = list(source[:, cut].copy())
        spare = np.empty_like(rows[0])
        for a, b, needs_min, needs_max in _median_network(count):  # fmin and maximum sort nan to the end
            if needs_min:
                np.fmin(rows[a], rows[b], out=spare)
            if needs_max:
                np.maximum(rows[a], rows[b], out=rows[b])
            if needs_min:
                rows[a], spare = spare, rows[a]
        for i, row in enumerate(middle):
            target[i, cut] = rows[row]

    if count > _MAX_NETWORK_ROWS:
        _run_in_pieces(by_sorting, block.shape[1], max(256, 2**17 // count))
    else:
        _run_in_pieces(by_network, block.shape[1], _NETWORK_COLUMNS)
    return medians[0], medians[-1]


@functools.cache
def _median_network(count: int) -> list[tuple[int, int, bool, bool]]:
    """Return the part of Batcher's merge sort that the median needs: (row a, row b, needs min, needs max).

    >>> _median_network(3)
    [(0, 1, True, True), (0, 2, False, True), (1, 2, True, False)]
    """
    pairs = []
    for p in (2**i for i in range((count - 1).bit_length())):
        for k in (p >> i for i in range(p.bit_length())):
            for j in range(k % p, count - k, 2 * k):
                pairs += [(i, i + k) for i in range(j, min(j + k, count - k)) if i // (2 * p) == (i + k) // (2 * p)]
    wanted = {(count - 1) // 2, count // 2}
    steps = []
    for a, b in reversed(pairs):
        if a in wanted or b in wanted:
            steps.append((a, b, a in wanted, b in wanted))
            wanted |= {a, b}
    return steps[::-1]


def _weighted_interval(block: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values at which the cumulative weight of a sorted column reaches a half, and exceeds it."""
    source = block.cpu().numpy()
    weights = shares.cpu().numpy()
    interval = np.empty((2, block.shape[1]), source.dtype)

    def select(cut: slice) -> None:
        columns = np.ascontiguousarray(source[:, cut].T)
        order = columns.argsort(axis=1)
        mass = weights.take(order).cumsum(axis=1)
        for i, before in enumerate((mass < 0.5 - _TIE_TOLERANCE, mass <= 0.5 + _TIE_TOLERANCE)):
            rank = np.minimum(np.count_nonzero(before, axis=1), len(weights) - 1)[:, None]
            interval[i, cut] = np.take_along_axis(columns, np.take_along_axis(order, rank, 1), 1)[:, 0]

    _run_in_pieces(select, block.shape[1], max(256, 2**17 // len(weights)))
    low, high = torch.from_numpy(interval).to(block.device)
    return low, high


def median(block: Tensor, shares: Tensor) -> Tensor:
    """Return the midpoint of the medians of each column; the lower middle would violate eq. (28) (ERRATA 25).

    >>> median(torch.tensor([[1.0], [2.0], [3.0], [10.0]]), torch.full((4,), 0.25)).item()
    2.5
    """
    low, high = median_interval(block, shares)
    return (low + high) / 2


def huber_location(block: Tensor, shares: Tensor, rho: float) -> tuple[Tensor, Tensor]:
    """Return the minimizer of the mean Huber loss of each column and the slope there: eq. (4)-(5) with phi = l1.

    >>> values = torch.tensor([[0.0], [0.5], [9.0]], dtype=torch.float64)
    >>> z, slope = huber_location(values, torch.full((3,), 1 / 3, dtype=torch.float64), 1.0)
    >>> round(z.item(), 12), round(slope.item(), 12)
    (0.75, 0.0)
    """
    point, slope = torch.zeros(2, block.shape[1], dtype=torch.float64, device=block.device)
    ends: tuple[Tensor, Tensor] | None = None
    for cut, part in column_blocks(block, 1 / 8):
        part64 = part.double()
        point[cut] = shares @ part64
        outside = ((part64 - point[cut]).abs_().amax(dim=0) > rho).nonzero().squeeze(1)
        if len(outside):  # if every row is within rho of the mean, the loss is quadratic and the mean its minimizer
            ends = ends or median_interval(block, shares)
            part64 = part64 if len(outside) == part64.shape[1] else part64[:, outside]
            outside += cut.start
            point[outside], slope[outside] = _huber_root(
                part64, ends[0][outside].double(), ends[1][outside].double(), shares=shares, rho=rho
            )
    return point, slope


def _huber_root(x: Tensor, low: Tensor, high: Tensor, shares: Tensor, rho: float) -> tuple[Tensor, Tensor]:
    """Return the zero of psi(z) = mean clip((z - x_k)/rho, -1, 1), by Newton steps safeguarded by bisection.

    psi is piecewise linear with its 2K breakpoints at x_k ± rho, so a Newton step from the right piece is exact.
    It is <= 0 at (least median - rho) and >= 0 at (greatest median + rho): a bracket that no outlier widens.
    """
    origin = (low + high) / 2
    x = x - origin
    low = low - origin - rho
    high = high - origin + rho
    band = x
    z = torch.zeros_like(origin)
    active = torch.arange(len(origin), device=x.device)
    results = torch.zeros(3, len(z), dtype=z.dtype, device=z.device)  # z, psi and its steepness there
    buffer = torch.empty(x.numel(), dtype=x.dtype, device=x.device)
    for iteration in range(150):
        psi, steepness = _psi(band, z, shares, rho=rho, buffer=buffer)
        results[:, active] = torch.stack([z, psi, steepness])
        low = torch.where(psi < 0, z, low)
        high = torch.where(psi > 0, z, high)
        newton = z - rho * psi / steepness
        usable = (
            (newton > low) & (newton < high) & (iteration % 4 != 3)
        )  # every fourth step halves the bracket, to bound the number of steps
        target = torch.where(usable, newton, (low + high) / 2)
        is_moving = (psi.abs() > 1e-14) & (target != z)
        remaining = is_moving.nonzero().squeeze(1)
        if not len(remaining):
            break
        z = torch.where(is_moving, target, z)
        if len(remaining) < 0.7 * len(active):  # columns that still move
            active = active[remaining]
            band = band[:, remaining]
            z = z[remaining]
            low = low[remaining]
            high = high[remaining]
    z, psi, steepness = results
    # No row in the band and psi = 0: every point between the nearest bands is a minimizer; take the midpoint.
    flat = ((steepness == 0) & (psi.abs() <= 1e-9)).nonzero().squeeze(1)
    if len(flat):
        flat_points = z[flat]
        band = x[:, flat]
        left_end = torch.where(band < flat_points, band, -math.inf).amax(dim=0) + rho
        right_end = torch.where(band > flat_points, band, math.inf).amin(dim=0) - rho
        z[flat] = (left_end + right_end) / 2
    return z + origin, psi


def _psi(x: Tensor, z: Tensor, shares: Tensor, rho: float, buffer: Tensor) -> tuple[Tensor, Tensor]:
    clipped_offsets = torch.sub(z, x, out=buffer[: x.numel()].view(x.shape)).div_(rho).clamp_(-1, 1)  # [K, c]
    psi = shares @ clipped_offsets
    return psi, shares @ clipped_offsets.copy_(clipped_offsets.abs_() < _BAND_EDGE)


def trimmed_mean(block: Tensor, shares: Tensor, count: int) -> Tensor:
    """Return the mean of each column without its ``count`` least and ``count`` greatest values.

    >>> trimmed_mean(torch.tensor([[1.0], [2.0], [4.0], [99.0]]), torch.full((4,), 0.25), 1).item()
    3.0
    """
    kept = slice(count, block.shape[0] - count)
    if all_equal(shares):
        return sorted_columns(block)[:, kept].double().mean(dim=1)
    # If equal values differ in weight, it matters which one is dropped. Average the light-first and the heavy-first
    # order, so that neither the order of the rows nor their sign matters.
    light_first = shares.argsort()
    means = [_weighted_trimmed_mean(block[order], shares[order], kept) for order in (light_first, light_first.flip(0))]
    return (means[0] + means[1]) / 2


def _weighted_trimmed_mean(block: Tensor, shares: Tensor, kept: slice) -> Tensor:
    columns = block.T.contiguous()
    if columns.device.type == "cpu":
        order = torch.from_numpy(columns.numpy().argsort(axis=1, kind="stable"))[:, kept]
    else:
        order = columns.argsort(dim=1, stable=True)[:, kept]
    weight = shares[order]
    return (weight * columns.gather(1, order)).sum(dim=1) / weight.sum(dim=1)


def centered_blocks(models: Tensor, origin: Tensor | None, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Yield the blocks of x_k - origin in the given dtype; each reuses the memory of the last.

    >>> [block.tolist() for _, block in centered_blocks(torch.tensor([[1.0], [3.0]]), torch.ones(1), torch.float64)]
    [[[0.0], [2.0]]]
    """
    buffer = models.new_empty(0, dtype=dtype)
    for cut, block in column_blocks(models):
        buffer = buffer if len(buffer) else models.new_empty(block.numel(), dtype=dtype)
        centered = buffer[: block.numel()].view(block.shape)
        if origin is not None and block.dtype == dtype:
            yield cut, torch.sub(block, origin[cut].to(dtype), out=centered)
        else:
            centered.copy_(block)
            yield cut, centered if origin is None else centered.sub_(origin[cut].to(dtype))


def weighted_sum(
    models: Tensor, coefficients: Tensor, origin: Tensor | None = None, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Return Σ c_k x_k, or Σ c_k (x_k - origin), summed in float64 and rounded last: [K, d] -> [d].

    >>> weighted_sum(torch.tensor([[1.0], [3.0]]), torch.tensor([0.5, 0.5]).double()).item()
    2.0
    """
    if origin is None and models.dtype == torch.float64:
        return (coefficients @ models).to(dtype)
    total = torch.empty(models.shape[1], dtype=dtype, device=models.device)
    for cut, block in centered_blocks(models, origin, torch.float64):
        total[cut] = torch.mv(block.T, coefficients)
    return total
