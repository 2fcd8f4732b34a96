"""Synthetic prices that continue after the last real day: v1 §9.3 of Fed+ (Yu, Wynter, Lim, 2020).

They never leave a party. An augmenter is a value. It is fitted once to the training prices of a party. The fit is one
flat array of numbers that the party can store, and any number of years is drawn from it.

>>> prices = np.cumprod(np.full((500, 3), 1.001), axis=0)
>>> augmenter, rng = make_augmenter("gbm"), np.random.default_rng(0)
>>> year = augmenter.draw(augmenter.fit(prices, rng), prices, 252, rng)
>>> year.shape, unusable_reason(year), round(float(year[0, 0] / prices[-1, 0]), 4)
((252, 3), '', 1.001)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import numpy as np

from ..core.settings import check_settings, setting, unknown_name_error
from ..errors import PartyError
from .market import Array

AUGMENTERS = ("none", "gbm", "vom", "gan")
TRADING_DAYS = 252
_MAX_YEARLY_FACTOR = 100.0
FIT_FAILED = 1.0
SAMPLES_UNUSABLE = 2.0
_REASONS = {FIT_FAILED: "no generator could be fitted", SAMPLES_UNUSABLE: "the synthetic prices were unusable"}
_MAX_NAMED = 10  # desks listed in a message


class Augmenter(Protocol):
    """A generator of synthetic prices after the last real day."""

    def fit(self, prices: Array, rng: np.random.Generator) -> Array:
        """Fit to prices ``[T, m]``; return the fit as one flat float32 array."""

    def draw(self, fitted: Array, prices: Array, days: int, rng: np.random.Generator) -> Array:
        """Draw prices ``[days, m]`` after the last row of `prices`; check them with :func:`unusable_reason`."""


def make_augmenter(name: str, **settings: Any) -> Augmenter:
    """Return an augmenter by its name: "gbm", "vom", "gan", or "none" to train on real prices alone."""
    from .price_gan import Gan

    kinds = dict(zip(AUGMENTERS, (NoAugmentation, GeometricBrownianMotion, VariableOrderMarkov, Gan), strict=True))
    if name not in kinds:
        raise unknown_name_error("augmenter", name, AUGMENTERS)
    known = [field.name for field in fields(kinds[name])]
    for key in settings:
        if key not in known:
            raise unknown_name_error(f"setting of {name}", key, known)
    instance: Augmenter = kinds[name](**settings)
    check_settings(instance)
    return instance


def daily_returns(prices: Array, min_days: int, owner: str) -> Array:
    """Return p_t = v_{t+1} / v_t - 1 of v1 §9.3, ``[T - 1, m]``; raise if the prices cannot be used."""
    if prices.ndim != 2 or len(prices) < min_days:
        raise PartyError(f"{owner} needs prices [days, assets] of at least {min_days} days. Got {list(prices.shape)}.")
    if not (np.isfinite(prices) & (prices > 0)).all():
        raise PartyError(f"{owner} needs a price > 0 for every asset and day. Call Market.complete first.")
    returns: Array = prices[1:] / prices[:-1] - 1
    return returns


def unusable_reason(prices: Array, assets: Sequence[str] = ()) -> str:
    """Return the reason why synthetic prices ``[days, m]`` cannot be trained on, or "" if they can.

    A price must be a number > 0 and move by less than a factor of 100 per year. Put the last real day first to check
    the step into the synthetic year as well. `assets` are names for the message.
    """
    names = assets or [f"asset {asset}" for asset in range(prices.shape[1])]
    invalid = ~(np.isfinite(prices) & (prices > 0))
    if invalid.any():
        day, asset = np.argwhere(invalid)[0]
        return f"{names[asset]} has the price {prices[day, asset]:.6g} on synthetic day {day}"
    if len(prices) == 0:
        return ""
    years = max(1.0, len(prices) / TRADING_DAYS)  # a few days are not extrapolated to a year
    yearly_log_move = np.abs(np.log(prices) - np.log(prices[0])).max(axis=0) / years  # [m]
    asset = int(yearly_log_move.argmax())
    if yearly_log_move[asset] <= math.log(_MAX_YEARLY_FACTOR):
        return ""
    return f"{names[asset]} moves by a factor of more than {_MAX_YEARLY_FACTOR:g} per year"


def real_only_message(codes: Mapping[str, float]) -> str:
    """Return a sentence on the desks without synthetic prices, from their reported codes; "" if there are none.

    >>> real_only_message({"0": SAMPLES_UNUSABLE, "1": FIT_FAILED, "2": SAMPLES_UNUSABLE})
    'Trained on real prices alone: 1 (no generator could be fitted); 0, 2 (the synthetic prices were unusable)'
    """
    parts = []
    for code, reason in _REASONS.items():
        names = sorted(
            (name for name, reported in codes.items() if reported == code), key=lambda name: (len(name), name)
        )
        more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
        parts += [f"{', '.join(names[:_MAX_NAMED])}{more} ({reason})"] if names else []
    return f"Trained on real prices alone: {'; '.join(parts)}" if parts else ""


@dataclass(frozen=True)
class NoAugmentation:
    """No synthetic days: a party trains on real prices alone."""

    def fit(self, prices: Array, rng: np.random.Generator) -> Array:
        return np.empty(0, dtype=np.float32)

    def draw(self, fitted: Array, prices: Array, days: int, rng: np.random.Generator) -> Array:
        return np.empty((0, prices.shape[1]))


@dataclass(frozen=True)
class GeometricBrownianMotion:
    """Geometric Brownian motion, v1 §9.3: v_t = v_0 exp((μ - σ²/2) t + σ W_t).

    μ and σ are those of the daily returns. The paper has one W_t and does not say whether assets share it. Here each
    asset has its own, with the correlations of the returns; not from the paper.
    """

    shared_motion: bool = setting(False, "use one Brownian motion for all assets, as printed")

    def fit(self, prices: Array, rng: np.random.Generator) -> Array:
        returns = daily_returns(prices, 3, "GeometricBrownianMotion")
        return _pack(returns.mean(axis=0), _covariance(returns))

    def draw(self, fitted: Array, prices: Array, days: int, rng: np.random.Generator) -> Array:
        mu, covariance = _unpack(fitted, prices.shape[1])
        variance = np.diagonal(covariance)
        if self.shared_motion:
            moves = rng.standard_normal((days, 1)) * np.sqrt(variance)
        else:
            moves = rng.standard_normal((days, len(mu))) @ _covariance_factor(covariance).T
        return _continue_prices(prices, mu - variance / 2 + moves)


@dataclass(frozen=True)
class VariableOrderMarkov:
    """A variable-order Markov model, v1 §9.3: ln(1 + p) of a day is normal, given its context (ERRATA 31).

    The context of a day is whether the assets' mean rose on each of the last k days, with the largest k up to `order`
    that occurred `min_count` times. Its mean and covariance are those of the days after it, shrunk towards those of all
    days as if `min_count` more days had followed it. The contexts and the shrinkage are not from the paper.
    """

    order: int = setting(3, "maximum days in a context", least=0, most=10, whole=True)
    min_count: int = setting(60, "occurrences that a context needs", least=1, whole=True)

    def fit(self, prices: Array, rng: np.random.Generator) -> Array:
        logs = np.log1p(daily_returns(prices, self.order + 3, "VariableOrderMarkov"))
        codes = _context_codes(logs, self.order)[:-1]
        after = logs[self.order :]
        mean = after.mean(axis=0)
        covariance = _covariance(after)
        rows = []
        for code in range(2**self.order):
            following = after[self._similar_days(codes, code)]
            share = len(following) / (len(following) + self.min_count)
            mixed = share * _covariance(following) + (1 - share) * covariance
            rows.append(_pack(share * following.mean(axis=0) + (1 - share) * mean, mixed))
        return np.concatenate(rows)

    def _similar_days(self, codes: Array, code: int) -> Array:
        """Return a mask of the days after the longest frequent suffix of a context; all days if there is none."""
        for k in range(self.order, 0, -1):
            matches: Array = codes % 2**k == code % 2**k
            if np.count_nonzero(matches) >= self.min_count:
                return matches
        return np.ones(len(codes), dtype=bool)

    def draw(self, fitted: Array, prices: Array, days: int, rng: np.random.Generator) -> Array:
        means, covariances = _unpack(fitted.reshape(2**self.order, -1), prices.shape[1])
        factors = _covariance_factor(covariances)
        noise = rng.standard_normal((days, prices.shape[1]))
        code = int(_context_codes(np.diff(np.log(prices[-self.order - 1 :]), axis=0), self.order)[-1])
        logs = np.empty_like(noise)
        for day in range(days):
            logs[day] = means[code] + factors[code] @ noise[day]
            code = (2 * code + int(logs[day].mean() > 0)) % 2**self.order
        return _continue_prices(prices, logs)


def _context_codes(logs: Array, order: int) -> Array:
    """Return the context after each day that has one, ``[T - order + 1]``, as bits.

    The last k days are the code modulo 2^k.
    """
    rose = (logs.mean(axis=1) > 0).astype(np.int64)
    count = len(rose) - order + 1
    codes = np.zeros(count, dtype=np.int64)
    for back in range(order):
        first = order - 1 - back
        codes += rose[first : first + count] << back
    return codes


def _covariance(returns: Array) -> Array:
    """Return the covariance of the rows; a single row gives 0."""
    centered = returns - returns.mean(axis=0)
    covariance: Array = centered.T @ centered / len(returns)
    return covariance


def _pack(mean: Array, covariance: Array) -> Array:
    return np.concatenate([mean, covariance.ravel()]).astype(np.float32)


def _unpack(fitted: Array, m: int) -> tuple[Array, Array]:
    numbers = fitted.astype(np.float64)
    return numbers[..., :m], numbers[..., m:].reshape(*fitted.shape[:-1], m, m)


def _covariance_factor(covariance: Array) -> Array:
    """Return A with A Aᵀ = covariance, ``[..., m, m]``; the covariance may be singular."""
    values, vectors = np.linalg.eigh(covariance)
    factor: Array = vectors * np.sqrt(np.maximum(values, 0))[..., None, :]
    return factor


def _continue_prices(prices: Array, logs: Array) -> Array:
    """Return prices after the last given ones, from log returns ``[days, m]``."""
    with np.errstate(over="ignore"):  # `unusable_reason` finds overflows
        prices_after: Array = prices[-1] * np.exp(np.cumsum(logs, axis=0))
    return prices_after
