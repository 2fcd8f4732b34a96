"""Daily prices of assets, given or generated; errors name the asset and the date."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..core.seeds import ALL_PARTIES, stream
from ..core.settings import unknown_name_error
from ..errors import PartyError, SettingError

Array: TypeAlias = NDArray[Any]

_DAY = re.compile(r"\d{4}-\d\d-\d\d(?!\d)")
_PERIOD = re.compile(r"\d{4}(-\d\d(-\d\d)?)?\Z")
EXPECTED_FORMAT = (
    "daily prices: an .npz file with dates, tickers and a matrix [dates, tickers],"
    " or a .csv or .parquet file with a column of dates and one for each asset"
)


@dataclass(frozen=True, eq=False)
class Market:
    """Closing prices of assets; :meth:`create` checks them.

    >>> market = Market.create(["2018-12-28", "2018-12-31", "2019-01-02"], ["A", "B"], [[1, math.nan], [2, 4], [4, 2]])
    >>> market.complete("later").relatives.tolist(), market.complete("exclude").names
    ([[2.0, 0.5]], ('A',))
    """

    dates: Array = field(repr=False)  # [T] datetime64[D], rising
    names: tuple[str, ...]
    prices: Array = field(repr=False)  # [T, N] float64, NaN before an asset's first price and never after it
    source: str = ""  # the file, for messages
    note: str = ""  # the assets or days that `complete` left out

    @classmethod
    def create(cls, dates: Any, names: Sequence[str], prices: Any, source: str = "") -> Market:
        """Return a market after checking its dates, names and prices."""
        checked_dates = _parse_dates(dates, source)
        asset_names = tuple(map(str, names))
        try:
            price_table = np.array(prices, dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise market_error(
                source, f"its prices are not numbers ({error})", "a price for every asset and date"
            ) from error
        _check_shapes(checked_dates, asset_names, price_table, source)
        _check_prices(checked_dates, asset_names, price_table, source=source)
        return cls(checked_dates, asset_names, price_table, source)

    @property
    def relatives(self) -> Array:
        """Prices over those of the day before, ``[T - 1, N]``.

        Row t goes from the close of day t to the next.
        """
        return self.prices[1:] / self.prices[:-1]

    def between(self, first: str | int, last: str | int) -> Market:
        """Return the days from `first` to `last` inclusive: dates such as 2018-12-31, years or months."""
        begin = parse_period(first)[0]
        end = parse_period(last)[1]
        kept = (self.dates >= begin) & (self.dates <= end)
        if not kept.any():
            raise SettingError(
                f"There are no prices from {begin} to {end}: {self.source or 'the market'} covers {self.dates[0]} to"
                f" {self.dates[-1]}."
            )
        return replace(self, dates=self.dates[kept], prices=self.prices[kept])

    def select(self, names: Sequence[str]) -> Market:
        """Return the market of these assets, in this order."""
        for name in names:
            if name not in self.names:
                raise self._unknown_asset_error(name)
        indices = [self.names.index(name) for name in names]
        return replace(Market.create(self.dates, names, self.prices[:, indices], self.source), note=self.note)

    def complete(self, missing: str) -> Market:
        """Return a market without missing prices, with a note on what was left out.

        "exclude" leaves out the assets that begin after the first day. "later" leaves out the days before all assets
        have begun.
        """
        if missing not in ("exclude", "later"):
            raise unknown_name_error("'missing' mode", missing, ("exclude", "later"))
        absent = np.isnan(self.prices).sum(0)  # days before each asset begins
        late = [name for name, days in zip(self.names, absent, strict=True) if days]
        if not late:
            return self
        if missing == "exclude":
            if len(late) == len(self.names):
                raise self._empty_market_error(f"every asset begins after {self.dates[0]}", "later")
            market = self.select([name for name in self.names if name not in late])
            reason = f"whose prices begin after {self.dates[0]}: {', '.join(late)}"
            return replace(market, note=f"without {len(late)} of {len(self.names)} assets, {reason}")
        first_row = int(absent.max())
        last = self.names[int(absent.argmax())]
        if first_row == len(self.dates):
            raise self._empty_market_error(f"{last} has no price up to {self.dates[-1]}", "exclude")
        note = (
            f"without {first_row} of {len(self.dates)} days, those before {self.dates[first_row]}, when {last} begins"
        )
        return replace(self, dates=self.dates[first_row:], prices=self.prices[first_row:], note=note)

    def _unknown_asset_error(self, name: str) -> SettingError:
        known = {each.casefold(): each for each in self.names}
        similar = [known[each] for each in get_close_matches(name.casefold(), known)]
        hint = f"similar: {', '.join(similar)}" if similar else f"such as {', '.join(self.names[:5])}"
        return SettingError(
            f"There is no asset {name!r} in {self.source or 'the market'}: it has {len(self.names)}, {hint}."
        )

    def _empty_market_error(self, reason: str, other: str) -> PartyError:
        return market_error(
            self.source, f"{reason}, so nothing is left", f"a market to complete with {other!r}, or fewer assets"
        )


def generate_market(assets: int = 30, years: int = 14, first: str = "2006-01-02", seed: int = 0) -> Market:
    """Return a market of generated prices, for trials without real data.

    It has business days from `first` on, for `years` calendar years. Prices are geometric Brownian motions with a
    common market factor and a factor of each asset. Two things can be learned: an asset's own trend lasts for months,
    and deviations from its value revert within days. An asset's prices do not depend on the number of assets.

    >>> generate_market(assets=3, years=2).dates[[0, -1]].astype(str).tolist()
    ['2006-01-02', '2007-12-31']
    """
    for name, value in (("assets", assets), ("years", years)):
        if not isinstance(value, int) or value < 1:
            raise SettingError(f"The {name!r} of generate_market must be a whole number >= 1. Got {value!r}.")
    begin = parse_period(first)[0]
    end = (begin.astype("datetime64[Y]") + years).astype("datetime64[D]")
    dates = np.busday_offset(begin, np.arange(np.busday_count(begin, end)), roll="forward")
    market = stream(seed, 0, ALL_PARTIES, purpose="market").normal(0.08 / 252, 0.16 / math.sqrt(252), len(dates))
    names = [f"A{number:02}" for number in range(1, assets + 1)]
    prices = np.stack([_generate_asset(market, stream(seed, 0, name, purpose="market")) for name in names], axis=1)
    return Market.create(dates, names, prices, "the generated market")


def _generate_asset(market: Array, draws: np.random.Generator) -> Array:
    start, beta, sigma = draws.uniform([10, 0.5, 0.1], [100, 1.5, 0.25])
    noise, trend, deviation = draws.standard_normal((len(market), 3)).T
    steps = beta * market + sigma / math.sqrt(252) * noise + 0.3 / 252 * _autoregressive_noise(trend, 60)
    prices: Array = start * np.exp(np.cumsum(steps) + 0.02 * _autoregressive_noise(deviation, 5))
    return prices


def _autoregressive_noise(noise: Array, days: float) -> Array:
    """Return autoregressive noise of variance 1 with a decay time in days."""
    decay = math.exp(-1 / days)

    def step(value: float, innovation: float) -> float:
        return decay * value + math.sqrt(1 - decay**2) * innovation

    return np.array(list(accumulate(noise.tolist(), step)))


def parse_period(text: str | int) -> tuple[np.datetime64, np.datetime64]:
    """Return the first and the last day of a date, a month or a year."""
    begin = _parse_date(str(text), _PERIOD)
    if begin is None:
        raise SettingError(f"A period begins and ends with a date such as 2018-12-31, or a year. Got {text!r}.")
    return begin.astype("datetime64[D]"), (begin + 1).astype("datetime64[D]") - 1


def _parse_date(text: str, form: re.Pattern[str]) -> np.datetime64 | None:
    """Return the date that a text begins with, or None if the form or the calendar does not allow it."""
    match = form.match(text)
    try:
        return np.datetime64(match[0]) if match else None
    except ValueError:
        return None


def market_error(source: str, problem: str, expected_form: str) -> PartyError:
    """Return the error for an invalid market."""
    return PartyError(f"{source or 'The market'} cannot be used: {problem}. Expected {expected_form}.")


def _parse_dates(dates: Any, source: str) -> Array:
    """Return days, from dates or from texts that begin with a date."""
    values = np.asarray(dates)
    expected = "dates such as 2018-12-31, one per row"
    if values.ndim != 1 or (len(values) and values.dtype.kind not in "MOSU"):
        raise market_error(source, f"its dates have shape {values.shape} of {values.dtype}", expected)
    days = np.empty(len(values), dtype="datetime64[D]")
    for row, text in enumerate(values.astype(str).tolist()):
        day = _parse_date(text, _DAY)
        if day is None:
            raise market_error(source, f"date {row + 1} of {len(values)} is {text!r}", expected)
        days[row] = day
    return days


def _check_shapes(days: Array, names: tuple[str, ...], prices: Array, source: str) -> None:
    if not len(days) or not names:
        raise market_error(source, f"it has no {'assets' if len(days) else 'rows'}", EXPECTED_FORMAT)
    if prices.shape != (len(days), len(names)):
        sizes = f"{len(days)} dates, {len(names)} assets and prices of shape {list(prices.shape)}"
        raise market_error(source, f"it has {sizes}", "a price for every asset and date")
    for name in names:
        if not name.strip() or names.count(name) > 1:
            raise market_error(
                source, f"the asset {name!r} occurs {names.count(name)} times", "each asset once, with a name"
            )
    steps = np.diff(days).astype(int)
    if (steps <= 0).any():
        row = int(np.argmax(steps <= 0))
        problem = f"{days[row + 1]} comes after {days[row]}" if steps[row] else f"{days[row]} occurs twice"
        raise market_error(source, f"the date {problem}", "every date once, the earliest first")


def _check_prices(days: Array, names: tuple[str, ...], prices: Array, source: str) -> None:
    absent = np.isnan(prices)
    invalid = np.argwhere(~absent & ~((prices > 0) & np.isfinite(prices)))
    if len(invalid):
        row, asset = invalid[0]
        problem = f"the price of {names[asset]} on {days[row]} is {prices[row, asset]:g}"
        raise market_error(source, problem, "finite prices > 0")
    gaps = np.argwhere(absent & np.logical_or.accumulate(~absent, axis=0))
    if len(gaps):
        row, asset = gaps[0]
        first_day = days[np.argmin(absent[:, asset])]
        problem = f"{names[asset]} has no price on {days[row]}, but it has one on {first_day}"
        raise market_error(
            source, problem, "a price on every day once an asset has begun: fill the gap, or leave the asset out"
        )
