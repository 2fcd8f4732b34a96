"""Selection of a coreset: a few weighted rows that represent all rows of a party.

"Asynchronous Collaborative Learning Across Data Silos" (Tuor, Lockhart and Magazzeni, 2021), §5.1: the server keeps a
small summary of a party's data and trains on it while the party is away. The paper does not say how it is made ("a
multitude of techniques exist"); it takes 5 % of the rows. All methods here choose real rows, so a party can inspect
what would leave.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from ..core.seeds import stream
from ..core.settings import check_settings, setting
from ..errors import PartyError, SettingError
from ..parties.partition import RowIndices
from ..parties.party import Party
from .constructions import WeightedRows, k_center, k_means_seeding, sensitivity_sampling
from .features import FEATURE_SPACES, Features, FeatureSpace


@dataclass(frozen=True, eq=False)
class Coreset:
    """Rows of a party and their weights, which add up to the number of rows that they represent."""

    x: Tensor  # [m, ...]
    y: Tensor  # [m, ...]
    weights: Tensor  # [m], float64

    def as_party(self, name: str) -> Party:
        """Return a party without a test set that draws these rows in proportion to their weights."""
        m = len(self.x)
        label = f"The coreset of party {name!r}"
        if not m or len(self.y) != m or self.weights.shape != (m,):
            found = f"{m} rows, {len(self.y)} targets and weights {tuple(self.weights.shape)}"
            raise PartyError(f"{label} must have rows, one target and one weight each. Got {found}.")
        if self.x.is_floating_point() and not bool(self.x.isfinite().all()):
            raise PartyError(f"{label} holds numbers that are not finite. The party must make a new one.")
        if not bool(((self.weights > 0) & self.weights.isfinite()).all()):
            raise PartyError(f"{label} has a weight that is not a number > 0. The party must make a new one.")
        return Party(name, self.x, self.y, x_test=self.x[:0], y_test=self.y[:0], weights=self.weights)


@dataclass(frozen=True, eq=False)
class SelectedCoreset:
    """A coreset with the numbers of its rows, which stay with the party."""

    rows: RowIndices  # [m] among the party's training rows, rising
    coreset: Coreset


def uniform_rows(space: FeatureSpace, count: int, rng: np.random.Generator) -> WeightedRows:
    """Draw rows uniformly, with equal weights."""
    n = len(space.order)
    return rng.choice(n, count, replace=False), np.full(count, n / count)


def balanced_rows(space: FeatureSpace, count: int, rng: np.random.Generator) -> WeightedRows:
    """Draw equally many rows of every class, as far as it has them, uniformly within the class."""
    counts = balanced_counts(space.class_sizes, count)
    parts = [
        own.start + rng.choice(size, k, replace=False)
        for own, size, k in zip(space.class_slices, space.class_sizes, counts, strict=True)
    ]
    return np.concatenate(parts), _class_weights(space.class_sizes, counts)


def herding_rows(space: FeatureSpace, count: int, rng: np.random.Generator) -> WeightedRows:
    """Choose rows of every class greedily so that their mean follows the class mean; class counts as in `balanced`.

    S.-A. Rebuffi et al., "iCaRL: incremental classifier and representation learning" (2017), Algorithm 4, here without
    scaling points to a length of 1, and never a row twice. It is deterministic.
    """
    counts = balanced_counts(space.class_sizes, count)
    parts = [
        own.start + _herd_class(space.points[own], int(k)) for own, k in zip(space.class_slices, counts, strict=True)
    ]
    return np.concatenate(parts), _class_weights(space.class_sizes, counts)


def _herd_class(points: Tensor, count: int) -> RowIndices:
    """Return argmin_z |mean - (s + z) / k|² for k = 1, 2, …, with s the sum of earlier rows."""
    squares = points.square().sum(1)
    mean = points.mean(0, dtype=torch.float64)
    residual = torch.zeros_like(mean)
    chosen = list[int]()  # k·mean - s, which stays as small as a row
    for _ in range(count):
        residual += mean
        costs = squares - 2 * (points @ residual.to(points.dtype))
        costs[chosen] = torch.inf
        chosen.append(int(costs.argmin()))
        residual -= points[chosen[-1]]
    return np.array(chosen, dtype=np.int64)


def balanced_counts(sizes: RowIndices, count: int) -> RowIndices:
    """Return the number of rows per class: as equal as sizes allow, the remainder to the largest classes.

    >>> balanced_counts(np.array([100, 3, 50]), 20).tolist()
    [9, 3, 8]
    """
    counts = np.zeros_like(sizes)
    by_size = np.argsort(-sizes, kind="stable")
    while (remaining := count - int(counts.sum())) > 0:
        open_classes = by_size[counts[by_size] < sizes[by_size]]
        share = remaining // len(open_classes)
        open_classes = open_classes if share else open_classes[:remaining]
        counts[open_classes] = np.minimum(sizes[open_classes], counts[open_classes] + max(share, 1))
    return counts


def _class_weights(sizes: RowIndices, counts: RowIndices) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return weights by which every chosen row represents an equal part of its class."""
    return np.repeat(sizes / np.maximum(counts, 1), counts)


CONSTRUCTIONS: Mapping[str, Callable[[FeatureSpace, int, np.random.Generator], WeightedRows]] = MappingProxyType(
    {
        "uniform": uniform_rows,
        "balanced": balanced_rows,
        "k-means++": k_means_seeding,
        "k-center": k_center,
        "herding": herding_rows,
        "sensitivity": sensitivity_sampling,
    }
)


def check_columns(party: Party, columns: Sequence[int], name: str, owner: str) -> None:
    """Raise :class:`SettingError` unless a party has these columns; `name` and `owner` are for the message."""
    if not columns:
        return
    if party.x.dim() != 2:
        raise SettingError(
            f"The {name!r} of {owner} names columns of rows of numbers. Party {party.name!r} has features of shape "
            f"{tuple(party.x.shape[1:])}, which have none: leave {name!r} out."
        )
    if max(columns) >= party.x.shape[1]:
        raise SettingError(
            f"The {name!r} of {owner} must name columns from 0 to {party.x.shape[1] - 1}, which party {party.name!r} "
            f"has. Got {max(columns)}."
        )


@dataclass(frozen=True)
class Selection:
    """The method by which a party chooses its coreset (§5.1); deterministic in data, seed and, if used, model.

    In the input space choosing again reveals no more rows. In the other spaces a later model chooses other rows, so
    every return reveals more of them. The party's `CoresetLimit` bounds all rows that ever leave; `share` does not.
    `uniform` and `balanced` measure no distance, so they are equal in all spaces. `uniform` may miss a rare class; so
    may `sensitivity`, though it prefers rare rows. The others keep every class of the party, or the largest ones if
    `count` is smaller than their number. Columns in `drop_columns` are 0 in the coreset, since a model's input must
    keep its shape, and the choice ignores them. All chosen rows are the party's unchanged data.

    >>> from descant.parties import digits
    >>> coreset = Selection(share=0.1, method="k-center")(digits()["3"], seed=0)
    >>> len(coreset.x), float(coreset.weights.sum())
    (6, 64.0)
    """

    share: float = setting(0.05, "share of its rows that a party deposits", above=0, most=1)
    count: int | None = setting(None, "number of rows that it deposits, instead of a share", least=1, whole=True)
    method: str = setting("uniform", "construction that chooses the rows", one_of=tuple(CONSTRUCTIONS))
    space: str = setting("input", "space in which distances are measured", one_of=("input", *FEATURE_SPACES))
    drop_columns: tuple[int, ...] = setting((), "columns that must not leave the party", least=0, whole=True)

    def __call__(self, party: Party, seed: int, features: Features | None = None) -> Coreset:
        return self.choose(party, seed, features).coreset

    def choose(self, party: Party, seed: int, features: Features | None = None) -> SelectedCoreset:
        """Return the party's coreset with the numbers of its rows.

        Spaces other than the input need `features`: ``embedding_features(module)`` or ``gradient_features(module)``.
        """
        check_settings(self)
        x = self._remaining_features(party)
        count = self.coreset_size(party)
        rows = np.arange(party.samples)
        weights = np.ones(party.samples)
        if count < party.samples:
            space = FeatureSpace.from_targets(party.y, partial(self._space_points, party, x, features))
            indices, weights = CONSTRUCTIONS[self.method](space, count, stream(seed, 0, party.name, purpose="coreset"))
            rows = space.order[indices]
            order = np.argsort(rows)
            rows = rows[order]
            weights = weights[order] * (party.samples / weights.sum())
            x = x[torch.from_numpy(rows)]
        y = party.y[torch.from_numpy(rows)]
        return SelectedCoreset(rows, Coreset(x, y, torch.from_numpy(weights)))

    def rebuild(self, party: Party, rows: Tensor, weights: Tensor) -> Coreset:
        """Return the coreset of rows that were chosen before."""
        return Coreset(self._remaining_features(party)[rows], party.y[rows], weights)

    def coreset_size(self, party: Party) -> int:
        """Return the number of rows in a party's coreset."""
        if self.count is None:
            return max(1, round(self.share * party.samples))
        if self.share != Selection.share:
            raise SettingError(f"Give Selection a share or a count, not both. Its share is {self.share:g}.")
        if self.count > party.samples:
            raise SettingError(
                f"The 'count' of Selection is {self.count}, and party {party.name!r} has {party.samples} rows. Give "
                "at most that number, or a share."
            )
        return self.count

    def _remaining_features(self, party: Party) -> Tensor:
        """Return the party's features, with 0 in the columns that must not leave the party."""
        check_columns(party, self.drop_columns, "drop_columns", owner="Selection")
        if not self.drop_columns:
            return party.x
        x = party.x.clone()
        x[:, list(self.drop_columns)] = 0
        return x

    def _space_points(self, party: Party, x: Tensor, features: Features | None) -> Tensor:
        if self.space != "input":
            if features is None:
                raise SettingError(
                    f"The space {self.space!r} needs a model. Give features={self.space}_features(module), or use "
                    "space='input'."
                )
            return features(x, party.y)
        if not x.is_floating_point():
            raise SettingError(
                f"The features of party {party.name!r} are whole numbers (of words, say), which have no distance. "
                f"Use method='uniform' or 'balanced', or space='embedding'; not method={self.method!r} in the input."
            )
        return x
