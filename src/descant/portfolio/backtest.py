"""A walk through a market, day by day, and the two walks that need no skill.

Weights are ``[..., 1 + assets]``, cash first; relatives ``[..., days, assets]`` are prices over earlier prices. The
weights of day t are chosen at its close and earn relatives[t], from that close to the next. (Fed+ pairs this relative
with the weights of the day before, so that what is chosen never earns the reward that is meant for it.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..errors import PartyError, SettingError
from . import transaction_costs
from .market import Array

_SUM_TOLERANCE = 1e-5  # how far weights in single precision may sum from 1


@dataclass(frozen=True, eq=False)
class BacktestResult:
    """What came of a walk, or of many side by side."""

    growth: Array  # [..., days], the value after a day over that before it, net of fees
    weights: Array  # [..., days, 1 + assets], as chosen
    turnover: Array  # [..., days], the share that was bought or sold


def drift(weights: Array, relatives: Array) -> Array:
    """The weights that prices make of others: w' = y ⊙ w / (y · w), where y is 1 for cash.

    >>> drift(np.array([0.5, 0.5]), np.array([3.0])).tolist()
    [0.25, 0.75]
    """
    values = _asset_values(weights, relatives)
    drifted: Array = values / values.sum(-1, keepdims=True)
    return drifted


def run_backtest(
    choose: Callable[[int, Array], Array], relatives: Array, c: float | Array, exact_fees: bool = True
) -> BacktestResult:
    """Walk as `choose` says: from the day and the weights as they have drifted, those to hold until the next.

    The walk begins all in cash. A trade costs the share `c` (one for all walks, or one each) of what is bought and of
    what is sold, exactly or approximately (see :mod:`.fees`).
    """
    relatives = _check_inputs(relatives, c)
    *lead, days, assets = relatives.shape
    growth = np.empty((*lead, days))
    turnover = np.empty((*lead, days))
    weights = np.empty((*lead, days, 1 + assets))
    before = np.zeros((*lead, 1 + assets))
    before[..., 0] = 1
    fee = transaction_costs.exact_factor if exact_fees else transaction_costs.approximate_factor
    for t in range(days):
        after = _check_weights(choose(t, before), before.shape, t)
        earned = _asset_values(after, relatives[..., t, :]).sum(-1)
        growth[..., t] = fee(before, after, c) * earned
        weights[..., t, :], turnover[..., t] = after, transaction_costs.turnover(before, after)
        before = drift(after, relatives[..., t, :])
    return BacktestResult(growth, weights, turnover)


def uniform_rebalancing(relatives: Array, c: float | Array, exact_fees: bool = True) -> BacktestResult:
    """The same share in every asset, and none in cash, restored every day."""
    equal = _equal_weights(relatives)

    def rebalance(t: int, before: Array) -> Array:
        return equal

    return run_backtest(rebalance, relatives, c, exact_fees=exact_fees)


def buy_and_hold(relatives: Array, c: float | Array, exact_fees: bool = True) -> BacktestResult:
    """The same share in every asset on the first day, and no trade after it."""
    equal = _equal_weights(relatives)

    def keep_weights(t: int, before: Array) -> Array:
        return before if t else equal

    return run_backtest(keep_weights, relatives, c, exact_fees=exact_fees)


def _equal_weights(relatives: Array) -> Array:
    *lead, _, assets = np.shape(relatives)
    equal = np.full((*lead, 1 + assets), 1 / assets)
    equal[..., 0] = 0
    return equal


def _asset_values(weights: Array, relatives: Array) -> Array:
    return np.concatenate([weights[..., :1], weights[..., 1:] * relatives], axis=-1)


def _check_inputs(relatives: Array, c: float | Array) -> Array:
    if not np.all((np.asarray(c) >= 0) & (np.asarray(c) < 1)):
        raise SettingError(f"The 'c' of a walk must be >= 0 and < 1: the share that a trade costs. Got {c!r}.")
    relatives = np.asarray(relatives, dtype=np.float64)
    if relatives.ndim < 2 or not relatives.shape[-1]:
        raise PartyError(f"A walk needs relatives [..., days, assets], of one asset or more. Got {relatives.shape}.")
    invalid = np.argwhere(~(np.isfinite(relatives) & (relatives > 0)))
    if len(invalid):
        *_, t, asset = first = tuple(invalid[0])
        raise PartyError(
            f"A walk needs relatives that are finite and > 0. That of asset {asset} on day {t} is {relatives[first]}:"
            " a market in which assets begin late must be made complete first."
        )
    return relatives


def _check_weights(weights: Array, shape: tuple[int, ...], t: int) -> Array:
    """The weights chosen, in double precision and of sum 1."""
    weights = np.asarray(weights, dtype=np.float64)
    if weights.shape != shape:
        raise PartyError(f"The weights chosen on day {t} must have shape {shape}, cash first. Got {weights.shape}.")
    total: Array = weights.sum(-1, keepdims=True)
    if not (np.all(weights >= 0) and np.all(np.abs(total - 1) <= _SUM_TOLERANCE)):
        worst_sum = total.ravel()[np.argmax(np.abs(total - 1))]
        raise PartyError(
            f"The weights chosen on day {t} must be >= 0 and sum to 1. The least is {weights.min()}, a sum is {worst_sum}."
        )
    normalized: Array = weights / total
    return normalized
