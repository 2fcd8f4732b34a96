"""Performance measures of a portfolio from its daily growth: the value over that of the day before, net of costs.

All functions take growth ``[..., days]``. All but :func:`portfolio_values` return one number per path. A year has 252
trading days.
"""

from __future__ import annotations

import math

import numpy as np

from ..errors import PartyError
from .market import Array

_ZERO_DEVIATION = 1e-12  # a smaller standard deviation is rounding error


def portfolio_values(growth: Array) -> Array:
    """Return the value after every day, ``[..., days + 1]``, starting at 1.

    >>> portfolio_values(np.array([1.5, 0.5])).tolist()
    [1.0, 1.5, 0.75]
    """
    growth = _check_growth(growth)
    start = np.ones((*growth.shape[:-1], 1))
    return np.concatenate([start, np.cumprod(growth, axis=-1)], axis=-1)


def annual_return(growth: Array, days: int = 252) -> Array:
    """Return the annualized return, by the geometric mean of daily growth.

    >>> round(float(annual_return(np.array([1.1, 1.1]), days=1)), 3)
    0.1
    """
    growth = _check_growth(growth)
    annual_growth: Array = np.prod(growth, axis=-1) ** (days / growth.shape[-1])
    return annual_growth - 1


def volatility(growth: Array, days: int = 252) -> Array:
    """Return the standard deviation of daily returns, times √252; NaN for a single day."""
    growth = _check_growth(growth)
    if growth.shape[-1] < 2:
        return np.full(growth.shape[:-1], math.nan)
    spread: Array = np.std(growth, axis=-1, ddof=1)
    return spread * math.sqrt(days)


def sharpe_ratio(growth: Array, days: int = 252) -> Array:
    """Return the mean of daily returns over their standard deviation, times √252.

    Without the factor √252 no value printed in Fed+ is reached. A constant path and a single day give NaN.
    """
    mean: Array = np.mean(_check_growth(growth) - 1, axis=-1)
    spread = volatility(growth, days=1)
    return mean / np.where(spread > _ZERO_DEVIATION, spread, math.nan) * math.sqrt(days)


def max_drawdown(growth: Array) -> Array:
    """Return the largest loss from an earlier peak in value, as a share of that peak; the start counts as a peak.

    >>> float(max_drawdown(np.array([0.5, 4.0, 0.75])))
    0.5
    """
    value = portfolio_values(growth)
    loss_from_peak: Array = 1 - value / np.maximum.accumulate(value, axis=-1)
    largest_loss: Array = np.max(loss_from_peak, axis=-1)
    return largest_loss


def _check_growth(growth: Array) -> Array:
    growth = np.asarray(growth, dtype=np.float64)
    if not growth.ndim or not growth.shape[-1]:
        raise PartyError(f"Performance measures need at least one day. Got growth of shape {growth.shape}.")
    return growth
