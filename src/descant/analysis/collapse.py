"""Collapse: what was learned is lost and stays lost, often after one round that threw the model far (Fed+ v2 §3).

The thresholds are ours: the papers show collapse (v2 fig. 1b, v1 fig. 2 and 10) and do not define it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
JUMP_FACTOR = 10.0  # ours: times the usual change of the model in a round
BASELINE_WINDOW = 20  # ours: the rounds before, whose median is the usual change
MIN_HISTORY = 5  # ours: so many rounds before there is a usual change
LOSS_SHARE = 0.5  # ours: of all that was gained, how much is lost
MIN_ROUNDS_LOST = 3  # ours: rounds (or points of a curve) at the end for which it stays lost
NOISE_FACTOR = 5.0  # ours: times the usual step back from one round to the next, below which a fall is noise
MIN_DROP_SHARE = 0.05  # ours: of the scale, at least: with few points there may be no step back to know the noise by


def biggest_jump(update_norms: Sequence[float]) -> tuple[int, float] | None:
    """The place at which the model changed most against its usual change, and how many times that; None below JUMP.

    >>> biggest_jump([1.0, 1.2, 0.8, 1.0, 1.0, 40.0, 1.0])
    (5, 40.0)
    """
    found = None
    values = np.asarray(update_norms, dtype=float)
    for index in range(MIN_HISTORY, len(values)):
        earlier = values[max(0, index - BASELINE_WINDOW) : index]
        typical = np.median(earlier[earlier > 0]) if np.count_nonzero(earlier > 0) >= MIN_HISTORY else np.nan
        with np.errstate(invalid="ignore"):  # of a model that is lost altogether both may be ∞
            factor = float(values[index] / typical)  # nan compares false
        if factor >= JUMP_FACTOR and (found is None or factor > found[1]):
            found = (index, factor)
    return found


def lasting_drop(values: Sequence[float], higher_is_better: bool, is_fraction: bool = True) -> int | None:
    """The place from which on more than half of what had been gained is lost, to the end; None if it is not.

    A drift of a few points of the scale is none, nor is what goes to and fro all the time. ``shares``: numbers from 0
    to 1 are parts of 1, such as accuracies.

    >>> lasting_fall([0.2, 0.5, 0.7, 0.8, 0.3, 0.2, 0.25], higher_is_better=True)
    4
    """
    oriented = np.asarray(values, dtype=float) * (1 if higher_is_better else -1)
    known_indices = np.flatnonzero(~np.isnan(oriented))  # nobody took a step in the others
    score = oriented[known_indices]
    if len(score) <= MIN_ROUNDS_LOST:
        return None
    best = np.maximum.accumulate(score)[:-1]  # before each but the first
    with np.errstate(invalid="ignore"):  # -∞ is a model that failed
        low = score[1:] < best - LOSS_SHARE * (best - score[0])
    drop_start = len(low) - int(np.argmin(low[::-1])) if not low.all() else 0  # the last run of falls begins here
    if len(low) - drop_start < MIN_ROUNDS_LOST or drop_start == 0:
        return None
    steps = np.diff(score[: drop_start + 1])
    typical_step_back = float(np.median(-steps[steps < 0])) if (steps < 0).any() else 0.0
    drop = best[drop_start] - np.median(score[drop_start + 1 :])
    scale = reference_scale(oriented[known_indices[: drop_start + 1]], is_fraction)
    return (
        int(known_indices[drop_start + 1])
        if drop > max(NOISE_FACTOR * typical_step_back, MIN_DROP_SHARE * scale)
        else None
    )


def reference_scale(before: Numbers, is_fraction: bool) -> float:
    """What a fall is held against: 1 for shares, such as accuracies, else the largest number before it."""
    largest = float(np.abs(before[np.isfinite(before)]).max(initial=0.0))
    return 1.0 if is_fraction and before.min() >= 0 and largest <= 1 else largest


def shortfall_start(rewards: Sequence[float] | Numbers, local_rewards: Sequence[float] | Numbers) -> int | None:
    """The place from which on less than half is earned of what training alone earns in the same rounds, to the end.

    What is earned in a round depends on its days more than on what was learned, and they are the same for both. The
    place is where the lead over training alone, added up, is largest. None if there is none, or nobody earns.

    >>> fell_behind([5, -1, 5, 4, 6, 3, 0, 0, 0, 0], [5, -1, 5, 4, 6, 3, 4, -2, 6, 4])
    6
    """
    own_rewards = np.asarray(rewards, dtype=float)
    baseline_rewards = np.asarray(local_rewards, dtype=float)
    if (
        len(own_rewards) != len(baseline_rewards)
        or not (known := np.isfinite(own_rewards) & np.isfinite(baseline_rewards)).any()
    ):
        return None
    lead = np.cumsum(np.where(known, own_rewards - baseline_rewards, 0.0))
    peak = len(lead) - int(np.argmax(lead[::-1]))  # behind the last of the largest
    before = slice(0, peak)
    after = slice(peak, None)
    if peak < MIN_HISTORY or len(own_rewards) - peak < MIN_ROUNDS_LOST:
        return None

    def below_half(rounds: slice) -> bool:
        baseline_sum = baseline_rewards[rounds][known[rounds]].sum()
        return bool(baseline_sum > 0 and own_rewards[rounds][known[rounds]].sum() < LOSS_SHARE * baseline_sum)

    return peak if below_half(after) and not below_half(before) else None
