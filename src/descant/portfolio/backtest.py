"""Daily back-tests of a portfolio, and two trivial strategies: uniform rebalancing, and buy and hold.

Weights are ``[..., 1 + assets]``, cash first. Relatives ``[..., days, assets]`` are prices over the prices of the day
before. The weights of day t are chosen at its close and earn relatives[t], from that close to the next. (As printed,
Fed+ pairs this relative with the weights of the day before, so a choice would never earn the reward meant for it.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..errors import PartyError, SettingError
from . import transaction_costs
from .market import Array

_SUM_TOLERANCE = 1e-5  # allowed error of the sum of weights in single precision


@dataclass(frozen=True, eq=False)
class BacktestResult:
    """Result of one back-test, or of many side by side."""

    growth: Array  # [..., days], the value after a day over the value before it, net of costs
    weights: Array  # [..., days, 1 + assets], as chosen
    turnover: Array  # [..., days], the share of the value that was bought or sold


def drift(weights: Array, relatives: Array) -> Array:
    """Return the weights after a price move: w' = y ⊙ w / (y · w), where y is 1 for cash.

    >>> drift(np.array([0.5, 0.5]), np.array([3.0])).tolist()
    [0.25, 0.75]
    """
    values = _asset_values(weights, relatives)
    drifted: Array = values / values.sum(-1, keepdims=True)
    return drifted


def run_backtest(
    choose: Callable[[int, Array], Array], relatives: Array, c: float | Array, exact_fees: bool = True
) -> BacktestResult:
    """Run a back-test: `choose(day, drifted weights)` gives the weights to hold until the next day.

    The portfolio begins all in cash. A trade costs the share `c` of the value bought and of the value sold (one number
    for all back-tests, or one each), computed exactly or approximately (see :mod:`.transaction_costs`).
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
        weights[..., t, :] = after
        turnover[..., t] = transaction_costs.turnover(before, after)
        before = drift(after, relatives[..., t, :])
    return BacktestResult(growth, weights, turnover)


def uniform_rebalancing(relatives: Array, c: float | Array, exact_fees: bool = True) -> BacktestResult:
    """Run the strategy of equal shares in all assets and no cash, restored every day."""
    equal = _equal_weights(relatives)

    def rebalance(t: int, before: Array) -> Array:
        return equal

    return run_backtest(rebalance, relatives, c, exact_fees=exact_fees)


def buy_and_hold(relatives: Array, c: float | Array, exact_fees: bool = True) -> BacktestResult:
    """Run the strategy of equal shares in all assets on the first day, without later trades."""
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
        raise SettingError(f"The 'c' of a back-test must be >= 0 and < 1: the share that a trade costs. Got {c!r}.")
    relatives = np.asarray(relatives, dtype=np.float64)
    if relatives.ndim < 2 or not relatives.shape[-1]:
        raise PartyError(
            f"A back-test needs relatives [..., days, assets] of at least one asset. Got {relatives.shape}."
        )
    invalid = np.argwhere(~(np.isfinite(relatives) & (relatives > 0)))
    if len(invalid):
        *_, t, asset = first = tuple(invalid[0])
        raise PartyError(
            f"A back-test needs relatives that are finite and > 0. Asset {asset} on day {t} has {relatives[first]}: "
            "if assets begin late, call Market.complete first."
        )
    return relatives


def _check_weights(weights: Array, shape: tuple[int, ...], t: int) -> Array:
    """Return the chosen weights in double precision, scaled to sum 1; raise if they are invalid."""
    weights = np.asarray(weights, dtype=np.float64)
    if weights.shape != shape:
        raise PartyError(f"The weights chosen on day {t} must have shape {shape}, cash first. Got {weights.shape}.")
    total: Array = weights.sum(-1, keepdims=True)
    if not (np.all(weights >= 0) and np.all(np.abs(total - 1) <= _SUM_TOLERANCE)):
        worst_sum = total.ravel()[np.argmax(np.abs(total - 1))]
        raise PartyError(
            f"The weights chosen on day {t} must be >= 0 and sum to 1. The smallest weight is {weights.min()}, and one "
            f"sum is {worst_sum}."
        )
    normalized: Array = weights / total
    return normalized
