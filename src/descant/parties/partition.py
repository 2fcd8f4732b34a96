"""One data set cut into parties that differ: each function returns the row numbers of every party, in rising order.

No row goes to two parties, and the same generator state gives the same cut. All rows are dealt out, except by
:func:`by_size`, by :func:`by_account` with a least size, and by :func:`by_turns` unless it fills.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..core.settings import check, setting, unknown
from ..errors import PartyError

Rows: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True)
class _Cut:
    count: int = setting(help="how many parties", least=1)
    alpha: float = setting(1.0, "how alike the parties are: small is one class each, large is i.i.d.", above=0)
    classes: int = setting(1, "how many classes a party has", least=1)
    least: int = setting(1, "how many rows every party has at least", least=0)
    sigma: float = setting(2.0, "the spread of log-normal sizes: 0 is all alike", least=0, most=50)  # else they are ∞
    exponent: float = setting(2.0, "of the power law: the share of parties above a size s falls as s^(1-it)", above=1)


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


def by_size(n: int, sizes: ArrayLike, rng: np.random.Generator) -> list[Rows]:
    """Give party k `sizes[k]` of `n` rows at random.

    >>> [len(rows) for rows in by_size(10, [5, 1, 2], np.random.default_rng(0))]
    [5, 1, 2]
    """
    wanted = _sizes(sizes)
    if wanted.sum() > n:
        raise PartyError(f"These sizes need {wanted.sum()} rows. Got {n}. Ask for fewer or smaller parties.")
    parts = np.split(rng.permutation(index(n)), np.cumsum(wanted))[:-1]
    return [np.sort(part) for part in parts]


def by_account(accounts: ArrayLike, least: int = 1) -> dict[str, Rows]:
    """One party an account, by its name; accounts with fewer than `least` rows are left out.

    >>> by_account(["ann", "bob", "ann"], least=2)
    {'ann': array([0, 2])}
    """
    check(_Cut(1, least=index(least)), "by_account")
    names, owner = np.unique(np.asarray(accounts), return_inverse=True)
    parts = _group(owner, len(names)) if len(names) else []
    kept = {str(name): rows for name, rows in zip(names, parts, strict=True) if len(rows) >= least}
    if not kept:
        most = max(map(len, parts), default=0)
        raise PartyError(
            f"None of the {len(names)} accounts has {least} rows; the largest has {most}. Ask for a smaller least."
        )
    return kept


def by_turns(
    y: ArrayLike, wanted: ArrayLike, rng: np.random.Generator, least: int = 1, fill: bool = False
) -> list[Rows]:
    """Party u has the classes u, u+1, … (modulo how many there are), and `wanted[u, j]` rows of its j-th.

    Where a class has too few rows, what is wanted of it shrinks in proportion, to no less than `least`. `fill`
    lets it grow, too, until all rows are dealt out.

    >>> [rows.tolist() for rows in by_turns([0, 1, 0, 1], [[1, 1], [1, 1]], np.random.default_rng(0))]
    [[0, 1], [2, 3]]
    """
    labels, wishes = _labels(y), np.asarray(wanted, dtype=np.float64)  # wishes [count, classes]
    by_class = _rows_by_class(labels, rng)
    check(_Cut(len(wishes), classes=wishes.shape[1], least=index(least)), "by_turns")
    available = len(by_class)
    if wishes.shape[1] > available:
        raise PartyError(f"A party can have at most the {available} classes there are. Got {wishes.shape[1]}.")
    turn = turns(len(wishes), wishes.shape[1], available)
    parts: list[list[Rows]] = [[] for _ in wishes]
    for label, rows in enumerate(by_class):
        who, which = np.nonzero(turn == label)
        sizes = _allot(wishes[who, which], len(rows), index(least), fill, f"Class {labels[rows[0]]}")
        for party, part in zip(who, np.split(rows, np.cumsum(sizes)), strict=False):
            parts[party].append(part)
    return [np.sort(np.concatenate(part)) for part in parts]


def turns(count: int, classes: int, available: int) -> Rows:
    """Which classes each party has when they are dealt out in turn, ``[count, classes]``.

    >>> turns(3, 2, 3).tolist()
    [[0, 1], [1, 2], [2, 0]]
    """
    turn: Rows = (np.arange(count)[:, None] + np.arange(classes)) % available
    return turn


def log_normal(count: int, rng: np.random.Generator, mean: float = 4.0, sigma: float = 2.0, least: int = 50) -> Rows:
    """Sizes ⌊log-normal(mean, sigma)⌋ + `least`: by default those of FedProx's synthetic data.

    >>> log_normal(5, np.random.default_rng(0), least=10).tolist()
    [80, 51, 206, 77, 28]
    """
    check(_Cut(index(count), sigma=float(sigma), least=index(least)), "log_normal")
    return np.floor(rng.lognormal(mean, sigma, count)).astype(np.int64) + least


def power_law(count: int, rng: np.random.Generator, exponent: float = 2.0, least: int = 10) -> Rows:
    """Sizes of at least `least` whose share above s falls as s^(1-exponent).

    >>> power_law(5, np.random.default_rng(0)).tolist()
    [19, 27, 10, 10, 17]
    """
    check(_Cut(index(count), exponent=float(exponent), least=index(least)), "power_law")
    return np.floor(least * (1 + rng.pareto(exponent - 1, count))).astype(np.int64)


SPLITS = ("dirichlet", "iid", "label", "lognormal", "powerlaw", "turns")


def cut(
    y: ArrayLike,
    split: str,
    count: int,
    rng: np.random.Generator,
    alpha: float = 0.1,
    classes: int = 2,
    sigma: float = 2.0,
    exponent: float = 2.0,
) -> list[Rows]:
    """All rows by the name of a split: `alpha` is for "dirichlet", `classes` for "label" and "turns", `sigma` for
    "lognormal" and "turns", `exponent` for "powerlaw". Sizes keep their proportions, at least one row a party.

    >>> [len(rows) for rows in cut([0, 0, 0, 1, 1, 1], "turns", 2, np.random.default_rng(0), classes=1)]
    [3, 3]
    """
    if split not in SPLITS:
        raise unknown("split", split, SPLITS)
    check(_Cut(index(count), alpha=float(alpha), classes=index(classes), sigma=sigma, exponent=exponent), "the split")
    n = len(_labels(y))
    if split == "dirichlet":
        return by_dirichlet(y, count, alpha, rng)
    if split == "label":
        return by_label(y, count, classes, rng)
    if split == "iid":
        return evenly(n, count, rng)
    if split == "turns":
        return by_turns(y, rng.lognormal(0, sigma, (count, classes)), rng, fill=True)
    sizes = rng.lognormal(0, sigma, count) if split == "lognormal" else 1 + rng.pareto(exponent - 1, count)
    return by_size(n, _allot(sizes, n, 1, True, "The data set"), rng)


def _sizes(sizes: ArrayLike) -> Rows:
    found = np.asarray(sizes)
    if found.ndim != 1 or not found.size or found.dtype.kind not in "iu" or found.min() < 0:
        raise PartyError(f"Sizes must be whole numbers >= 0, one a party. Got {sizes!r:.80}.")
    return found.astype(np.int64)


def _allot(wishes: NDArray[np.float64], available: int, least: int, fill: bool, what: str) -> Rows:
    """Whole numbers >= least near the wishes whose sum is at most what is available; exactly that, if they fill it."""
    if available < least * len(wishes):
        raise PartyError(
            f"{what} has {available} rows for the {len(wishes)} parties that should hold at least {least} of them. "
            "Ask for fewer parties, fewer classes a party, or a smaller least."
        )
    if not len(wishes):
        return np.zeros(0, dtype=np.int64)
    above = np.maximum(wishes - least, 0) if not fill else wishes
    room, total = available - least * len(wishes), above.sum()
    if fill or total > room:
        above = above * (room / total) if total else np.full(len(wishes), room / len(wishes))
    sizes = np.floor(above)
    spare = int(min(round(above.sum()), room) - sizes.sum())
    sizes[np.argsort(sizes - above, kind="stable")[:spare]] += 1  # the largest remainders
    return sizes.astype(np.int64) + least


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
