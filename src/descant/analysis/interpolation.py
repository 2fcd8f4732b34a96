"""The walk from own to centre, before and after aggregation: Fed+ v2 fig. 1c (v1 fig. 3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..core.interfaces import Engine, Store
from ..core.messages import Report, Task
from ..errors import DescantError, SettingError
from ..privacy.budget import promised
from ..rounds.aggregate import models_of
from ..rounds.dispatch import tasks_for
from ..rounds.loop import run
from .scores import Column, Numbers, answers

if TYPE_CHECKING:
    from ..federation import Federation


@dataclass(frozen=True)
class Walk:
    """The parties' own test scores along (1-λ)·w_k + λ·w̃, and with the centre of the round before."""

    names: tuple[str, ...]
    metric: str
    higher_is_better: bool
    shares: Numbers  # [points] λ, from 0 (the party's model after its local work) to 1 (the new centre)
    scores: Numbers  # [parties, points]
    previous: Numbers  # [parties] with the centre that the local work began from (the paper's dashed lines)

    @property
    def mean(self) -> Numbers:
        """Over the parties, ``[points]``; those without a test set do not count."""
        return np.array([Column(scores).mean for scores in self.scores.T])

    @property
    def mean_previous(self) -> float:
        """Over the parties."""
        return Column(self.previous).mean


@dataclass(frozen=True)
class Listening:
    """An engine that notes the reports of training that pass through it."""

    engine: Engine
    heard: dict[str, Report] = field(default_factory=dict)

    @property
    def memory(self) -> Store:
        return self.engine.memory

    def members(self, begin: bool = False) -> Sequence[str]:
        return self.engine.members(begin)

    def submit(self, tasks: Sequence[Task]) -> None:
        self.engine.submit(tasks)

    def collect(self, timeout: float) -> list[Report]:
        reports = self.engine.collect(timeout)
        self.heard.update((r.party, r) for r in reports if isinstance(r, Report) and r.kind == "train")
        return reports


def walk(federation: Federation, points: int = 11, most: int | None = None) -> Walk:
    """What the next round would do, shown at ``points`` places between each party's model and the new centre.

    The round is done as a trial and taken back, so that the federation stands where it stood. λ=0 is a party's model
    after its local work, λ=1 the centre that comes of it; private layers stay the party's own. Who is walked with:
    those who would take part in that round, ``most`` of them, evenly chosen.
    """
    if not isinstance(points, int) or points < 2:
        raise SettingError(f"A walk has at least 2 points, its two ends. Got {points!r}.")
    plan, state, engine = federation.plan_, federation.state, Listening(federation.engine_)
    if promised(plan) is not None:
        raise DescantError("A walk takes a round on trial, and one of a private run tells what its ε does not count.")
    if plan.algorithm.secure is not None:
        raise DescantError("A walk goes from single models to the centre, and nobody sees single models of this run.")
    try:
        trial = next(run(plan, engine, state, 1))
        if trial.note:
            raise DescantError(f"The walk needs a round that goes well, and in this one {trial.note}.")
        chosen = trial.accepted
        if most is not None and most < len(chosen):
            chosen = tuple(chosen[i] for i in np.linspace(0, len(chosen) - 1, most).astype(int))
        models = models_of(plan, state, [engine.heard[name] for name in chosen])  # [K, width]
        shares = np.linspace(0.0, 1.0, points)
        tasks = list(tasks_for(plan, trial.state, chosen, "evaluate", trial.index))

        def judged(rows: Sequence[torch.Tensor]) -> Numbers:
            """The scores of one row a party, ``[K]``."""
            asked = [replace(t, arrays=dict.fromkeys(t.arrays, row)) for t, row in zip(tasks, rows, strict=True)]
            found = answers(federation.engine_, asked)
            return np.array([found.get(name, {}).get("center", np.nan) for name in chosen])

        center = trial.state.center.expand_as(models)
        scores = [judged(list(_between(models, center, float(share)))) for share in shares]
        previous = judged([state.center] * len(chosen))
    finally:
        federation.engine_.memory.rollback(state.round)
        state.own.rollback(state.round)
    better = plan.metric.higher_is_better
    return Walk(chosen, plan.metric.name, better, shares, np.stack(scores, 1), previous)


def _between(models: torch.Tensor, center: torch.Tensor, share: float) -> torch.Tensor:
    """The ends are exact, bit for bit."""
    if share in (0.0, 1.0):
        return center if share else models
    return torch.lerp(models, center, share)
