"""Collapse: what was learned is lost and stays lost, often after one round that threw the model far (Fed+ v2 §3).

The thresholds are ours: the papers show collapse (v2 fig. 1b, v1 fig. 2 and 10) and do not define it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
JUMP = 10.0  # ours: times the usual change of the model in a round
USUAL = 20  # ours: the rounds before, whose median is the usual change
LEAST = 5  # ours: so many rounds before there is a usual change
FALL = 0.5  # ours: of all that was gained, how much is lost
STAYS = 3  # ours: rounds (or points of a curve) at the end for which it stays lost
NOISE = 5.0  # ours: times the usual step back from one round to the next, below which a fall is noise
POINTS = 0.05  # ours: of the scale, at least: with few points there may be no step back to know the noise by


def biggest_jump(changes: Sequence[float]) -> tuple[int, float] | None:
    """The place at which the model changed most against its usual change, and how many times that; None below JUMP.

    >>> biggest_jump([1.0, 1.2, 0.8, 1.0, 1.0, 40.0, 1.0])
    (5, 40.0)
    """
    found, values = None, np.asarray(changes, dtype=float)
    for place in range(LEAST, len(values)):
        earlier = values[max(0, place - USUAL) : place]
        usual = np.median(earlier[earlier > 0]) if np.count_nonzero(earlier > 0) >= LEAST else np.nan
        with np.errstate(invalid="ignore"):  # of a model that is lost altogether both may be ∞
            times = float(values[place] / usual)  # nan compares false
        if times >= JUMP and (found is None or times > found[1]):
            found = (place, times)
    return found


def lasting_fall(values: Sequence[float], higher_is_better: bool, shares: bool = True) -> int | None:
    """The place from which on more than half of what had been gained is lost, to the end; None if it is not.

    A drift of a few points of the scale is none, nor is what goes to and fro all the time. ``shares``: numbers from 0
    to 1 are parts of 1, such as accuracies.

    >>> lasting_fall([0.2, 0.5, 0.7, 0.8, 0.3, 0.2, 0.25], higher_is_better=True)
    4
    """
    given = np.asarray(values, dtype=float) * (1 if higher_is_better else -1)
    places = np.flatnonzero(~np.isnan(given))  # nobody took a step in the others
    score = given[places]
    if len(score) <= STAYS:
        return None
    best = np.maximum.accumulate(score)[:-1]  # before each but the first
    with np.errstate(invalid="ignore"):  # -∞ is a model that failed
        low = score[1:] < best - FALL * (best - score[0])
    at = len(low) - int(np.argmin(low[::-1])) if not low.all() else 0  # the last run of falls begins here
    if len(low) - at < STAYS or at == 0:
        return None
    steps = np.diff(score[: at + 1])
    usual = float(np.median(-steps[steps < 0])) if (steps < 0).any() else 0.0
    fallen = best[at] - np.median(score[at + 1 :])
    scale = _scale(given[places[: at + 1]], shares)
    return int(places[at + 1]) if fallen > max(NOISE * usual, POINTS * scale) else None


def _scale(before: Numbers, shares: bool) -> float:
    """What a fall is held against: 1 for shares, such as accuracies, else the largest number before it."""
    most = float(np.abs(before[np.isfinite(before)]).max(initial=0.0))
    return 1.0 if shares and before.min() >= 0 and most <= 1 else most


def fell_behind(earned: Sequence[float] | Numbers, alone: Sequence[float] | Numbers) -> int | None:
    """The place from which on less than half is earned of what training alone earns in the same rounds, to the end.

    What is earned in a round depends on its days more than on what was learned, and they are the same for both. The
    place is where the lead over training alone, added up, is largest. None if there is none, or nobody earns.

    >>> fell_behind([5, -1, 5, 4, 6, 3, 0, 0, 0, 0], [5, -1, 5, 4, 6, 3, 4, -2, 6, 4])
    6
    """
    mine, others = np.asarray(earned, dtype=float), np.asarray(alone, dtype=float)
    if len(mine) != len(others) or not (known := np.isfinite(mine) & np.isfinite(others)).any():
        return None
    lead = np.cumsum(np.where(known, mine - others, 0.0))
    at = len(lead) - int(np.argmax(lead[::-1]))  # behind the last of the largest
    before, after = slice(0, at), slice(at, None)
    if at < LEAST or len(mine) - at < STAYS:
        return None

    def half(rounds: slice) -> bool:
        found = others[rounds][known[rounds]].sum()
        return bool(found > 0 and mine[rounds][known[rounds]].sum() < FALL * found)

    return at if half(after) and not half(before) else None
