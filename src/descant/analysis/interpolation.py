"""Scores between the parties' models and the global model: Fed+ v2 fig. 1c (v1 fig. 3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..core.interfaces import Engine, Store
from ..core.messages import Reply, Task
from ..errors import DescantError, SettingError
from ..privacy.budget import privacy_settings
from ..rounds.aggregate import stack_models
from ..rounds.dispatch import make_tasks
from ..rounds.loop import run
from .scores import Numbers, ScoreColumn, collect_evaluations

if TYPE_CHECKING:
    from ..federation import Federation


@dataclass(frozen=True)
class Interpolation:
    """Test scores of the parties along (1-λ)·w_k + λ·w̃, and with the global model of the round before."""

    names: tuple[str, ...]
    metric: str
    higher_is_better: bool
    shares: Numbers  # [points] λ, from 0 (the party's model after local training) to 1 (the new global model)
    scores: Numbers  # [parties, points]
    previous: Numbers  # [parties] with the global model at the start of local training (the paper's dashed lines)

    @property
    def mean(self) -> Numbers:
        """The mean over parties with a test set, ``[points]``."""
        return np.array([ScoreColumn(scores).mean for scores in self.scores.T])

    @property
    def mean_previous(self) -> float:
        """The mean over parties with a test set."""
        return ScoreColumn(self.previous).mean


@dataclass(frozen=True)
class ReplyRecorder:
    """An engine that records the train replies that pass through it."""

    engine: Engine
    train_replies: dict[str, Reply] = field(default_factory=dict)

    @property
    def party_states(self) -> Store:
        return self.engine.party_states

    def available_parties(self, starting_round: bool = False) -> Sequence[str]:
        return self.engine.available_parties(starting_round)

    def submit(self, tasks: Sequence[Task]) -> None:
        self.engine.submit(tasks)

    def collect(self, timeout: float) -> list[Reply]:
        replies = self.engine.collect(timeout)
        self.train_replies.update((r.party, r) for r in replies if isinstance(r, Reply) and r.kind == "train")
        return replies


def interpolate(federation: Federation, points: int = 11, max_parties: int | None = None) -> Interpolation:
    """Score ``points`` mixtures of each party's model and the new global model, for the next round.

    The round runs as a trial and is rolled back, so the federation does not change. λ=0 is a party's model after local
    training, λ=1 the new global model; private layers stay the party's own. The parties are those that would take part
    in that round; with ``max_parties``, an evenly spaced choice of them.
    """
    if not isinstance(points, int) or points < 2:
        raise SettingError(f"An interpolation has at least 2 points, its two ends. Got {points!r}.")
    plan = federation.plan_
    state = federation.state
    engine = ReplyRecorder(federation.engine_)
    if privacy_settings(plan) is not None:
        raise DescantError("An interpolation runs a trial round, whose outputs the ε of a private run does not count.")
    if plan.algorithm.secure_aggregation is not None:
        raise DescantError(
            "An interpolation needs the parties' single models, which secure aggregation hides in this run."
        )
    try:
        trial = next(run(plan, engine, state, 1))
        if trial.note:
            raise DescantError(f"The interpolation needs a successful trial round, but {trial.note}.")
        selected = trial.accepted
        if max_parties is not None and max_parties < len(selected):
            selected = tuple(selected[i] for i in np.linspace(0, len(selected) - 1, max_parties).astype(int))
        models = stack_models(plan, state, [engine.train_replies[name] for name in selected])  # [K, width]
        shares = np.linspace(0.0, 1.0, points)
        tasks = list(make_tasks(plan, trial.state, selected, kind="evaluate", index=trial.index))

        def evaluate_rows(rows: Sequence[torch.Tensor]) -> Numbers:
            """Return the scores of one row per party, ``[K]``."""
            requests = [replace(t, arrays=dict.fromkeys(t.arrays, row)) for t, row in zip(tasks, rows, strict=True)]
            scores = collect_evaluations(federation.engine_, requests)
            return np.array([scores.get(name, {}).get("global_model", np.nan) for name in selected])

        global_rows = trial.state.global_model.expand_as(models)
        scores = [evaluate_rows(list(interpolate_rows(models, global_rows, float(share)))) for share in shares]
        previous = evaluate_rows([state.global_model] * len(selected))
    finally:
        federation.engine_.party_states.rollback(state.round)
        state.personal_models.rollback(state.round)
    better = plan.metric.higher_is_better
    return Interpolation(
        selected, plan.metric.name, better, shares=shares, scores=np.stack(scores, 1), previous=previous
    )


def interpolate_rows(models: torch.Tensor, global_rows: torch.Tensor, share: float) -> torch.Tensor:
    """Return (1-λ)·models + λ·global_rows; both ends are exact, bit for bit."""
    if share in (0.0, 1.0):
        return global_rows if share else models
    return torch.lerp(models, global_rows, share)
