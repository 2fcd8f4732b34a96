"""Collapse: a gain that is lost for good, often after one round that moved the model far (Fed+ v2 §3).

The thresholds are ours: the papers show collapse (v2 fig. 1b, v1 fig. 2 and 10) and do not define it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
JUMP_FACTOR = 10.0  # ours: multiple of the usual change of the model per round
BASELINE_WINDOW = 20  # ours: number of earlier rounds whose median is the usual change
MIN_HISTORY = 5  # ours: number of rounds needed before a usual change is defined
LOSS_SHARE = 0.5  # ours: share of the gain that must be lost
MIN_ROUNDS_LOST = 3  # ours: rounds (or points of a curve) at the end without recovery
NOISE_FACTOR = 5.0  # ours: a drop below this multiple of the usual step back is noise
MIN_DROP_SHARE = 0.05  # ours: minimum drop as a share of the scale, for curves too short to estimate the noise


def biggest_jump(update_norms: Sequence[float]) -> tuple[int, float] | None:
    """Return the index of the largest change relative to the usual one, and their ratio; None below ``JUMP_FACTOR``.

    >>> biggest_jump([1.0, 1.2, 0.8, 1.0, 1.0, 40.0, 1.0])
    (5, 40.0)
    """
    jump = None
    values = np.asarray(update_norms, dtype=float)
    for index in range(MIN_HISTORY, len(values)):
        earlier = values[max(0, index - BASELINE_WINDOW) : index]
        typical = np.median(earlier[earlier > 0]) if np.count_nonzero(earlier > 0) >= MIN_HISTORY else np.nan
        with np.errstate(invalid="ignore"):  # both are ∞ after a model has diverged
            factor = float(values[index] / typical)  # nan compares false
        if factor >= JUMP_FACTOR and (jump is None or factor > jump[1]):
            jump = (index, factor)
    return jump


def lasting_drop(values: Sequence[float], higher_is_better: bool, is_fraction: bool = True) -> int | None:
    """Return the index from which more than half of the gain stays lost to the end; None without such a drop.

    A drift of a few points of the scale does not count, and neither does a steady oscillation. With ``is_fraction``,
    numbers from 0 to 1 are shares of 1, such as accuracies.

    >>> lasting_drop([0.2, 0.5, 0.7, 0.8, 0.3, 0.2, 0.25], higher_is_better=True)
    4
    """
    oriented = np.asarray(values, dtype=float) * (1 if higher_is_better else -1)
    known_indices = np.flatnonzero(~np.isnan(oriented))  # no party trained in the other rounds
    score = oriented[known_indices]
    if len(score) <= MIN_ROUNDS_LOST:
        return None
    best = np.maximum.accumulate(score)[:-1]  # the best score before each point but the first
    with np.errstate(invalid="ignore"):  # -∞ is a diverged model
        low = score[1:] < best - LOSS_SHARE * (best - score[0])
    drop_start = len(low) - int(np.argmin(low[::-1])) if not low.all() else 0  # start of the last run of low scores
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
    """Return the scale of a drop: 1 for fractions such as accuracies, else the largest number before it."""
    largest = float(np.abs(before[np.isfinite(before)]).max(initial=0.0))
    return 1.0 if is_fraction and before.min() >= 0 and largest <= 1 else largest


def shortfall_start(rewards: Sequence[float] | Numbers, local_rewards: Sequence[float] | Numbers) -> int | None:
    """Return the index from which less than half of local training's reward is earned, to the end; None without one.

    The reward of a round depends on its days more than on the model, and the days are the same for both. The index is
    where the cumulative lead over local training is largest. None also if local training earns nothing.

    >>> shortfall_start([5, -1, 5, 4, 6, 3, 0, 0, 0, 0], [5, -1, 5, 4, 6, 3, 4, -2, 6, 4])
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
    peak = len(lead) - int(np.argmax(lead[::-1]))  # just after the last maximum
    before = slice(0, peak)
    after = slice(peak, None)
    if peak < MIN_HISTORY or len(own_rewards) - peak < MIN_ROUNDS_LOST:
        return None

    def below_half(rounds: slice) -> bool:
        baseline_sum = baseline_rewards[rounds][known[rounds]].sum()
        return bool(baseline_sum > 0 and own_rewards[rounds][known[rounds]].sum() < LOSS_SHARE * baseline_sum)

    return peak if below_half(after) and not below_half(before) else None
