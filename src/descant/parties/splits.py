"""One data set cut into parties that differ: each function returns the row numbers of every party, in rising order.

Every row goes to exactly one party, and the same generator state gives the same cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import PartyError
from ..settings import check, setting

Rows: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True)
class _Cut:
    count: int = setting(help="how many parties", least=1)
    alpha: float = setting(1.0, "how alike the parties are: small is one class each, large is i.i.d.", above=0)
    classes: int = setting(1, "how many classes a party has", least=1)
    least: int = setting(1, "how many rows every party has at least", least=0)


def by_dirichlet(y: ArrayLike, count: int, alpha: float, rng: np.random.Generator, least: int = 1) -> list[Rows]:
    """Deal the rows of each class out in shares drawn from a Dirichlet(alpha) over the parties.

    A party left with fewer than `least` rows gets random ones from whoever has most.

    >>> north, south = by_dirichlet([0, 0, 0, 1, 1, 1], 2, 0.1, np.random.default_rng(0))
    >>> sorted([*north.tolist(), *south.tolist()])
    [0, 1, 2, 3, 4, 5]
    """
    cut = _Cut(index(count), alpha=float(alpha), least=index(least))
    check(cut, "by_dirichlet")
    labels = _labels(y)
    _check_enough(len(labels), cut.count, cut.least)
    owner = np.zeros(len(labels), dtype=np.int64)  # [n]
    for rows in _rows_by_class(labels, rng):
        shares = rng.dirichlet(np.full(cut.count, cut.alpha))  # [count]
        ends = np.cumsum(shares)[:-1] * len(rows)
        owner[rows] = np.searchsorted(ends, np.arange(len(rows)) + 0.5)
    _fill_up(owner, cut.count, cut.least, rng)
    return _group(owner, cut.count)


def by_label(y: ArrayLike, count: int, classes: int, rng: np.random.Generator) -> list[Rows]:
    """Give every party exactly `classes` classes, and share each class evenly among those who have it.

    >>> sorted(rows.tolist() for rows in by_label([0, 0, 1, 1, 2, 2], 3, 1, np.random.default_rng(0)))
    [[0, 1], [2, 3], [4, 5]]
    """
    cut = _Cut(index(count), classes=index(classes))
    check(cut, "by_label")
    labels = _labels(y)
    by_class = _rows_by_class(labels, rng)
    holders = _deal_classes(cut, len(by_class), rng)
    owner = np.zeros(len(labels), dtype=np.int64)  # [n]
    for rows, who in zip(by_class, holders, strict=True):
        if len(rows) < len(who):
            raise PartyError(
                f"Class {labels[rows[0]]} has {len(rows)} rows for the {len(who)} parties that should hold it. "
                f"Ask for fewer parties than {cut.count}, or fewer classes a party than {cut.classes}."
            )
        owner[rows] = np.asarray(who)[np.arange(len(rows)) % len(who)]
    return _group(owner, cut.count)


def evenly(n: int, count: int, rng: np.random.Generator) -> list[Rows]:
    """Deal `n` rows out at random (i.i.d.), in parts that differ by one row at most.

    >>> [len(rows) for rows in evenly(10, 3, np.random.default_rng(0))]
    [4, 3, 3]
    """
    cut = _Cut(index(count))
    check(cut, "evenly")
    _check_enough(index(n), cut.count, 1)
    owner = np.empty(n, dtype=np.int64)  # [n]
    owner[rng.permutation(n)] = np.arange(n) % cut.count
    return _group(owner, cut.count)


def _labels(y: ArrayLike) -> NDArray[Any]:
    labels = np.asarray(y)
    if labels.ndim != 1 or labels.dtype.kind not in "iub":
        raise PartyError(
            f"A split by label needs one whole number a row. Got shape {labels.shape} of {labels.dtype}. "
            "Turn the labels into a flat array of integers, or split with evenly()."
        )
    return labels


def _rows_by_class(labels: NDArray[Any], rng: np.random.Generator) -> list[Rows]:
    return [rng.permutation(np.flatnonzero(labels == label)) for label in np.unique(labels)]


def _check_enough(n: int, count: int, least: int) -> None:
    if n < count * least:
        raise PartyError(
            f"{count} parties of at least {least} rows need {count * least} rows. Got {n}. "
            f"Ask for at most {n // least} parties."
        )


def _fill_up(owner: Rows, count: int, least: int, rng: np.random.Generator) -> None:
    """Move single rows, in place, until no party has fewer than `least`; whoever gives keeps at least that many."""
    sizes = np.bincount(owner, minlength=count)  # [count]
    for party in np.flatnonzero(sizes < least):
        while sizes[party] < least:
            giver = int(sizes.argmax())
            owner[rng.choice(np.flatnonzero(owner == giver))] = party
            sizes[giver] -= 1
            sizes[party] += 1


def _deal_classes(cut: _Cut, available: int, rng: np.random.Generator) -> Sequence[Sequence[int]]:
    """Who holds each class: every party takes those with the fewest holders so far, ties at random."""
    if cut.classes > available:
        raise PartyError(f"A party can have at most the {available} classes there are. Got classes={cut.classes}.")
    if cut.count * cut.classes < available:
        raise PartyError(
            f"{cut.count} parties of {cut.classes} classes cannot hold all {available} classes. "
            f"Ask for at least {-(-available // cut.classes)} parties, or leave classes out of the data first."
        )
    holders: list[list[int]] = [[] for _ in range(available)]
    held = np.zeros(available, dtype=np.int64)  # [classes]
    for party in range(cut.count):
        chosen = np.lexsort((rng.random(available), held))[: cut.classes]
        held[chosen] += 1
        for label in chosen:
            holders[label].append(party)
    return holders


def _group(owner: Rows, count: int) -> list[Rows]:
    order = np.argsort(owner, kind="stable")
    return np.split(order, np.cumsum(np.bincount(owner, minlength=count))[:-1])
