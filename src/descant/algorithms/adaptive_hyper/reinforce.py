"""Adaptive hyper-parameters (§3.2, §3.3): learning rate and local steps, tuned while the federation learns.

H. Mostafa (2019), Robust federated learning through representation matching and adaptive hyper-parameters. Every round
draws h_t from P(·|ψ_t), a discrete Gaussian on a grid (see `gaussian`); what the round did to the loss of the centre is
the reward r_t, and REINFORCE moves ψ up the gradient of its expectation. The paper's tables show that this alone can
end in a model that knows nothing (9.8 % on keyword spotting): the guard, which is ours, goes back.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, TypeAlias

import numpy as np
from torch import Tensor

from ...core.algorithm import Algorithm, Tuned, Tuning
from ...core.settings import check, setting
from ...errors import SettingError
from ..components import fixed, stay
from ..fedavg import FedAvg
from .discrete_gaussian import (
    Axis,
    Numbers,
    draw,
    initial,
    kept_within,
    narrowed,
    no_grid,
    points_of,
    score,
    spacing_of,
)
from .tuner_state import Past

Reward: TypeAlias = Literal["validation", "clients"]
Weighting: TypeAlias = Literal["uniform", "triangular"]

# None of these is from the paper, which names neither grid nor Z, η_H, precision: the grids are ours; Z = 5, η_H = 0.01
# and a precision of 85 are those of a successor (Auto-FedRL). But that takes steps of Adam with betas of 0.7; here they
# are plain, as eq. (7) prints them.
LR = tuple(round(10 ** (exponent / 4), 6) for exponent in range(-12, -3))  # 0.001 to 0.1
WORK = (5, 10, 20, 40, 80, 120, 160)

_HEARD: Mapping[Reward, tuple[str, int]] = {"validation": ("validation", 0), "clients": ("received_loss", 1)}
"""The name of the loss in the feedback, and how many rounds it comes late."""
_USED = "used"  # the share of the models that could be used

WORST = -1.0  # ours: with a guard no reward is below it; 1 is the best there can be
NARROWING = 4.0  # ours: the precision after a collapse, times what it was
SILENT = 3  # ours: rounds without a loss from any client, after which the model they were sent counts as broken


@dataclass(frozen=True)
class Reinforce:
    """The tuner of Algorithm 1: h_t ~ P(·|ψ_t), r_t = (L_t - L_{t+1})/L_t, and eq. (7) with ascent (ERRATA 1).

    So E[r_t], eq. (3), goes up. Not from the paper: grids, Z, η_H, precision and guard.
    The loss is the server's on its validation set, or the mean of what clients measured on the model that they received
    (§3.3). That comes a round later, so that ψ then lags one round behind; L_t of other clients than L_{t+1} is noise.
    A reward that is not known or not finite moves nothing. With a guard, a draw by which all models diverged has the
    worst one. Losses should be positive; their sign is not used.
    """

    lr: tuple[float, ...] | None = setting(LR, "the learning rates to draw from; not from the paper", above=0)
    work: tuple[int, ...] | None = setting(WORK, "how much work to draw from; not from the paper", least=1, whole=True)
    log: tuple[str, ...] = setting(("lr", "work"), "whose values lie on a logarithmic axis; not from the paper")
    reward: Reward = setting("validation", "whose loss is the reward (ERRATA 7)", one_of=tuple(_HEARD))
    window: int = setting(5, "Z: so many rewards before the last; not from the paper", least=1, whole=True)
    rate: float = setting(0.01, "η_H: the plain step of ψ; not from the paper", above=0)
    precision: float = setting(85.0, "of the first draws, the grid being 1 wide; not from the paper", above=0)
    weighting: Weighting = setting(
        "uniform", "the baseline: eq. (7), or eq. (6) made causal (ERRATA 2)", one_of=("uniform", "triangular")
    )
    guard: float | None = setting(
        1.5, "a loss of so many times the lowest may be a collapse; None: never; not from the paper", least=1
    )

    @cached_property
    def axes(self) -> tuple[Axis, ...]:
        """The grids that there are."""
        grids = {"lr": self.lr, "work": self.work}
        return tuple(Axis(name, grid, name in self.log) for name, grid in grids.items() if grid is not None)

    @cached_property
    def _points(self) -> Numbers:
        return points_of(self.axes)

    @cached_property
    def _spacing(self) -> Numbers:
        return spacing_of(self.axes)

    def __call__(self, tuning: Tuning) -> Tuned:
        name, late = _HEARD[self.reward]
        if self.reward == "validation" and name not in tuning.feedback:
            raise SettingError(
                "AdaptiveHyper needs the server's own validation set: give people.with_validation(x, y), or let "
                "clients measure the loss (reward='clients')."
            )
        past = Past.of(tuning.memory) if tuning.memory else self._fresh()
        loss = tuning.feedback.get(name, math.nan)
        silent = 0 if name in tuning.feedback or tuning.round == 1 else past.silent + 1
        past, level = self._leveled(replace(past, silent=silent), loss, late)
        if self._collapsed(past, level):
            now, center, note = self._gone_back(past), past.there, self._told(past, level, tuning.round - 1 - late)
            numbers = {"went_back": float(past.lowest_at)}
        elif self.guard is not None and len(past.waiting) and tuning.feedback.get(_USED) == 0:
            now, numbers = self._wasted(past), {"reward": WORST}
            center, note = None, ""
        else:
            now, numbers = self._moved(past, loss, late)
            center, note = None, ""
            now = self._noted(now, level, past.begun if late else tuning.center, tuning.round - 1 - late)
        return self._drawn(now, tuning, center, note, numbers)

    def _fresh(self) -> Past:
        psi = kept_within(initial(len(self.axes), self.precision), self._spacing)
        nothing = np.empty((0, len(psi)))
        return Past(psi, waiting=nothing, scores=nothing, rewards=np.empty(0))

    def _moved(self, past: Past, loss: float, late: int) -> tuple[Past, dict[str, float]]:
        """The draw whose reward is due takes its place in the window, and ψ goes one step up."""
        due = past.waiting[: max(0, len(past.waiting) - late)]
        now = replace(past, waiting=past.waiting[len(due) :], loss=loss)
        reward = (past.loss - loss) / abs(past.loss) if past.loss else math.nan
        if not len(due) or not math.isfinite(reward):
            return now, {}
        bounded = reward if self.guard is None else max(reward, WORST)
        now = self._windowed(now, due[-1], bounded)
        return replace(now, psi=kept_within(self._ascended(now.psi, now), self._spacing)), {"reward": reward}

    def _wasted(self, past: Past) -> Past:
        """No model that came of the last draw could be used, so that the loss, which stays, says nothing of it."""
        now = self._windowed(replace(past, waiting=past.waiting[:-1]), past.waiting[-1], WORST)
        return replace(now, psi=kept_within(self._ascended(now.psi, now), self._spacing))

    def _windowed(self, past: Past, score: Numbers, reward: float) -> Past:
        scores, rewards = np.vstack([past.scores, score]), np.append(past.rewards, reward)
        return replace(past, scores=scores[-self.window - 1 :], rewards=rewards[-self.window - 1 :])

    def _ascended(self, psi: Numbers, past: Past) -> Numbers:
        return psi + self.rate * gradient(past.scores, past.rewards, self.weighting)

    # ── the guard ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _leveled(self, past: Past, loss: float, late: int) -> tuple[Past, float]:
        """The loss that is held against the lowest: of clients, who are others in every round, its running mean.

        The first one after a return is that of the place gone back to, and may be higher: parties began anew there.
        """
        if self.guard is None or not late or not math.isfinite(loss):
            return past, loss
        if past.level is None:
            level, lowest = loss, past.lowest if past.there is None else max(past.lowest, loss)
        else:
            level, lowest = float(past.level[0] + (loss - past.level[0]) / (self.window + 1)), past.lowest
        return replace(past, level=np.array([level]), lowest=lowest), level

    def _noted(self, now: Past, loss: float, center: Tensor | None, at: int) -> Past:
        """L_1, and the centre of the lowest loss, with the ψ that it had."""
        if not math.isfinite(loss):
            return now
        now = replace(now, first=loss) if math.isnan(now.first) else now
        if self.guard is None or center is None or loss >= now.lowest:
            return now
        return replace(now, lowest=loss, lowest_at=at, there=center, psi_there=now.psi)

    def _collapsed(self, past: Past, loss: float) -> bool:
        """Whether half of what was gained is lost again, and the loss is far above the lowest: noise is not a collapse.

        Half is meant in logarithms, because rewards are relative: the geometric mean of the first loss and the lowest.
        Of clients who cannot work with the model at all there are no losses: silence counts, once.
        """
        if self.guard is None or past.there is None:
            return False
        if past.silent:
            return past.silent == SILENT
        bound = max(math.sqrt(max(0.0, past.first * past.lowest)), self.guard * past.lowest)
        return not loss <= bound  # nan compares false

    def _gone_back(self, past: Past) -> Past:
        """ψ as it was there, but away from what collapsed: its reward counts, and the mean goes a step down each axis.

        The step down is for a draw at the mean itself, which has no direction: less learning is safer. This is then the
        ψ of that place, so that no place is tried for ever in the same way.
        """
        assert past.psi_there is not None
        psi, size = past.psi_there, len(self.axes)
        if len(past.waiting):
            psi = self._ascended(psi, self._windowed(past, past.waiting[0], WORST))
        psi = narrowed(psi, size, NARROWING)
        psi = kept_within(np.concatenate([psi[:size] - self._spacing, psi[size:]]), self._spacing)
        kept = replace(self._fresh(), psi=psi, psi_there=psi, there=past.there, loss=past.lowest)
        return replace(kept, first=past.first, lowest=past.lowest, lowest_at=past.lowest_at, silent=past.silent)

    def _told(self, past: Past, loss: float, at: int) -> str:
        why = f"a {'loss' if past.level is None else 'mean loss'} of {loss:.3g}, and {past.lowest:.3g} at its lowest"
        why = f"no client has been heard for {past.silent} rounds" if past.silent else why
        return f"it collapsed at round {at} ({why}) and went back to round {past.lowest_at}"

    def _drawn(
        self,
        now: Past,
        tuning: Tuning,
        center: Tensor | None,
        note: str,
        numbers: Mapping[str, float],
    ) -> Tuned:
        """h_t ~ P(·|ψ_t), its score at ψ_t waiting for its reward."""
        axes, points = self.axes, self._points
        drawn = draw(now.psi, points, tuning.rng)
        place = np.unravel_index(drawn, [len(axis.values) for axis in axes])
        values: dict[str, Any] = {axis.name: axis.values[i] for axis, i in zip(axes, place, strict=True)}
        means = {axis.name: axis.value_at(mean) for axis, mean in zip(axes, now.psi.tolist(), strict=False)}
        if note:
            around = " and ".join(f"{name} around {mean:.2g}" for name, mean in means.items())
            note = f"{note}; it now draws {around}"
        begun = tuning.center if center is None else center
        waiting = np.vstack([now.waiting, score(now.psi, points, drawn)])
        late = self.guard is not None and _HEARD[self.reward][1]
        past = replace(now, waiting=waiting, begun=begun if late else None)
        numbers = {**{f"{name}_mean": mean for name, mean in means.items()}, **numbers}
        return Tuned(replace(tuning.hyper, **values), past.memory(), center, note, numbers)


def gradient(scores: Numbers, rewards: Numbers, weighting: Weighting = "uniform") -> Numbers:
    """The step of ψ over a window of rewards, before η_H: the last row is round t, those before it are older.

    "uniform" is eq. (7), literally: Σ_τ (r_τ - r̂)·∇log P(h_τ|ψ_τ) with the mean r̂ of the window. A score comes back in
    Z+1 rounds, so that a draw counts about Z+1 times what it would count in eq. (6) (ERRATA 2). "triangular" is eq. (6)
    with past rewards alone: the last score once, its baseline weighing a reward k rounds old by Z+1-k.

    >>> gradient(np.array([[1.0], [2.0]]), np.array([0.1, 0.3])).round(3)
    array([0.1])
    """
    if weighting == "uniform":
        weights = rewards - rewards.mean()
    else:
        weights, nearness = np.zeros(len(rewards)), np.arange(1.0, len(rewards))
        if len(nearness):  # no step at t=1, as in eq. (7)
            weights[-1] = rewards[-1] - nearness @ rewards[:-1] / nearness.sum()
    step: Numbers = weights @ scores
    return step


@dataclass(frozen=True)
class _Measure:
    measure: int = setting(64, "samples of its own on which a client reports the loss", least=1, whole=True)


def _grid(name: str, given: Any) -> tuple[Any, ...] | None:
    if isinstance(given, str) or not isinstance(given, Iterable | None):
        raise no_grid(name, given)
    return None if given is None else tuple(given)


def AdaptiveHyper(
    base: Algorithm = FedAvg(),  # noqa: B008  a frozen value
    lr: Sequence[float] | None = LR,
    work: Sequence[int] | None = WORK,
    reward: Reward = "validation",
    window: int = 5,
    rate: float = 0.01,
    precision: float = 85.0,
    weighting: Weighting = "uniform",
    guard: float | None = 1.5,
    log: Sequence[str] = ("lr", "work"),
    measure: int = 64,
) -> Algorithm:
    """Any method with its learning rate and work tuned online by REINFORCE: §3.2, Algorithm 1.

    Not from the paper: every number here. ``None`` for a grid leaves the solver's own value alone. With ``guard``, a
    centre that has lost half of what was gained and has ``guard`` times the lowest loss, is given up for that of the
    lowest loss, and parties begin anew from it: own models, private layers and matching layers came of the rounds that
    are given up, and are forgotten. ``guard=None`` is the paper's own scheme. ``measure``: on how many samples of its
    own a client reports the loss, if ``reward="clients"``.

    >>> AdaptiveHyper(lr=(0.01, 0.1), work=None).name
    'FedAvg+AH'
    """
    if reward == "clients":
        check(_Measure(measure), "AdaptiveHyper")
    tuner = Reinforce(
        _grid("lr", lr), _grid("work", work), tuple(log), reward, window, rate, precision, weighting, guard
    )
    check(tuner, "AdaptiveHyper")
    if not tuner.axes or not {*tuner.log} <= {"lr", "work"}:
        raise SettingError(f"AdaptiveHyper tunes 'lr', 'work' or both. Got lr={lr}, work={work}, log={log!r}.")
    if base.tune is not fixed or base.advance is stay:
        why = "has no common model to measure" if base.advance is stay else "is tuned already"
        raise SettingError(f"AdaptiveHyper cannot tune {base.name}, which {why}.")
    return replace(base, name=f"{base.name}+AH", tune=tuner, measure=measure if reward == "clients" else base.measure)
