"""What is odd about prices, though they may be right: whoever sees a result must know of it."""

from __future__ import annotations

import numpy as np

from .market import Market, period

_LONG = 10  # days without prices that no holiday explains
_FAR = 3.0  # a factor by which hardly a price moves in a day


def remarks(market: Market, train: tuple[str, str], test: tuple[str, str]) -> list[str]:
    """Days that were asked for and are not there, the longest hole, and moves that may be splits."""
    return [
        *_period("learned by", market, *train),
        *_period("tested on", market, *test),
        *_hole(market),
        *_moves(market),
    ]


def _period(used: str, market: Market, first: str, last: str) -> list[str]:
    begin, end = market.between(first, last).dates[[0, -1]]
    short = max(begin - period(first)[0], period(last)[1] - end).astype(int)
    return [f"{used} {begin} to {end} only"] if short > _LONG else []


def _hole(market: Market) -> list[str]:
    missing = np.diff(market.dates).astype(int) - 1
    longest = int(missing.argmax())
    before, after = market.dates[longest : longest + 2]
    return [f"no prices between {before} and {after}"] if missing[longest] > _LONG else []


def _moves(market: Market) -> list[str]:
    factors = market.relatives
    far = np.argwhere((factors > _FAR) | (factors < 1 / _FAR))
    if not len(far):
        return []
    day, asset = far[0]
    more = f", and {len(far) - 1} more" if len(far) > 1 else ""
    return [f"{market.names[asset]} moves by × {factors[day, asset]:.3g} on {market.dates[day + 1]} (a split?){more}"]
