"""Shapley values of the players of a game, from the values of their coalitions.

L. S. Shapley, "A value for n-person games" (1953): the gain when a player joins, averaged over all orders of arrival.
This module knows nothing of training; values are numbers, or arrays in which each entry is a game.
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
MAX_EXACT_PLAYERS = 10  # up to this number of players all 2^n coalitions are evaluated
DEFAULT_PERMUTATIONS = 20  # orders drawn for more players, by default


@dataclass(frozen=True)
class ShapleyResult:
    """The Shapley values of the players, with the draws that they average."""

    players: tuple[str, ...]
    draws: Numbers  # [draws, players, ...] one draw per order; the exact value is a single draw

    @property
    def values(self) -> Numbers:
        """The mean over the draws, ``[players, ...]``."""
        mean: Numbers = self.draws.mean(0)
        return mean

    @property
    def errors(self) -> Numbers:
        """The standard errors of the values, ``[players, ...]``; nan for a single draw."""
        return standard_error(self.draws)


def standard_error(draws: Numbers) -> Numbers:
    """Return the standard error of the mean over the first axis; nan for a single draw.

    >>> standard_error(np.array([1.0, 3.0]))
    array(1.)
    """
    if len(draws) < 2:
        return np.full(draws.shape[1:], np.nan)
    return np.asarray(draws.std(0, ddof=1) / math.sqrt(len(draws)))


def shapley(
    players: Sequence[str],
    coalition_value: Callable[[Coalition], Numbers | float],
    permutations: int | None = None,
    seed: int = 0,
) -> ShapleyResult:
    """Return the Shapley values of a game, exact or as the mean over ``permutations`` drawn orders.

    Without ``permutations`` they are exact up to 10 players. ``coalition_value`` is called once for each needed
    coalition. The values add up to value(all) - value(none), drawn or not. Two gloves make a pair, and there are two
    left ones:

    >>> def pairs(hands): return min(len(hands & {"left", "other left"}), len(hands & {"right"}))
    >>> shapley(["left", "other left", "right"], pairs).values.round(3)
    array([0.167, 0.167, 0.667])
    """
    orders = draw_orders(players, permutations, seed)
    values_by_coalition = {
        coalition: np.asarray(coalition_value(coalition), dtype=float)
        for coalition in needed_coalitions(players, orders)
    }
    if orders is None:
        return ShapleyResult(tuple(players), exact_values(players, values_by_coalition)[None])
    draws = []
    for order in orders:
        values = [values_by_coalition[coalition] for coalition in prefix_coalitions(players, order)]
        marginal_gains = np.diff(np.stack(values), axis=0)  # [players, ...] in order of arrival
        draws.append(marginal_gains[np.argsort(order)])
    return ShapleyResult(tuple(players), np.stack(draws))


def draw_orders(players: Sequence[str], permutations: int | None, seed: int) -> Numbers | None:
    """Draw orders of arrival, ``[permutations, players]``; None if the values are exact."""
    if not players or len(set(players)) < len(players):
        raise SettingError(f"A game needs at least one player, and distinct names. Got {list(players)!r:.80}.")
    if permutations is None and len(players) <= MAX_EXACT_PLAYERS:
        return None
    count = DEFAULT_PERMUTATIONS if permutations is None else permutations
    if not isinstance(count, int) or isinstance(count, bool) or count < 2:
        raise SettingError(f"The number of 'permutations' must be a whole number >= 2. Got {permutations!r}.")
    rng = seeds.stream(seed, 0, seeds.ALL_PARTIES, "permutations")
    return np.stack([rng.permutation(len(players)) for _ in range(count)])


def needed_coalitions(players: Sequence[str], orders: Numbers | None) -> list[Coalition]:
    """Return the coalitions whose values are needed, each once, with the coalition of all players first."""
    if orders is None:
        masks = range(2 ** len(players) - 1, -1, -1)
        return [frozenset(p for i, p in enumerate(players) if mask >> i & 1) for mask in masks]
    whole = frozenset(players)
    return list(dict.fromkeys([whole, *(each for order in orders for each in prefix_coalitions(players, order))]))


def prefix_coalitions(players: Sequence[str], order: Numbers) -> list[Coalition]:
    """Return the coalitions of the first 0, 1, 2, … players in an order of arrival."""
    return list(accumulate((frozenset({players[i]}) for i in order), frozenset.union, initial=frozenset()))


def exact_values(players: Sequence[str], values_by_coalition: dict[Coalition, Numbers]) -> Numbers:
    """Return Σ over coalitions S without i of |S|!(n-|S|-1)!/n! · (v(S ∪ i) - v(S)), ``[players, ...]``."""
    n = len(players)
    values = np.stack(list(values_by_coalition.values())[::-1])  # by mask: bit i stands for player i
    masks = np.arange(2**n)
    sizes = np.array([int(mask).bit_count() for mask in masks])
    weights = np.array([1 / (n * math.comb(n - 1, size)) for size in range(n)])
    rows = []
    for i in range(n):
        without = masks[masks >> i & 1 == 0]
        rows.append(np.tensordot(weights[sizes[without]], values[without | 1 << i] - values[without], axes=1))
    return np.stack(rows)
