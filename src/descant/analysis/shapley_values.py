"""Shapley values: what each player of a game is worth, given what every coalition of them reaches.

L. S. Shapley, "A value for n-person games" (1953): what a player adds when it comes, the mean over all orders in which
players may come. It knows nothing of training; values are numbers, or arrays of which each entry is a game.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias

import numpy as np

from ..core import seeds
from ..errors import SettingError
from .scores import Numbers

Coalition: TypeAlias = frozenset[str]
EXACT = 10  # players: up to so many all 2^n coalitions are gone through
PERMUTATIONS = 20  # orders that are drawn of more players, if nobody says how many


@dataclass(frozen=True)
class Shapley:
    """The players' values: their mean, and the draws that it is the mean of."""

    players: tuple[str, ...]
    each: Numbers  # [draws, players, ...] one draw an order; the exact value is a single one

    @property
    def values(self) -> Numbers:
        """``[players, ...]``"""
        mean: Numbers = self.each.mean(0)
        return mean

    @property
    def errors(self) -> Numbers:
        """The standard errors of the values, ``[players, ...]``; nan of a single draw."""
        return standard_error(self.each)


def standard_error(each: Numbers) -> Numbers:
    """Of the mean over the first axis; nan where there is a single draw.

    >>> standard_error(np.array([1.0, 3.0]))
    array(1.)
    """
    if len(each) < 2:
        return np.full(each.shape[1:], np.nan)
    return np.asarray(each.std(0, ddof=1) / math.sqrt(len(each)))


def shapley(
    players: Sequence[str],
    value: Callable[[Coalition], Numbers | float],
    permutations: int | None = None,
    seed: int = 0,
) -> Shapley:
    """The Shapley values of a game: exact, or the mean over so many orders that are drawn.

    Without ``permutations`` it is exact up to 10 players. ``value`` is asked once for each coalition that is needed.
    The values add up to value(all) - value(nobody), drawn or not. Two gloves make a pair, and there are two left ones:

    >>> def pairs(hands): return min(len(hands & {"left", "other left"}), len(hands & {"right"}))
    >>> shapley(["left", "other left", "right"], pairs).values.round(3)
    array([0.167, 0.167, 0.667])
    """
    orders = orders_of(players, permutations, seed)
    found = {one: np.asarray(value(one), dtype=float) for one in coalitions(players, orders)}
    if orders is None:
        return Shapley(tuple(players), _exact(players, found)[None])
    each = []
    for order in orders:
        reached = [found[one] for one in _growing(players, order)]
        added = np.diff(np.stack(reached), axis=0)  # [players, ...] in the order in which they come
        each.append(added[np.argsort(order)])
    return Shapley(tuple(players), np.stack(each))


def orders_of(players: Sequence[str], permutations: int | None, seed: int) -> Numbers | None:
    """The orders that are drawn, ``[permutations, players]``; None where the values are exact."""
    if not players or len(set(players)) < len(players):
        raise SettingError(f"A game needs players with names of their own. Got {list(players)!r:.80}.")
    if permutations is None and len(players) <= EXACT:
        return None
    count = PERMUTATIONS if permutations is None else permutations
    if not isinstance(count, int) or isinstance(count, bool) or count < 2:
        raise SettingError(f"The number of 'permutations' must be a whole number >= 2. Got {permutations!r}.")
    rng = seeds.stream(seed, 0, seeds.EVERYBODY, "permutations")
    return np.stack([rng.permutation(len(players)) for _ in range(count)])


def coalitions(players: Sequence[str], orders: Numbers | None) -> list[Coalition]:
    """The coalitions whose values are needed, each once, that of all players first."""
    if orders is None:
        masks = range(2 ** len(players) - 1, -1, -1)
        return [frozenset(p for i, p in enumerate(players) if mask >> i & 1) for mask in masks]
    whole = frozenset(players)
    return list(dict.fromkeys([whole, *(one for order in orders for one in _growing(players, order))]))


def _growing(players: Sequence[str], order: Numbers) -> list[Coalition]:
    """Nobody, the first to come, the first two, and so on to all."""
    return list(accumulate((frozenset({players[i]}) for i in order), frozenset.union, initial=frozenset()))


def _exact(players: Sequence[str], found: dict[Coalition, Numbers]) -> Numbers:
    """Σ over coalitions S without i of |S|!(n-|S|-1)!/n! · (v(S ∪ i) - v(S)), ``[players, ...]``."""
    n = len(players)
    values = np.stack(list(found.values())[::-1])  # by mask: bit i says whether player i is in it
    masks = np.arange(2**n)
    sizes = np.array([int(mask).bit_count() for mask in masks])
    weights = np.array([1 / (n * math.comb(n - 1, size)) for size in range(n)])
    rows = []
    for i in range(n):
        without = masks[masks >> i & 1 == 0]
        rows.append(np.tensordot(weights[sizes[without]], values[without | 1 << i] - values[without], axes=1))
    return np.stack(rows)
