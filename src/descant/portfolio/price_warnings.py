"""What is odd about prices, though they may be right: whoever sees a result must know of it."""

from __future__ import annotations

import numpy as np

from .market import Market, parse_period

_MAX_GAP_DAYS = 10  # days without prices that no holiday explains
_MAX_DAILY_FACTOR = 3.0  # a factor by which hardly a price moves in a day


def find_price_warnings(market: Market, train: tuple[str, str], test: tuple[str, str]) -> list[str]:
    """Days that were asked for and are not there, the longest hole, and moves that may be splits."""
    return [
        *_check_coverage("learned by", market, *train),
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
