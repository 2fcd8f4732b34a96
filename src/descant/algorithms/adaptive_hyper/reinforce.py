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

from ...core.algorithm import Algorithm, TuneContext, TuneResult
from ...core.settings import check_settings, setting
from ...errors import SettingError
from ..components import fixed_hyper, keep_global_model
from ..fedavg import FedAvg
from .discrete_gaussian import (
    GridAxis,
    Numbers,
    clip_psi,
    draw_point,
    grid_points,
    grid_spacing,
    initial_psi,
    invalid_grid_error,
    scale_precision,
    score,
)
from .tuner_state import TunerState

RewardSource: TypeAlias = Literal["validation", "clients"]
BaselineWeighting: TypeAlias = Literal["uniform", "triangular"]

# None of these is from the paper, which names neither grid nor Z, η_H, precision: the grids are ours; Z = 5, η_H = 0.01
# and a precision of 85 are those of a successor (Auto-FedRL). But that takes steps of Adam with betas of 0.7; here they
# are plain, as eq. (7) prints them.
DEFAULT_LR_GRID = tuple(round(10 ** (exponent / 4), 6) for exponent in range(-12, -3))  # 0.001 to 0.1
DEFAULT_WORK_GRID = (5, 10, 20, 40, 80, 120, 160)

_LOSS_SOURCES: Mapping[RewardSource, tuple[str, int]] = {
    "validation": ("validation", 0),
    "clients": ("received_loss", 1),
}
"""The name of the loss in the feedback, and how many rounds it comes late."""
_USED_METRIC = "used"  # the share of the models that could be used

MIN_REWARD = -1.0  # ours: with a guard no reward is below it; 1 is the best there can be
PRECISION_GROWTH = 4.0  # ours: the precision after a collapse, times what it was
MAX_SILENT_ROUNDS = (
    3  # ours: rounds without a loss from any client, after which the model they were sent counts as broken
)


@dataclass(frozen=True)
class ReinforceTuner:
    """The tuner of Algorithm 1: h_t ~ P(·|ψ_t), r_t = (L_t - L_{t+1})/L_t, and eq. (7) with ascent (ERRATA 1).

    So E[r_t], eq. (3), goes up. Not from the paper: grids, Z, η_H, precision and guard.
    The loss is the server's on its validation set, or the mean of what clients measured on the model that they received
    (§3.3). That comes a round later, so that ψ then lags one round behind; L_t of other clients than L_{t+1} is noise.
    A reward that is not known or not finite moves nothing. With a guard, a draw by which all models diverged has the
    worst one. Losses should be positive; their sign is not used.
    """

    lr: tuple[float, ...] | None = setting(
        DEFAULT_LR_GRID, "the learning rates to draw from; not from the paper", above=0
    )
    work: tuple[int, ...] | None = setting(
        DEFAULT_WORK_GRID, "how much work to draw from; not from the paper", least=1, whole=True
    )
    log_axes: tuple[str, ...] = setting(("lr", "work"), "whose values lie on a logarithmic axis; not from the paper")
    reward: RewardSource = setting("validation", "whose loss is the reward (ERRATA 7)", one_of=tuple(_LOSS_SOURCES))
    window: int = setting(5, "Z: so many rewards before the last; not from the paper", least=1, whole=True)
    step_size: float = setting(0.01, "η_H: the plain step of ψ; not from the paper", above=0)
    precision: float = setting(85.0, "of the first draws, the grid being 1 wide; not from the paper", above=0)
    weighting: BaselineWeighting = setting(
        "uniform", "the baseline: eq. (7), or eq. (6) made causal (ERRATA 2)", one_of=("uniform", "triangular")
    )
    collapse_factor: float | None = setting(
        1.5, "a loss of so many times the lowest may be a collapse; None: never; not from the paper", least=1
    )

    @cached_property
    def axes(self) -> tuple[GridAxis, ...]:
        """The grids that there are."""
        grids = {"lr": self.lr, "work": self.work}
        return tuple(GridAxis(name, grid, name in self.log_axes) for name, grid in grids.items() if grid is not None)

    @cached_property
    def _points(self) -> Numbers:
        return grid_points(self.axes)

    @cached_property
    def _spacing(self) -> Numbers:
        return grid_spacing(self.axes)

    def __call__(self, context: TuneContext) -> TuneResult:
        name, delay = _LOSS_SOURCES[self.reward]
        if self.reward == "validation" and name not in context.feedback:
            raise SettingError(
                "AdaptiveHyper needs the server's own validation set: give people.with_validation(x, y), or let "
                "clients measure the loss (reward='clients')."
            )
        state = TunerState.from_tensors(context.tuner_state) if context.tuner_state else self._initial_state()
        loss = context.feedback.get(name, math.nan)
        silent = 0 if name in context.feedback or context.round == 1 else state.silent_rounds + 1
        state, level = self._update_loss_average(replace(state, silent_rounds=silent), loss, delay)
        if self._has_collapsed(state, level):
            next_state = self._roll_back(state)
            global_model = state.lowest_loss_model
            note = self._rollback_message(state, level, context.round - 1 - delay)
            numbers = {"rolled_back": float(state.lowest_loss_round)}
        elif self.collapse_factor is not None and len(state.pending_scores) and context.feedback.get(_USED_METRIC) == 0:
            next_state = self._penalize_divergence(state)
            numbers = {"reward": MIN_REWARD}
            global_model = None
            note = ""
        else:
            next_state, numbers = self._apply_reward(state, loss, delay)
            global_model = None
            note = ""
            next_state = self._record_best(
                next_state, level, state.start_model if delay else context.global_model, context.round - 1 - delay
            )
        return self._sample_hyper(next_state, context, global_model, note, numbers)

    def _initial_state(self) -> TunerState:
        psi = clip_psi(initial_psi(len(self.axes), self.precision), self._spacing)
        no_scores = np.empty((0, len(psi)))
        return TunerState(psi, pending_scores=no_scores, scores=no_scores, rewards=np.empty(0))

    def _apply_reward(self, state: TunerState, loss: float, delay: int) -> tuple[TunerState, dict[str, float]]:
        """The draw whose reward is due takes its place in the window, and ψ goes one step up."""
        due = state.pending_scores[: max(0, len(state.pending_scores) - delay)]
        next_state = replace(state, pending_scores=state.pending_scores[len(due) :], loss=loss)
        reward = (state.loss - loss) / abs(state.loss) if state.loss else math.nan
        if not len(due) or not math.isfinite(reward):
            return next_state, {}
        bounded = reward if self.collapse_factor is None else max(reward, MIN_REWARD)
        next_state = self._append_reward(next_state, due[-1], bounded)
        return replace(next_state, psi=clip_psi(self._gradient_step(next_state.psi, next_state), self._spacing)), {
            "reward": reward
        }

    def _penalize_divergence(self, state: TunerState) -> TunerState:
        """No model that came of the last draw could be used, so that the loss, which stays, says nothing of it."""
        next_state = self._append_reward(
            replace(state, pending_scores=state.pending_scores[:-1]), state.pending_scores[-1], MIN_REWARD
        )
        return replace(next_state, psi=clip_psi(self._gradient_step(next_state.psi, next_state), self._spacing))

    def _append_reward(self, state: TunerState, score: Numbers, reward: float) -> TunerState:
        scores = np.vstack([state.scores, score])
        rewards = np.append(state.rewards, reward)
        return replace(state, scores=scores[-self.window - 1 :], rewards=rewards[-self.window - 1 :])

    def _gradient_step(self, psi: Numbers, state: TunerState) -> Numbers:
        return psi + self.step_size * reinforce_gradient(state.scores, state.rewards, self.weighting)

    # ── the guard ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _update_loss_average(self, state: TunerState, loss: float, delay: int) -> tuple[TunerState, float]:
        """The loss that is held against the lowest: of clients, who are others in every round, its running mean.

        The first one after a return is that of the place gone back to, and may be higher: parties began anew there.
        """
        if self.collapse_factor is None or not delay or not math.isfinite(loss):
            return state, loss
        if state.loss_average is None:
            level = loss
            lowest = state.lowest_loss if state.lowest_loss_model is None else max(state.lowest_loss, loss)
        else:
            level = float(state.loss_average[0] + (loss - state.loss_average[0]) / (self.window + 1))
            lowest = state.lowest_loss
        return replace(state, loss_average=np.array([level]), lowest_loss=lowest), level

    def _record_best(self, state: TunerState, loss: float, global_model: Tensor | None, round_index: int) -> TunerState:
        """L_1, and the centre of the lowest loss, with the ψ that it had."""
        if not math.isfinite(loss):
            return state
        state = replace(state, first_loss=loss) if math.isnan(state.first_loss) else state
        if self.collapse_factor is None or global_model is None or loss >= state.lowest_loss:
            return state
        return replace(
            state,
            lowest_loss=loss,
            lowest_loss_round=round_index,
            lowest_loss_model=global_model,
            lowest_loss_psi=state.psi,
        )

    def _has_collapsed(self, state: TunerState, loss: float) -> bool:
        """Whether half of what was gained is lost again, and the loss is far above the lowest: noise is not a collapse.

        Half is meant in logarithms, because rewards are relative: the geometric mean of the first loss and the lowest.
        Of clients who cannot work with the model at all there are no losses: silence counts, once.
        """
        if self.collapse_factor is None or state.lowest_loss_model is None:
            return False
        if state.silent_rounds:
            return state.silent_rounds == MAX_SILENT_ROUNDS
        bound = max(math.sqrt(max(0.0, state.first_loss * state.lowest_loss)), self.collapse_factor * state.lowest_loss)
        return not loss <= bound  # nan compares false

    def _roll_back(self, state: TunerState) -> TunerState:
        """ψ as it was there, but away from what collapsed: its reward counts, and the mean goes a step down each axis.

        The step down is for a draw at the mean itself, which has no direction: less learning is safer. This is then the
        ψ of that place, so that no place is tried for ever in the same way.
        """
        assert state.lowest_loss_psi is not None
        psi = state.lowest_loss_psi
        size = len(self.axes)
        if len(state.pending_scores):
            psi = self._gradient_step(psi, self._append_reward(state, state.pending_scores[0], MIN_REWARD))
        psi = scale_precision(psi, size, PRECISION_GROWTH)
        psi = clip_psi(np.concatenate([psi[:size] - self._spacing, psi[size:]]), self._spacing)
        restored = replace(
            self._initial_state(),
            psi=psi,
            lowest_loss_psi=psi,
            lowest_loss_model=state.lowest_loss_model,
            loss=state.lowest_loss,
        )
        return replace(
            restored,
            first_loss=state.first_loss,
            lowest_loss=state.lowest_loss,
            lowest_loss_round=state.lowest_loss_round,
            silent_rounds=state.silent_rounds,
        )

    def _rollback_message(self, state: TunerState, loss: float, round_index: int) -> str:
        reason = f"a {'loss' if state.loss_average is None else 'mean loss'} of {loss:.3g}, and {state.lowest_loss:.3g} at its lowest"
        reason = f"no client has been heard for {state.silent_rounds} rounds" if state.silent_rounds else reason
        return f"it collapsed at round {round_index} ({reason}) and went back to round {state.lowest_loss_round}"

    def _sample_hyper(
        self,
        state: TunerState,
        context: TuneContext,
        global_model: Tensor | None,
        note: str,
        numbers: Mapping[str, float],
    ) -> TuneResult:
        """h_t ~ P(·|ψ_t), its score at ψ_t waiting for its reward."""
        axes = self.axes
        points = self._points
        drawn = draw_point(state.psi, points, context.rng)
        grid_index = np.unravel_index(drawn, [len(axis.values) for axis in axes])
        values: dict[str, Any] = {axis.name: axis.values[i] for axis, i in zip(axes, grid_index, strict=True)}
        means = {axis.name: axis.value_at(mean) for axis, mean in zip(axes, state.psi.tolist(), strict=False)}
        if note:
            around = " and ".join(f"{name} around {mean:.2g}" for name, mean in means.items())
            note = f"{note}; it now draws {around}"
        start_model = context.global_model if global_model is None else global_model
        pending_scores = np.vstack([state.pending_scores, score(state.psi, points, drawn)])
        delay = self.collapse_factor is not None and _LOSS_SOURCES[self.reward][1]
        next_state = replace(state, pending_scores=pending_scores, start_model=start_model if delay else None)
        numbers = {**{f"{name}_mean": mean for name, mean in means.items()}, **numbers}
        return TuneResult(
            replace(context.hyper, **values), next_state.to_tensors(), global_model, note=note, metrics=numbers
        )


def reinforce_gradient(scores: Numbers, rewards: Numbers, weighting: BaselineWeighting = "uniform") -> Numbers:
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
        weights = np.zeros(len(rewards))
        nearness = np.arange(1.0, len(rewards))
        if len(nearness):  # no step at t=1, as in eq. (7)
            weights[-1] = rewards[-1] - nearness @ rewards[:-1] / nearness.sum()
    step: Numbers = weights @ scores
    return step


@dataclass(frozen=True)
class _LossSamplesSetting:
    loss_samples: int = setting(64, "samples of its own on which a client reports the loss", least=1, whole=True)


def _grid(name: str, given: Any) -> tuple[Any, ...] | None:
    if isinstance(given, str) or not isinstance(given, Iterable | None):
        raise invalid_grid_error(name, given)
    return None if given is None else tuple(given)


def AdaptiveHyper(
    base: Algorithm = FedAvg(),  # noqa: B008  a frozen value
    lr: Sequence[float] | None = DEFAULT_LR_GRID,
    work: Sequence[int] | None = DEFAULT_WORK_GRID,
    reward: RewardSource = "validation",
    window: int = 5,
    step_size: float = 0.01,
    precision: float = 85.0,
    weighting: BaselineWeighting = "uniform",
    collapse_factor: float | None = 1.5,
    log_axes: Sequence[str] = ("lr", "work"),
    loss_samples: int = 64,
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
        check_settings(_LossSamplesSetting(loss_samples), "AdaptiveHyper")
    tuner = ReinforceTuner(
        _grid("lr", lr),
        _grid("work", work),
        tuple(log_axes),
        reward=reward,
        window=window,
        step_size=step_size,
        precision=precision,
        weighting=weighting,
        collapse_factor=collapse_factor,
    )
    check_settings(tuner, "AdaptiveHyper")
    if not tuner.axes or not {*tuner.log_axes} <= {"lr", "work"}:
        raise SettingError(f"AdaptiveHyper tunes 'lr', 'work' or both. Got lr={lr}, work={work}, log={log_axes!r}.")
    if base.tune is not fixed_hyper or base.server_update is keep_global_model:
        why = "has no common model to measure" if base.server_update is keep_global_model else "is tuned already"
        raise SettingError(f"AdaptiveHyper cannot tune {base.name}, which {why}.")
    return replace(
        base,
        name=f"{base.name}+AH",
        tune=tuner,
        loss_samples=loss_samples if reward == "clients" else base.loss_samples,
    )
