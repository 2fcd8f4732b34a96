"""Coreset constructions by distance: k-center, k-means++ and sensitivity sampling.

T. Gonzalez, "Clustering to minimize the maximum intercluster distance" (1985); D. Arthur and S. Vassilvitskii,
"k-means++: the advantages of careful seeding" (2007); D. Feldman and M. Langberg, "A unified framework for
approximating and clustering data" (2011), with the sensitivities of O. Bachem, M. Lucic and A. Krause, "Practical
coreset constructions for machine learning" (2017).

Distances count within a class only: a row never represents a row of another class. So a class is left out only where
there are more classes than rows to choose; then the largest classes are kept.

Both greedy methods choose one row after the other. Here they process a block of rows at a time and still choose the
same rows: the distance to the nearest chosen row can only fall, so an outdated distance is an upper bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..parties.partition import RowIndices
from .features import FeatureSpace

WeightedRows: TypeAlias = tuple[RowIndices, NDArray[np.float64]]
"""Positions in a feature space, and the weight of each."""

_BLOCK = 512  # rows whose mutual distances are computed at once
_CHUNK = 4096  # rows whose distances to a block are in memory at once: 8 MB


class Cover:
    """The chosen rows, and for every position the nearest chosen row of its class."""

    def __init__(self, space: FeatureSpace) -> None:
        self.space = space
        self.chosen: list[int] = []
        self.distance = torch.full((len(space.order),), math.inf)
        """Squared distance to the nearest chosen row ``[n]``; infinite where the class has none."""
        self.nearest = torch.full((len(space.order),), -1)
        """Index of that row among the chosen ones ``[n]``; -1 for none."""

    def add(self, indices: Sequence[int]) -> None:
        """Add rows to the cover."""
        new = torch.tensor(indices, dtype=torch.int64)
        chosen_indices = torch.arange(len(indices)) + len(self.chosen)
        self.chosen += indices
        for members in self.space.class_slices:
            inside = (new >= members.start) & (new < members.stop)
            if inside.any():
                for begin in range(members.start, members.stop, _CHUNK):
                    self._update_nearest(
                        slice(begin, min(begin + _CHUNK, members.stop)), new[inside], chosen_indices[inside]
                    )
        self.distance[new], self.nearest[new] = 0.0, chosen_indices

    def _update_nearest(self, part: slice, new: Tensor, chosen_indices: Tensor) -> None:
        distance, nearest = squared_distances(self.space, part, new).min(1)
        closer = distance < self.distance[part]
        self.distance[part] = torch.where(closer, distance, self.distance[part])
        self.nearest[part] = torch.where(closer, chosen_indices[nearest], self.nearest[part])

    def weighted_rows(self) -> WeightedRows:
        """Return every chosen row, weighted by the number of rows nearest to it, itself included."""
        weights = torch.bincount(self.nearest[self.nearest >= 0], minlength=len(self.chosen))
        return np.array(self.chosen), weights.double().numpy()


def squared_distances(space: FeatureSpace, rows: slice | Tensor, others: Tensor) -> Tensor:
    """Return squared distances ``[rows, others]``."""
    distances = torch.addmm(space.squared_norms[others], space.points[rows], space.points[others].T, alpha=-2)
    return distances.add_(space.squared_norms[rows, None]).clamp_(min=0)


def _block_distances(space: FeatureSpace, block: Tensor) -> NDArray[np.float32]:
    """Return squared distances within a block; infinite between classes."""
    distances = squared_distances(space, block, block)
    distances[space.class_indices[block, None] != space.class_indices[block]] = math.inf
    distances[block[:, None] == block] = 0.0  # a row may be in the block twice
    mutual: NDArray[np.float32] = distances.numpy()
    return mutual


def _largest_classes(space: FeatureSpace, count: int) -> list[slice]:
    """Return the classes that are represented: all of them, or the largest ones."""
    return [space.class_slices[k] for k in np.argsort(-space.class_sizes, kind="stable")[:count]]


def k_center(space: FeatureSpace, count: int, rng: np.random.Generator) -> WeightedRows:
    """Choose rows farthest-first; the covering radius is at most twice the optimum (Gonzalez).

    It is deterministic: it starts with the row of each class that is nearest to the mean of the class.
    """
    cover = Cover(space)
    cover.add([_central_row(space, own) for own in _largest_classes(space, count)])
    while len(cover.chosen) < count:
        distances = cover.distance.clone()
        distances[cover.chosen] = -1.0
        remaining = count - len(cover.chosen)
        size = min(_BLOCK, 4 * remaining, len(distances))
        ranked, indices = distances.topk(min(size + 1, len(distances)))
        block = indices[:size]
        bound = float(ranked[size]) if len(ranked) > size else -1.0
        picked = _pick_farthest(ranked[:size].numpy(), bound, _block_distances(space, block), count=remaining)
        cover.add(block[picked].tolist())
    return cover.weighted_rows()


def _central_row(space: FeatureSpace, members: slice) -> int:
    points = space.points[members]
    mean = points.mean(0, dtype=torch.float64).to(points.dtype)
    return int(members.start) + int((points - mean).square().sum(1).argmin())


def _pick_farthest(distances: NDArray[np.float32], bound: float, mutual: NDArray[np.float32], count: int) -> list[int]:
    """Pick up to ``count`` rows of a block, farthest first; stop below ``bound``, the largest distance outside."""
    distances = distances.copy()
    picked = list[int]()
    while len(picked) < count:
        best = int(distances.argmax())
        if distances[best] < max(bound, 0.0):
            break
        picked.append(best)
        np.minimum(distances, mutual[best], out=distances)
        distances[picked] = -1.0
    return picked


def k_means_seeding(space: FeatureSpace, count: int, rng: np.random.Generator) -> WeightedRows:
    """Draw rows by k-means++: with probability proportional to D², the squared distance to the chosen rows.

    It starts with a row of each class, drawn uniformly. The rows are the seeds themselves: iterations of k-means would
    replace rows by means.
    """
    return _draw_cover(space, count, rng).weighted_rows()


def _draw_cover(space: FeatureSpace, count: int, rng: np.random.Generator) -> Cover:
    cover = Cover(space)
    cover.add([int(rng.integers(own.start, own.stop)) for own in _largest_classes(space, count)])
    while len(cover.chosen) < count:
        squared_distances_to_cover = cover.distance.double().numpy()
        cumulative = squared_distances_to_cover.cumsum()
        remaining = count - len(cover.chosen)
        if not cumulative[-1]:  # all remaining rows repeat chosen ones
            others = np.setdiff1d(np.arange(len(squared_distances_to_cover)), cover.chosen)
            cover.add(rng.choice(others, remaining, replace=False).tolist())
            break
        size = min(_BLOCK, 4 * remaining)
        block = torch.from_numpy(np.searchsorted(cumulative, rng.random(size) * cumulative[-1], side="right"))
        thresholds = rng.random(size) * squared_distances_to_cover[block]
        picked = _accept_rows(
            squared_distances_to_cover[block], thresholds, _block_distances(space, block), count=remaining
        )
        cover.add(block[picked].tolist())
    return cover


def _accept_rows(
    bounds: NDArray[np.float64], thresholds: NDArray[np.float64], mutual: NDArray[np.float32], count: int
) -> list[int]:
    """Accept rows drawn by their bounds with probability D² / bound, which equals drawing them by D²."""
    current = bounds.copy()
    picked = list[int]()
    for row in range(len(bounds)):
        if len(picked) < count and thresholds[row] < current[row]:
            picked.append(row)
            np.minimum(current, mutual[row], out=current)
    return picked


def sensitivity_sampling(space: FeatureSpace, count: int, rng: np.random.Generator) -> WeightedRows:
    """Sample rows by importance: by how much a row can matter to a clustering (Feldman-Langberg).

    k-means++ gives k = √count centers (at least one per class). With the mean c of all d² a row's sensitivity is α·d²/c
    + 2α·(the mean d² of its cluster)/c + 4·n/(the size of its cluster), α = 16·(ln k + 2). Rows are drawn with
    probabilities π in proportion to it and weigh 1/π. So the weighted sum of any function of a row is an unbiased
    estimate of its sum over all rows. The papers draw with replacement; here no row is drawn twice.
    """
    n = len(space.order)
    cover = _draw_cover(space, min(n, max(len(space.class_slices), round(math.sqrt(count)))), rng)
    distance = cover.distance.double().numpy()
    cluster = cover.nearest.numpy()
    mean = distance.mean() or 1.0
    size = np.bincount(cluster)
    spread = np.bincount(cluster, distance) / size
    alpha = 16 * (math.log(len(cover.chosen)) + 2)
    probabilities = inclusion_probabilities(
        alpha * (distance + 2 * spread[cluster]) / mean + 4 * n / size[cluster], count
    )
    indices = systematic_sample(probabilities, rng)
    return indices, 1 / probabilities[indices]


def inclusion_probabilities(sizes: NDArray[np.float64], count: int) -> NDArray[np.float64]:
    """Return probabilities that add up to ``count``: proportional to the sizes, but at most 1.

    >>> inclusion_probabilities(np.array([8.0, 1.0, 1.0]), 2).tolist()
    [1.0, 0.5, 0.5]
    """
    probabilities = np.zeros(len(sizes))
    certain = np.zeros(len(sizes), dtype=bool)
    while True:
        uncertain = ~certain
        probabilities[uncertain] = sizes[uncertain] * ((count - certain.sum()) / sizes[uncertain].sum())
        above = uncertain & (probabilities >= 1)
        if not above.any():
            return probabilities
        probabilities[above], certain = 1.0, certain | above


def systematic_sample(probabilities: NDArray[np.float64], rng: np.random.Generator) -> RowIndices:
    """Draw a fixed number of distinct positions, each with its own probability.

    Any contiguous range of positions, such as a class, gets as many as its probabilities add up to, give or take one.
    """
    certain = np.flatnonzero(probabilities >= 1)
    others = np.flatnonzero(probabilities < 1)
    cumulative = probabilities[others].cumsum()
    count = round(float(cumulative[-1])) if len(cumulative) else 0
    if not count:
        return certain
    marks = (rng.random() + np.arange(count)) * (cumulative[-1] / count)
    return np.concatenate([certain, others[np.searchsorted(cumulative, marks)]])
