"""Batch schedules of parties, and batches of several parties side by side."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..parties.population import Party

_WINDOW = 2**21  # numbers gathered ahead: few large gathers are cheaper than many small ones
_SCRATCH: dict[torch.dtype, Tensor] = {}  # one window per dtype: a new allocation costs as much as the copy


@dataclass(frozen=True)
class BatchSchedule:
    """The samples of one party's steps: step s takes ``indices[s, :lengths[s]]``."""

    indices: Tensor  # [steps, batch]
    lengths: tuple[int, ...]


def draw_batches(
    n: int, batch: int | None, work: int, unit: str, rng: np.random.Generator, weights: Tensor | None = None
) -> BatchSchedule:
    """Return the batches of ``work`` steps or epochs over ``n`` samples, each epoch in a new order.

    With unit "steps" all batches have size ``min(batch, n)``: the rest of an order is skipped, so that parties stay in
    step. An epoch takes every sample once; its last batch may be short. If weights differ, samples are drawn with
    replacement instead, with probabilities proportional to their weights. The mean loss of a batch is then an unbiased
    estimate of the weighted mean over all samples.

    >>> draw_batches(5, 2, 1, "epochs", np.random.default_rng(0)).lengths
    (2, 2, 1)
    """
    size = n if batch is None else min(batch, n)
    per_epoch = n // size if unit == "steps" else math.ceil(n / size)
    steps = work if unit == "steps" else work * per_epoch
    weighted = weights is not None and bool((weights != weights[0]).any())
    if size == n and not weighted:
        return BatchSchedule(torch.arange(n).expand(steps, n), (n,) * steps)
    epochs = math.ceil(steps / per_epoch)
    used = min(n, per_epoch * size)
    lengths = [min(size, n - begin) for begin in range(0, per_epoch * size, size)]
    if weights is not None and weighted:
        ends = np.cumsum(weights.double().numpy())
        index = np.searchsorted(ends, rng.random((steps, size)) * ends[-1], side="right")  # never a sample of weight 0
    else:
        index = np.zeros((epochs, per_epoch * size), dtype=np.int64)
        index[:, :used] = rng.random((epochs, n)).argsort(1)[
            :, :used
        ]  # a random order per epoch; faster than shuffling
    return BatchSchedule(torch.from_numpy(index.reshape(-1, size)[:steps]), tuple((lengths * epochs)[:steps]))


@dataclass(frozen=True)
class BatchGroup:
    """Parties whose batches have one length in one step."""

    rows: list[int] | None  # None: all of them, in order
    x: Tensor  # [k, batch, ...]
    y: Tensor  # [k, batch, ...]


def iterate_batches(parties: Sequence[Party], schedules: Sequence[BatchSchedule]) -> Iterator[list[BatchGroup]]:
    """Yield for every step the batches of the active parties, grouped by length; gathered a window at a time."""
    steps = max((len(d.lengths) for d in schedules), default=0)
    widest = sum(d.indices.shape[1] * p.x[0].numel() for p, d in zip(parties, schedules, strict=True))
    window = max(1, _WINDOW // max(1, widest))
    same_lengths = len({d.lengths for d in schedules}) == 1 and len(set(schedules[0].lengths)) == 1
    for begin in range(0, steps, window):
        indices = [d.indices[begin : begin + window] for d in schedules]
        if same_lengths:
            xs = _gather([p.x for p in parties], indices, _SCRATCH)
            ys = _gather([p.y for p in parties], indices, {})
            for x, y in zip(xs.unbind(1), ys.unbind(1), strict=True):
                yield [BatchGroup(None, x, y)]
        else:
            by_party = [p.x[index] for p, index in zip(parties, indices, strict=True)]  # each [window, batch, ...]
            targets = [p.y[index] for p, index in zip(parties, indices, strict=True)]
            for step in range(begin, min(begin + window, steps)):
                yield list(_group_by_length(step, step - begin, schedules, xs=by_party, ys=targets))


def _gather(data: Sequence[Tensor], indices: Sequence[Tensor], scratch: dict[torch.dtype, Tensor]) -> Tensor:
    """Return ``[K, window, batch, ...]``, copied once, into scratch memory unless it would be too large."""
    shape = (len(data), indices[0].numel(), *data[0].shape[1:])
    like = data[0]
    needed = math.prod(shape)
    if needed > _WINDOW:  # too much to keep; one step over all samples, say
        scratch = {}
    if like.dtype not in scratch or scratch[like.dtype].numel() < needed:
        scratch[like.dtype] = like.new_empty(needed)
    gathered = scratch[like.dtype][:needed].view(shape)
    for into, values, index in zip(gathered, data, indices, strict=True):
        torch.index_select(values, 0, index.reshape(-1), out=into)
    return gathered.view(len(data), *indices[0].shape, *like.shape[1:])


def _group_by_length(
    step: int, offset: int, schedules: Sequence[BatchSchedule], xs: list[Tensor], ys: list[Tensor]
) -> Iterator[BatchGroup]:
    by_length: dict[int, list[int]] = {}
    for row, d in enumerate(schedules):
        if step < len(d.lengths):
            by_length.setdefault(d.lengths[step], []).append(row)
    for length, rows in by_length.items():
        x = torch.stack([xs[row][offset, :length] for row in rows])
        y = torch.stack([ys[row][offset, :length] for row in rows])
        yield BatchGroup(None if len(rows) == len(schedules) else rows, x, y)
