"""A few rows that stand for all rows of a party: how they are chosen, and what each of them weighs.

"Asynchronous Collaborative Learning Across Data Silos" (Tuor, Lockhart and Magazzeni, 2021), §5.1: a small summary of a
party's data is left with the centre and stands in for it when it is away. The paper does not say how it is made ("a
multitude of techniques exist"); it takes 5 % of the rows. All methods here choose real rows, so what leaves can be
looked at before it does.
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
    """Rows of a party and their weights, which add up to the number of rows that they stand for."""

    x: Tensor  # [m, ...]
    y: Tensor  # [m, ...]
    weights: Tensor  # [m], float64

    def as_party(self, name: str) -> Party:
        """A party that trains on these rows, and draws them in proportion to their weights; it has no test set."""
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
    """A coreset together with where it is from, which stays with the party."""

    rows: RowIndices  # [m] of the party's training rows, rising
    coreset: Coreset


def uniform_rows(space: FeatureSpace, count: int, rng: np.random.Generator) -> WeightedRows:
    """Rows drawn evenly, all of one weight."""
    n = len(space.order)
    return rng.choice(n, count, replace=False), np.full(count, n / count)


def balanced_rows(space: FeatureSpace, count: int, rng: np.random.Generator) -> WeightedRows:
    """As many rows of every class as of the others, where it has so many, drawn evenly within it."""
    counts = balanced_counts(space.class_sizes, count)
    parts = [
        own.start + rng.choice(size, k, replace=False)
        for own, size, k in zip(space.class_slices, space.class_sizes, counts, strict=True)
    ]
    return np.concatenate(parts), _class_weights(space.class_sizes, counts)


def herding_rows(space: FeatureSpace, count: int, rng: np.random.Generator) -> WeightedRows:
    """Rows of every class whose mean follows the mean of the class, one after the other; as many a class as `balanced`.

    S.-A. Rebuffi et al., "iCaRL: incremental classifier and representation learning" (2017), Algorithm 4, here without
    scaling points to a length of 1, and never a row twice. It draws nothing.
    """
    counts = balanced_counts(space.class_sizes, count)
    parts = [
        own.start + _herd_class(space.points[own], int(k)) for own, k in zip(space.class_slices, counts, strict=True)
    ]
    return np.concatenate(parts), _class_weights(space.class_sizes, counts)


def _herd_class(points: Tensor, count: int) -> RowIndices:
    """argmin over rows z of |mean - (s + z) / k|² for k = 1, 2, …, where s is the sum of those chosen before."""
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
    """How many rows each class gives: as equal as their sizes allow, and what is left over to the largest classes.

    >>> level(np.array([100, 3, 50]), 20).tolist()
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
    """Every chosen row stands for an equal part of its class."""
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
    """Raise :class:`SettingError` unless a party has these columns; who names them, and where, is for the message."""
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
    """How a party chooses its coreset (§5.1); the same rows for the same data, seed and, where one is used, model.

    So in the input's space choosing again shows no more. In the other spaces a later model chooses other rows, and with
    every return more of a party's rows are known: what ever leaves is bounded by the party's `Agreed`, not by `share`.
    `uniform` and `balanced` measure no distance and so are alike in all spaces. `uniform` may miss a rare class; so may
    `sensitivity`, though it seeks what is rare; the others have every class that the party has, or the largest ones
    where `count` is smaller than their number. Columns in `drop` are 0 in the coreset, since a model's input must keep
    its shape, and the choice does not see them either. All rows are the party's data as they are, by any method.

    >>> from descant.parties import digits
    >>> coreset = Selection(share=0.1, by="k-center")(digits()["3"], seed=0)
    >>> len(coreset.x), float(coreset.weights.sum())
    (6, 64.0)
    """

    share: float = setting(0.05, "the share of its rows that a party gives", above=0, most=1)
    count: int | None = setting(None, "how many rows it gives, instead of a share", least=1, whole=True)
    method: str = setting("uniform", "how they are chosen", one_of=tuple(CONSTRUCTIONS))
    space: str = setting("input", "where distances are measured", one_of=("input", *FEATURE_SPACES))
    drop_columns: tuple[int, ...] = setting((), "columns that must not leave", least=0, whole=True)

    def __call__(self, party: Party, seed: int, features: Features | None = None) -> Coreset:
        """The party's coreset."""
        return self.choose(party, seed, features).coreset

    def choose(self, party: Party, seed: int, features: Features | None = None) -> SelectedCoreset:
        """The party's coreset, and which of its rows they are.

        Spaces other than the input need `features`: ``spaces.embedding(module)`` or ``spaces.gradient(module)``.
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
        """The coreset of rows that were chosen before."""
        return Coreset(self._remaining_features(party)[rows], party.y[rows], weights)

    def coreset_size(self, party: Party) -> int:
        """How many rows a party is asked for."""
        if self.count is None:
            return max(1, round(self.share * party.samples))
        if self.share != Selection.share:
            raise SettingError(f"Give Selection a share or a count, not both. Its share is {self.share:g}.")
        if self.count > party.samples:
            raise SettingError(
                f"The 'count' of Selection is {self.count}, and party {party.name!r} has {party.samples} rows. Ask for "
                "at most so many, or for a share."
            )
        return self.count

    def _remaining_features(self, party: Party) -> Tensor:
        """The features with 0 in the columns that must not leave."""
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
                    f"The space {self.space!r} needs a model. Give features=spaces.{self.space}(module), or take "
                    "space='input'."
                )
            return features(x, party.y)
        if not x.is_floating_point():
            raise SettingError(
                f"The features of party {party.name!r} are whole numbers (of words, say), between which there is no "
                f"distance. Take by='uniform' or 'balanced', or space='embedding'; not by={self.method!r} in the input."
            )
        return x
