"""Partitions of one data set into parties that differ: each function returns the sorted row numbers of every party.

No row goes to two parties, and the same generator state gives the same partition. All rows are used, except by
:func:`by_size`, by :func:`by_group` with `min_rows` > 1, and by :func:`round_robin` without `fill`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..core.settings import check_settings, setting, unknown_name_error
from ..errors import PartyError

RowIndices: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True)
class _PartitionSettings:
    count: int = setting(help="number of parties", least=1)
    alpha: float = setting(
        1.0, "similarity of the parties: small gives one class each, large gives i.i.d. data", above=0
    )
    classes: int = setting(1, "number of classes per party", least=1)
    min_rows: int = setting(1, "minimum number of rows per party", least=0)
    sigma: float = setting(2.0, "spread of log-normal sizes: 0 makes all equal", least=0, most=50)  # more overflows
    exponent: float = setting(
        2.0, "exponent of the power law: the share of parties above a size s falls as s^(1-exponent)", above=1
    )


def by_dirichlet(
    y: ArrayLike, count: int, alpha: float, rng: np.random.Generator, min_rows: int = 1
) -> list[RowIndices]:
    """Distribute the rows of each class in shares drawn from a Dirichlet(alpha) over the parties.

    A party with fewer than `min_rows` rows gets random rows from the largest party.

    >>> north, south = by_dirichlet([0, 0, 0, 1, 1, 1], 2, 0.1, np.random.default_rng(0))
    >>> sorted([*north.tolist(), *south.tolist()])
    [0, 1, 2, 3, 4, 5]
    """
    settings = _PartitionSettings(index(count), alpha=float(alpha), min_rows=index(min_rows))
    check_settings(settings, "by_dirichlet")
    labels = _validated_labels(y)
    _check_enough(len(labels), settings.count, settings.min_rows)
    row_owner = np.zeros(len(labels), dtype=np.int64)  # [n]
    for rows in _rows_by_class(labels, rng):
        shares = rng.dirichlet(np.full(settings.count, settings.alpha))  # [count]
        ends = np.cumsum(shares)[:-1] * len(rows)
        row_owner[rows] = np.searchsorted(ends, np.arange(len(rows)) + 0.5)
    _top_up(row_owner, settings.count, settings.min_rows, rng=rng)
    return _rows_by_owner(row_owner, settings.count)


def by_label(y: ArrayLike, count: int, classes: int, rng: np.random.Generator) -> list[RowIndices]:
    """Give every party exactly `classes` classes, and split each class evenly among its parties.

    >>> sorted(rows.tolist() for rows in by_label([0, 0, 1, 1, 2, 2], 3, 1, np.random.default_rng(0)))
    [[0, 1], [2, 3], [4, 5]]
    """
    settings = _PartitionSettings(index(count), classes=index(classes))
    check_settings(settings, "by_label")
    labels = _validated_labels(y)
    by_class = _rows_by_class(labels, rng)
    holders = _assign_classes(settings, len(by_class), rng)
    row_owner = np.zeros(len(labels), dtype=np.int64)  # [n]
    for rows, owners in zip(by_class, holders, strict=True):
        if len(rows) < len(owners):
            raise PartyError(
                f"Class {labels[rows[0]]} has {len(rows)} rows for the {len(owners)} parties that should hold it. "
                f"Ask for fewer than {settings.count} parties, or fewer than {settings.classes} classes per party."
            )
        row_owner[rows] = np.asarray(owners)[np.arange(len(rows)) % len(owners)]
    return _rows_by_owner(row_owner, settings.count)


def iid(n: int, count: int, rng: np.random.Generator) -> list[RowIndices]:
    """Distribute `n` rows at random (i.i.d.), in parts that differ by one row at most.

    >>> [len(rows) for rows in iid(10, 3, np.random.default_rng(0))]
    [4, 3, 3]
    """
    settings = _PartitionSettings(index(count))
    check_settings(settings, "iid")
    _check_enough(index(n), settings.count, 1)
    row_owner = np.empty(n, dtype=np.int64)  # [n]
    row_owner[rng.permutation(n)] = np.arange(n) % settings.count
    return _rows_by_owner(row_owner, settings.count)


def by_size(n: int, sizes: ArrayLike, rng: np.random.Generator) -> list[RowIndices]:
    """Give party k `sizes[k]` of `n` rows at random.

    >>> [len(rows) for rows in by_size(10, [5, 1, 2], np.random.default_rng(0))]
    [5, 1, 2]
    """
    row_counts = _validated_sizes(sizes)
    if row_counts.sum() > n:
        raise PartyError(f"These sizes need {row_counts.sum()} rows. Got {n}. Ask for fewer or smaller parties.")
    parts = np.split(rng.permutation(index(n)), np.cumsum(row_counts))[:-1]
    return [np.sort(part) for part in parts]


def by_group(groups: ArrayLike, min_rows: int = 1) -> dict[str, RowIndices]:
    """Return one party per group, by the group's name; groups with fewer than `min_rows` rows are left out.

    >>> by_group(["ann", "bob", "ann"], min_rows=2)
    {'ann': array([0, 2])}
    """
    check_settings(_PartitionSettings(1, min_rows=index(min_rows)), "by_group")
    names, row_owner = np.unique(np.asarray(groups), return_inverse=True)
    parts = _rows_by_owner(row_owner, len(names)) if len(names) else []
    rows_by_group = {str(name): rows for name, rows in zip(names, parts, strict=True) if len(rows) >= min_rows}
    if not rows_by_group:
        largest = max(map(len, parts), default=0)
        raise PartyError(
            f"None of the {len(names)} groups has {min_rows} rows; the largest has {largest}. "
            "Ask for a smaller minimum."
        )
    return rows_by_group


def round_robin(
    y: ArrayLike, row_counts: ArrayLike, rng: np.random.Generator, min_rows: int = 1, fill: bool = False
) -> list[RowIndices]:
    """Give party u the classes u, u+1, … (modulo the number of classes), and `row_counts[u, j]` rows of its j-th.

    If a class has too few rows, its counts shrink in proportion, to `min_rows` at least. With `fill` they also grow
    until all rows are used.

    >>> [rows.tolist() for rows in round_robin([0, 1, 0, 1], [[1, 1], [1, 1]], np.random.default_rng(0))]
    [[0, 1], [2, 3]]
    """
    labels = _validated_labels(y)
    desired_counts = np.asarray(row_counts, dtype=np.float64)  # [count, classes]
    by_class = _rows_by_class(labels, rng)
    check_settings(
        _PartitionSettings(len(desired_counts), classes=desired_counts.shape[1], min_rows=index(min_rows)),
        "round_robin",
    )
    available = len(by_class)
    if desired_counts.shape[1] > available:
        raise PartyError(f"A party can have at most the {available} classes there are. Got {desired_counts.shape[1]}.")
    party_classes = round_robin_classes(len(desired_counts), desired_counts.shape[1], available)
    parts: list[list[RowIndices]] = [[] for _ in desired_counts]
    for label, rows in enumerate(by_class):
        owners, slots = np.nonzero(party_classes == label)
        sizes = _allocate(
            desired_counts[owners, slots], len(rows), index(min_rows), fill=fill, label=f"Class {labels[rows[0]]}"
        )
        for party, part in zip(owners, np.split(rows, np.cumsum(sizes)), strict=False):
            parts[party].append(part)
    return [np.sort(np.concatenate(part)) for part in parts]


def round_robin_classes(count: int, classes: int, available: int) -> RowIndices:
    """Return the classes of each party when they are assigned in turn, ``[count, classes]``.

    >>> round_robin_classes(3, 2, 3).tolist()
    [[0, 1], [1, 2], [2, 0]]
    """
    party_classes: RowIndices = (np.arange(count)[:, None] + np.arange(classes)) % available
    return party_classes


def log_normal_sizes(
    count: int, rng: np.random.Generator, mean: float = 4.0, sigma: float = 2.0, min_rows: int = 50
) -> RowIndices:
    """Return sizes ⌊log-normal(mean, sigma)⌋ + `min_rows`; the defaults are those of FedProx's synthetic data.

    >>> log_normal_sizes(5, np.random.default_rng(0), min_rows=10).tolist()
    [80, 51, 206, 77, 28]
    """
    check_settings(_PartitionSettings(index(count), sigma=float(sigma), min_rows=index(min_rows)), "log_normal_sizes")
    return np.floor(rng.lognormal(mean, sigma, count)).astype(np.int64) + min_rows


def power_law_sizes(count: int, rng: np.random.Generator, exponent: float = 2.0, min_rows: int = 10) -> RowIndices:
    """Return sizes of at least `min_rows` whose share above s falls as s^(1-exponent).

    >>> power_law_sizes(5, np.random.default_rng(0)).tolist()
    [19, 27, 10, 10, 17]
    """
    check_settings(
        _PartitionSettings(index(count), exponent=float(exponent), min_rows=index(min_rows)), "power_law_sizes"
    )
    return np.floor(min_rows * (1 + rng.pareto(exponent - 1, count))).astype(np.int64)


SPLITS = ("dirichlet", "iid", "label", "lognormal", "powerlaw", "round_robin")


def split_rows(
    y: ArrayLike,
    split: str,
    count: int,
    rng: np.random.Generator,
    alpha: float = 0.1,
    classes: int = 2,
    sigma: float = 2.0,
    exponent: float = 2.0,
) -> list[RowIndices]:
    """Partition all rows by the name of a split; each split uses its own settings.

    `alpha` is for "dirichlet", `classes` for "label" and "round_robin", `sigma` for "lognormal" and "round_robin",
    `exponent` for "powerlaw". Sizes keep their proportions, with at least one row per party.

    >>> [len(rows) for rows in split_rows([0, 0, 0, 1, 1, 1], "round_robin", 2, np.random.default_rng(0), classes=1)]
    [3, 3]
    """
    if split not in SPLITS:
        raise unknown_name_error("split", split, SPLITS)
    check_settings(
        _PartitionSettings(index(count), alpha=float(alpha), classes=index(classes), sigma=sigma, exponent=exponent),
        "the split",
    )
    n = len(_validated_labels(y))
    if split == "dirichlet":
        return by_dirichlet(y, count, alpha, rng=rng)
    if split == "label":
        return by_label(y, count, classes, rng=rng)
    if split == "iid":
        return iid(n, count, rng)
    if split == "round_robin":
        return round_robin(y, rng.lognormal(0, sigma, (count, classes)), rng, fill=True)
    sizes = rng.lognormal(0, sigma, count) if split == "lognormal" else 1 + rng.pareto(exponent - 1, count)
    return by_size(n, _allocate(sizes, n, 1, fill=True, label="The data set"), rng)


def _validated_sizes(sizes: ArrayLike) -> RowIndices:
    values = np.asarray(sizes)
    if values.ndim != 1 or not values.size or values.dtype.kind not in "iu" or values.min() < 0:
        raise PartyError(f"Sizes must be whole numbers >= 0, one per party. Got {sizes!r:.80}.")
    return values.astype(np.int64)


def _allocate(desired_counts: NDArray[np.float64], available: int, min_rows: int, fill: bool, label: str) -> RowIndices:
    """Return whole numbers >= `min_rows` near the desired counts, with a sum <= `available`, or equal with `fill`."""
    if available < min_rows * len(desired_counts):
        raise PartyError(
            f"{label} has {available} rows for the {len(desired_counts)} parties that should hold at least {min_rows} "
            "of them. Ask for fewer parties, fewer classes per party, or a smaller minimum."
        )
    if not len(desired_counts):
        return np.zeros(0, dtype=np.int64)
    excess = np.maximum(desired_counts - min_rows, 0) if not fill else desired_counts
    budget = available - min_rows * len(desired_counts)
    total = excess.sum()
    if fill or total > budget:
        excess = excess * (budget / total) if total else np.full(len(desired_counts), budget / len(desired_counts))
    sizes = np.floor(excess)
    remainder = int(min(round(excess.sum()), budget) - sizes.sum())
    sizes[np.argsort(sizes - excess, kind="stable")[:remainder]] += 1  # the largest remainders
    return sizes.astype(np.int64) + min_rows


def _validated_labels(y: ArrayLike) -> NDArray[Any]:
    labels = np.asarray(y)
    if labels.ndim != 1 or labels.dtype.kind not in "iub":
        raise PartyError(
            f"A split by label needs one whole number per row. Got shape {labels.shape} of {labels.dtype}. "
            "Turn the labels into a flat array of integers, or split with iid()."
        )
    return labels


def _rows_by_class(labels: NDArray[Any], rng: np.random.Generator) -> list[RowIndices]:
    return [rng.permutation(np.flatnonzero(labels == label)) for label in np.unique(labels)]


def _check_enough(n: int, count: int, min_rows: int) -> None:
    if n < count * min_rows:
        raise PartyError(
            f"{count} parties of at least {min_rows} rows need {count * min_rows} rows. Got {n}. "
            f"Ask for at most {n // min_rows} parties."
        )


def _top_up(row_owner: RowIndices, count: int, min_rows: int, rng: np.random.Generator) -> None:
    """Move single rows in place, from the largest parties, until no party has fewer than `min_rows`."""
    sizes = np.bincount(row_owner, minlength=count)  # [count]
    for party in np.flatnonzero(sizes < min_rows):
        while sizes[party] < min_rows:
            donor = int(sizes.argmax())
            row_owner[rng.choice(np.flatnonzero(row_owner == donor))] = party
            sizes[donor] -= 1
            sizes[party] += 1


def _assign_classes(settings: _PartitionSettings, available: int, rng: np.random.Generator) -> Sequence[Sequence[int]]:
    """Return the parties of each class: every party takes the classes with the fewest parties, ties at random."""
    if settings.classes > available:
        raise PartyError(f"A party can have at most the {available} classes there are. Got classes={settings.classes}.")
    if settings.count * settings.classes < available:
        raise PartyError(
            f"{settings.count} parties of {settings.classes} classes cannot hold all {available} classes. "
            f"Ask for at least {-(-available // settings.classes)} parties, or leave classes out of the data first."
        )
    holders: list[list[int]] = [[] for _ in range(available)]
    holder_counts = np.zeros(available, dtype=np.int64)  # [classes]
    for party in range(settings.count):
        chosen = np.lexsort((rng.random(available), holder_counts))[: settings.classes]
        holder_counts[chosen] += 1
        for label in chosen:
            holders[label].append(party)
    return holders


def _rows_by_owner(row_owner: RowIndices, count: int) -> list[RowIndices]:
    order = np.argsort(row_owner, kind="stable")
    return np.split(order, np.cumsum(np.bincount(row_owner, minlength=count))[:-1])
