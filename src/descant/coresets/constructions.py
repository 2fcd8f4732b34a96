"""Rows that cover the others: k-centre, k-means++ and sensitivity sampling.

T. Gonzalez, "Clustering to minimize the maximum intercluster distance" (1985); D. Arthur and S. Vassilvitskii,
"k-means++: the advantages of careful seeding" (2007); D. Feldman and M. Langberg, "A unified framework for
approximating and clustering data" (2011), with the sensitivities of O. Bachem, M. Lucic and A. Krause, "Practical
coreset constructions for machine learning" (2017).

Distances count within a class only: a row of another class stands for nobody, however near it is. So a class is left
out only where there are more classes than rows to choose; then the largest ones are kept.

Both greedy methods choose one row after the other. Here they choose a block of rows at a time and still choose the same
ones, because a distance to the nearest chosen row can only fall: one that is not up to date is a bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..parties.partition import Rows
from .features import Space

Choice: TypeAlias = tuple[Rows, NDArray[np.float64]]
"""Places of a space, and the weight of each."""

_BLOCK = 512  # rows whose mutual distances are looked at at once
_CHUNK = 4096  # rows whose distances to a block are in memory at once: 8 MB


class Cover:
    """Which rows are chosen, and for every place the nearest of them in its class."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self.chosen: list[int] = []
        self.distance = torch.full((len(space.order),), math.inf)
        """Squared, to the nearest chosen row ``[n]``; 0 for itself, infinite where the class has none."""
        self.nearest = torch.full((len(space.order),), -1)
        """Which of the chosen that is ``[n]``; -1 for none."""

    def add(self, places: Sequence[int]) -> None:
        """Choose these, too."""
        new, numbers = torch.tensor(places, dtype=torch.int64), torch.arange(len(places)) + len(self.chosen)
        self.chosen += places
        for own in self.space.classes:
            inside = (new >= own.start) & (new < own.stop)
            if inside.any():
                for begin in range(own.start, own.stop, _CHUNK):
                    self._approach(slice(begin, min(begin + _CHUNK, own.stop)), new[inside], numbers[inside])
        self.distance[new], self.nearest[new] = 0.0, numbers

    def _approach(self, part: slice, new: Tensor, numbers: Tensor) -> None:
        distance, which = squared(self.space, part, new).min(1)
        closer = distance < self.distance[part]
        self.distance[part] = torch.where(closer, distance, self.distance[part])
        self.nearest[part] = torch.where(closer, numbers[which], self.nearest[part])

    def choice(self) -> Choice:
        """Every chosen row with the number of rows that it is nearest to, itself included."""
        weights = torch.bincount(self.nearest[self.nearest >= 0], minlength=len(self.chosen))
        return np.array(self.chosen), weights.double().numpy()


def squared(space: Space, some: slice | Tensor, others: Tensor) -> Tensor:
    """Squared distances ``[some, others]``."""
    found = torch.addmm(space.squares[others], space.points[some], space.points[others].T, alpha=-2)
    return found.add_(space.squares[some, None]).clamp_(min=0)


def _mutual(space: Space, block: Tensor) -> NDArray[np.float32]:
    """Squared distances within a block; infinite between classes."""
    found = squared(space, block, block)
    found[space.member[block, None] != space.member[block]] = math.inf
    found[block[:, None] == block] = 0.0  # one row may stand there twice
    mutual: NDArray[np.float32] = found.numpy()
    return mutual


def _largest(space: Space, count: int) -> list[slice]:
    """The classes that are represented: all of them, or the largest ones."""
    return [space.classes[k] for k in np.argsort(-space.sizes, kind="stable")[:count]]


def k_center(space: Space, count: int, rng: np.random.Generator) -> Choice:
    """Farthest point first: no row is farther from its nearest one than twice the least that is possible (Gonzalez).

    It draws nothing: it begins with the row of each class that is nearest to the mean of the class.
    """
    cover = Cover(space)
    cover.add([_middle(space, own) for own in _largest(space, count)])
    while len(cover.chosen) < count:
        far = cover.distance.clone()
        far[cover.chosen] = -1.0
        left = count - len(cover.chosen)
        size = min(_BLOCK, 4 * left, len(far))
        ranked, places = far.topk(min(size + 1, len(far)))
        block, bound = places[:size], float(ranked[size]) if len(ranked) > size else -1.0
        picked = _farthest(ranked[:size].numpy(), bound, _mutual(space, block), left)
        cover.add(block[picked].tolist())
    return cover.choice()


def _middle(space: Space, own: slice) -> int:
    points = space.points[own]
    mean = points.mean(0, dtype=torch.float64).to(points.dtype)
    return int(own.start) + int((points - mean).square().sum(1).argmin())


def _farthest(far: NDArray[np.float32], bound: float, mutual: NDArray[np.float32], most: int) -> list[int]:
    """Rows of a block, farthest first, as long as no row outside of it, all within the bound, can be farther."""
    far, picked = far.copy(), list[int]()
    while len(picked) < most:
        best = int(far.argmax())
        if far[best] < max(bound, 0.0):
            break
        picked.append(best)
        np.minimum(far, mutual[best], out=far)
        far[picked] = -1.0
    return picked


def k_means(space: Space, count: int, rng: np.random.Generator) -> Choice:
    """k-means++: each row is drawn with a probability in proportion to D², the square of its distance to the nearest.

    It begins with a row of each class, drawn evenly. The rows are the seeds themselves, with no iterations of k-means
    behind them, which would make means out of rows.
    """
    return _drawn(space, count, rng).choice()


def _drawn(space: Space, count: int, rng: np.random.Generator) -> Cover:
    cover = Cover(space)
    cover.add([int(rng.integers(own.start, own.stop)) for own in _largest(space, count)])
    while len(cover.chosen) < count:
        far = cover.distance.double().numpy()
        ends, left = far.cumsum(), count - len(cover.chosen)
        if not ends[-1]:  # all rows that are left repeat chosen ones
            others = np.setdiff1d(np.arange(len(far)), cover.chosen)
            cover.add(rng.choice(others, left, replace=False).tolist())
            break
        size = min(_BLOCK, 4 * left)
        block = torch.from_numpy(np.searchsorted(ends, rng.random(size) * ends[-1], side="right"))
        wanted = rng.random(size) * far[block]
        picked = _accepted(far[block], wanted, _mutual(space, block), left)
        cover.add(block[picked].tolist())
    return cover


def _accepted(
    far: NDArray[np.float64], wanted: NDArray[np.float64], mutual: NDArray[np.float32], most: int
) -> list[int]:
    """Rows drawn by their bounds are taken with probability D² / bound, which is to draw them by D² itself."""
    now, picked = far.copy(), list[int]()
    for row in range(len(far)):
        if len(picked) < most and wanted[row] < now[row]:
            picked.append(row)
            np.minimum(now, mutual[row], out=now)
    return picked


def sensitivity(space: Space, count: int, rng: np.random.Generator) -> Choice:
    """Importance sampling by how much a row can matter to a clustering (Feldman-Langberg).

    k-means++ gives k = √count centres (at least one a class); with the mean c of all d² a row's sensitivity is α·d²/c +
    2α·(the mean d² of its cluster)/c + 4·n/(the size of its cluster), α = 16·(ln k + 2). Rows are drawn with
    probabilities π in proportion to it and weigh 1/π: so the weighted sum of any function of a row is an unbiased
    estimate of its sum over all rows. (The papers draw with replacement; here no row is drawn twice.)
    """
    n = len(space.order)
    cover = _drawn(space, min(n, max(len(space.classes), round(math.sqrt(count)))), rng)
    distance, cluster = cover.distance.double().numpy(), cover.nearest.numpy()
    mean = distance.mean() or 1.0
    size = np.bincount(cluster)
    spread = np.bincount(cluster, distance) / size
    alpha = 16 * (math.log(len(cover.chosen)) + 2)
    chances = inclusion(alpha * (distance + 2 * spread[cluster]) / mean + 4 * n / size[cluster], count)
    places = systematic(chances, rng)
    return places, 1 / chances[places]


def inclusion(sizes: NDArray[np.float64], count: int) -> NDArray[np.float64]:
    """Probabilities in proportion to sizes that add up to a count, where none is above 1.

    >>> inclusion(np.array([8.0, 1.0, 1.0]), 2).tolist()
    [1.0, 0.5, 0.5]
    """
    chances, certain = np.zeros(len(sizes)), np.zeros(len(sizes), dtype=bool)
    while True:
        left = ~certain
        chances[left] = sizes[left] * ((count - certain.sum()) / sizes[left].sum())
        above = left & (chances >= 1)
        if not above.any():
            return chances
        chances[above], certain = 1.0, certain | above


def systematic(chances: NDArray[np.float64], rng: np.random.Generator) -> Rows:
    """Places drawn so that each is among them with its own probability, none twice, and always as many in all.

    Of any places in a row, such as those of a class, there are as many as their chances add up to, but for one.
    """
    certain, others = np.flatnonzero(chances >= 1), np.flatnonzero(chances < 1)
    ends = chances[others].cumsum()
    count = round(float(ends[-1])) if len(ends) else 0
    if not count:
        return certain
    marks = (rng.random() + np.arange(count)) * (ends[-1] / count)
    return np.concatenate([certain, others[np.searchsorted(ends, marks)]])
