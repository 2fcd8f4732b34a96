"""Warnings on unusual prices that may still be right; they accompany every result."""

from __future__ import annotations

import numpy as np

from .market import Market, parse_period

_MAX_GAP_DAYS = 10  # a longer gap is not explained by holidays
_MAX_DAILY_FACTOR = 3.0  # a larger daily move is rare and may be a split


def find_price_warnings(market: Market, train: tuple[str, str], test: tuple[str, str]) -> list[str]:
    """Return notes on missing days of the periods, the longest gap, and moves that may be splits."""
    return [
        *_check_coverage("trained on", market, *train),
        *_check_coverage("tested on", market, *test),
        *_longest_gap(market),
        *_large_moves(market),
    ]


def _check_coverage(purpose: str, market: Market, first: str, last: str) -> list[str]:
    begin, end = market.between(first, last).dates[[0, -1]]
    missing_days = max(begin - parse_period(first)[0], parse_period(last)[1] - end).astype(int)
    return [f"{purpose} {begin} to {end} only"] if missing_days > _MAX_GAP_DAYS else []


def _longest_gap(market: Market) -> list[str]:
    missing = np.diff(market.dates).astype(int) - 1
    longest = int(missing.argmax())
    before, after = market.dates[longest : longest + 2]
    return [f"no prices between {before} and {after}"] if missing[longest] > _MAX_GAP_DAYS else []


def _large_moves(market: Market) -> list[str]:
    factors = market.relatives
    large = np.argwhere((factors > _MAX_DAILY_FACTOR) | (factors < 1 / _MAX_DAILY_FACTOR))
    if not len(large):
        return []
    day, asset = large[0]
    more = f", and {len(large) - 1} more" if len(large) > 1 else ""
    return [f"{market.names[asset]} moves by × {factors[day, asset]:.3g} on {market.dates[day + 1]} (a split?){more}"]
