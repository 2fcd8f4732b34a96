"""Adaptive hyper-parameters (§3.2, §3.3): learning rate and local steps tuned while the federation trains.

H. Mostafa (2019), Robust federated learning through representation matching and adaptive hyper-parameters. Every round
draws h_t from P(·|ψ_t), a discrete Gaussian on a grid (see `discrete_gaussian`). The relative decrease of the global
model's loss is the reward r_t, and REINFORCE moves ψ up the gradient of its expectation. The paper's tables show that
this alone can end in a useless model (9.8 % on keyword spotting). The collapse guard, which is ours, rolls back.
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
from ...core.settings import check_settings, document_parameters, setting
from ...errors import SettingError
from ..components import fixed_hyper, keep_global_model
from ..fedavg_and_baselines import FedAvg
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

# None of these is from the paper, which gives neither grid nor Z, η_H or precision. The grids are ours. Z = 5,
# η_H = 0.01 and a precision of 85 are those of a successor (Auto-FedRL). Its steps are Adam with betas of 0.7;
# here they are plain, as eq. (7) prints them.
DEFAULT_LR_GRID = tuple(round(10 ** (exponent / 4), 6) for exponent in range(-12, -3))  # 0.001 to 0.1
DEFAULT_WORK_GRID = (5, 10, 20, 40, 80, 120, 160)

_LOSS_SOURCES: Mapping[RewardSource, tuple[str, int]] = {
    "validation": ("validation", 0),
    "clients": ("received_loss", 1),
}
"""The name of the loss in the feedback, and its delay in rounds."""
_USED_METRIC = "used"  # the share of the models that were usable

MIN_REWARD = -1.0  # ours: the lowest reward with a guard; the highest possible is 1
PRECISION_GROWTH = 4.0  # ours: the factor on the precision after a collapse
MAX_SILENT_ROUNDS = 3  # ours: rounds without a loss from any client after which the model sent counts as broken


@dataclass(frozen=True)
class ReinforceTuner:
    """The tuner of Algorithm 1: h_t ~ P(·|ψ_t), r_t = (L_t - L_{t+1})/L_t, and eq. (7) with ascent (ERRATA 1).

    So E[r_t], eq. (3), goes up. Not from the paper: grids, Z, η_H, precision and collapse guard.
    The loss is the server's on its validation set, or the mean of the clients' losses of the model that they received
    (§3.3). The latter arrives a round later, so ψ lags by one round; different clients in t and t+1 add noise.
    An unknown or infinite reward changes nothing. With a guard, a draw by which all models diverged gets the lowest
    reward. Losses should be positive; their sign is not used.
    """

    lr: tuple[float, ...] | None = setting(
        DEFAULT_LR_GRID, "the learning rates to draw from; not from the paper", above=0
    )
    work: tuple[int, ...] | None = setting(
        DEFAULT_WORK_GRID, "the amounts of work to draw from; not from the paper", least=1, whole=True
    )
    log_axes: tuple[str, ...] = setting(("lr", "work"), "the grids on a logarithmic axis; not from the paper")
    reward: RewardSource = setting(
        "validation",
        "the source of the loss: the server's validation set or the clients (ERRATA 7)",
        one_of=tuple(_LOSS_SOURCES),
    )
    window: int = setting(
        5, "Z: the number of earlier rewards in the baseline; not from the paper", least=1, whole=True
    )
    step_size: float = setting(0.01, "η_H: the step size of ψ; not from the paper", above=0)
    precision: float = setting(
        85.0, "the initial precision of the draws, on a grid of width 1; not from the paper", above=0
    )
    weighting: BaselineWeighting = setting(
        "uniform", "the baseline: eq. (7), or eq. (6) made causal (ERRATA 2)", one_of=("uniform", "triangular")
    )
    collapse_factor: float | None = setting(
        1.5,
        "roll back when the loss exceeds the lowest by this factor; None: never; not from the paper",
        least=1,
    )

    @cached_property
    def axes(self) -> tuple[GridAxis, ...]:
        """The axes of the grids that are given."""
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
                "AdaptiveHyper needs the server's own validation set: give population.with_validation(x, y), or let "
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
        """Move the draw whose reward is due into the window, and take one step of ψ."""
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
        """Give the last draw the lowest reward: all its models diverged, and the loss did not change."""
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

    def _update_loss_average(self, state: TunerState, loss: float, delay: int) -> tuple[TunerState, float]:
        """Return the loss to compare with the lowest: for clients, who change every round, a running mean.

        The first loss after a rollback is that of the restored model. It may be higher, because party state was reset.
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
        """Record L_1, and the global model of the lowest loss with its ψ."""
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
        """Return whether half of the gain is lost and the loss is far above the lowest, so that it is not noise.

        Half is in logarithms, because rewards are relative: the geometric mean of the first and the lowest loss.
        Clients that cannot use the model send no losses: their silence counts as a collapse, once.
        """
        if self.collapse_factor is None or state.lowest_loss_model is None:
            return False
        if state.silent_rounds:
            return state.silent_rounds == MAX_SILENT_ROUNDS
        bound = max(math.sqrt(max(0.0, state.first_loss * state.lowest_loss)), self.collapse_factor * state.lowest_loss)
        return not loss <= bound  # nan compares false

    def _roll_back(self, state: TunerState) -> TunerState:
        """Restore ψ of the lowest loss, moved away from the draw that collapsed.

        The draw gets the lowest reward, and the mean moves one step down each axis: a draw at the mean itself has no
        direction, and less training is safer. The result replaces the stored ψ, so that the same state is never
        retried in the same way.
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
        loss_name = "loss" if state.loss_average is None else "mean loss"
        reason = f"a {loss_name} of {loss:.3g}, and {state.lowest_loss:.3g} at its lowest"
        reason = f"no client has replied for {state.silent_rounds} rounds" if state.silent_rounds else reason
        return f"it collapsed at round {round_index} ({reason}) and rolled back to round {state.lowest_loss_round}"

    def _sample_hyper(
        self,
        state: TunerState,
        context: TuneContext,
        global_model: Tensor | None,
        note: str,
        numbers: Mapping[str, float],
    ) -> TuneResult:
        """Draw h_t ~ P(·|ψ_t), and keep its score at ψ_t until its reward is known."""
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
    """Return the step of ψ over a window of rewards, before η_H: the last row is round t.

    "uniform" is eq. (7), literally: Σ_τ (r_τ - r̂)·∇log P(h_τ|ψ_τ) with the mean r̂ of the window. A score recurs in
    Z+1 rounds, so a draw counts about Z+1 times as much as in eq. (6) (ERRATA 2). "triangular" is eq. (6) with past
    rewards alone: the last score once, with a baseline that weights a reward k rounds old by Z+1-k.

    >>> reinforce_gradient(np.array([[1.0], [2.0]]), np.array([0.1, 0.3])).round(3)
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
    loss_samples: int = setting(64, "own samples on which a client measures the loss", least=1, whole=True)


def _grid(name: str, given: Any) -> tuple[Any, ...] | None:
    if isinstance(given, str) or not isinstance(given, Iterable | None):
        raise invalid_grid_error(name, given)
    return None if given is None else tuple(given)


@document_parameters(ReinforceTuner, _LossSamplesSetting, base="the method to wrap")
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
    """Wrap a method so that REINFORCE tunes its learning rate and work online: §3.2, Algorithm 1.

    Not from the paper: every number here. ``None`` for a grid leaves the solver's own value alone. With
    ``collapse_factor``, a global model that has lost half of the gain and has that many times the lowest loss is rolled
    back to the one of the lowest loss. Parties then reset personal models, private layers and matching layers, which
    came from the rounds rolled back. ``collapse_factor=None`` is the paper's own scheme. ``loss_samples``: the number
    of own samples on which a client measures the loss, if ``reward="clients"``.

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
        raise SettingError(
            f"AdaptiveHyper tunes 'lr', 'work' or both. Got lr={lr}, work={work}, log_axes={log_axes!r}."
        )
    if base.tune is not fixed_hyper or base.server_update is keep_global_model:
        why = "has no global model to measure" if base.server_update is keep_global_model else "is tuned already"
        raise SettingError(f"AdaptiveHyper cannot tune {base.name}, which {why}.")
    return replace(
        base,
        name=f"{base.name}+AH",
        tune=tuner,
        loss_samples=loss_samples if reward == "clients" else base.loss_samples,
    )
