"""Did it help my party? Its own test set, judged with its own model, the centre and its majority class."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from .core import Engine
from .errors import DescantWarning, EngineError
from .gate import Gate
from .parties import People
from .piece import Plan
from .run import State, gather, tasks_for
from .table import Table

Numbers = NDArray[np.float64]
_AT_ONCE = 64  # parties whose models are in memory together


@dataclass(frozen=True)
class Column:
    """One number a party, and what they come to; a party without a test set is nan and does not count."""

    values: Numbers
    higher_is_better: bool = True

    @property
    def mean(self) -> float:
        return float(self._known.mean()) if len(self._known) else float("nan")

    @property
    def worst(self) -> float:
        if not len(self._known):
            return float("nan")
        return float(self._known.min() if self.higher_is_better else self._known.max())

    @property
    def spread(self) -> float:
        """The standard deviation over parties."""
        return float(self._known.std()) if len(self._known) else float("nan")

    def gained(self, alone: Column) -> int:
        """How many parties are better off than with the other column.

        >>> Column(np.array([0.9, 0.5])).gained(Column(np.array([0.8, 0.5])))
        1
        """
        difference = self.values - alone.values
        return int(((difference > 0) if self.higher_is_better else (difference < 0)).sum())

    @property
    def _known(self) -> Numbers:
        known: Numbers = self.values[~np.isnan(self.values)]
        return known


@dataclass(frozen=True)
class Scores:
    """What the parties reach, in the order of ``names``."""

    names: tuple[str, ...]
    metric: str
    own: Column
    center: Column
    majority: Column


def score(plan: Plan, engine: Engine, state: State, names: Iterable[str] | None = None) -> Scores:
    """Ask parties (all, if none are named) to judge the models as they stand."""
    parties: Sequence[str] = tuple(engine.members()) if names is None else tuple(names)
    found: dict[str, dict[str, float]] = {}
    for first in range(0, len(parties), _AT_ONCE):
        tasks = list(tasks_for(plan, state, parties[first : first + _AT_ONCE], "evaluate", state.round))
        for report in gather(engine, tasks):
            if report.kind != "evaluate":  # a late answer to something else
                continue
            if report.status == "ok":
                found[report.party] = {n: float(v) for n, v in report.metrics.items() if isinstance(v, int | float)}
            else:
                why = report.reason or report.status
                told = f"Party {report.party!r} could not be evaluated, and does not count: {why}"
                warnings.warn(told, DescantWarning, stacklevel=3)

    def column(name: str) -> Column:
        values = np.array([found.get(party, {}).get(name, np.nan) for party in parties])
        return Column(values, plan.metric.higher_is_better)

    return Scores(tuple(parties), plan.metric.name, column("own"), column("center"), column("majority"))


def personal_row(plan: Plan, engine: Engine, state: State, party: str) -> Tensor:
    """The numbers of a party's own model, private layers included, as its owner would use it."""
    tasks = list(tasks_for(plan, state, [party], "personal", state.round))
    for report in gather(engine, tasks):
        if report.kind == "personal" and report.party == party:
            refusal = (
                report.reason or report.status
                if report.status != "ok"
                else Gate(plan.net.layout, [party]).shaped(report)
            )
            if refusal is None:
                return plan.net.layout.join(report.arrays)
            raise EngineError(f"Party {party!r} could not show its model: {refusal}")
    raise EngineError(f"Party {party!r} did not show its model.")


def party_table(people: People, scores: Scores, alone: Scores) -> Table:
    """One row a party, and the verdict below."""
    sign = 1 if scores.own.higher_is_better else -1
    rows = [
        {
            "party": name,
            "samples": people[name].samples,
            "own": float(scores.own.values[i]),
            "center": float(scores.center.values[i]),
            "alone": float(alone.own.values[i]),
            "majority": float(scores.majority.values[i]),
            "gain": sign * float(scores.own.values[i] - alone.own.values[i]),
        }
        for i, name in enumerate(scores.names)
    ]
    judged = int((~np.isnan(scores.own.values)).sum())
    gained, lost = scores.own.gained(alone.own), alone.own.gained(scores.own)
    hint = "" if judged else " No party has a test set: give parties.from_arrays(..., test=0.2)."
    verdict = (
        f"{scores.metric}: own {scores.own.mean:.3f}, alone {alone.own.mean:.3f}, centre {scores.center.mean:.3f}"
        + ("" if np.isnan(scores.majority.mean) else f", majority {scores.majority.mean:.3f}")
        + f". {gained} of {judged} parties gained by joining, {lost} lost.{hint}"
    )
    return Table(("party", "samples", "own", "center", "alone", "majority", "gain"), rows, verdict)
