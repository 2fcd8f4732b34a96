"""Scores by party on its own test set: with its personal model, the global model and the trivial baseline."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from ..core.interfaces import Engine
from ..core.messages import Task
from ..core.metrics import trivial_baseline
from ..errors import DescantWarning, EngineError
from ..parties import Population
from ..reporting.table import Table
from ..rounds.dispatch import iterate_replies, make_tasks
from ..rounds.plan import Plan
from ..rounds.state import State
from ..rounds.validation import UpdateValidator, is_number

Numbers = NDArray[np.float64]
BATCH_SIZE = 64  # parties whose models are in memory at once


@dataclass(frozen=True)
class ScoreColumn:
    """One number per party with summary statistics; nan marks a party without a test set, which does not count."""

    values: Numbers
    higher_is_better: bool = True

    @property
    def mean(self) -> float:
        return float(self._known_values.mean()) if len(self._known_values) else float("nan")

    @property
    def worst(self) -> float:
        if not len(self._known_values):
            return float("nan")
        return float(self._known_values.min() if self.higher_is_better else self._known_values.max())

    @property
    def spread(self) -> float:
        """The standard deviation over parties."""
        with np.errstate(invalid="ignore"):  # a diverged model has the score -∞
            return float(self._known_values.std()) if len(self._known_values) else float("nan")

    def quantile(self, share: float) -> float:
        """Return the score that this share of the parties does not surpass, counted from the worst.

        >>> losses = ScoreColumn(np.array([4.0, 1.0, 2.0, 3.0, 0.0]), higher_is_better=False)
        >>> losses.quantile(0.1), losses.quantile(0.5), losses.quantile(0.9)
        (4.0, 2.0, 0.0)
        """
        if not len(self._known_values):
            return float("nan")
        sign = 1 if self.higher_is_better else -1
        return sign * float(np.quantile(sign * self._known_values, share, method="inverted_cdf"))

    def count_better(self, other: ScoreColumn) -> int:
        """Return the number of parties with a better score than in the other column.

        >>> ScoreColumn(np.array([0.9, 0.5])).count_better(ScoreColumn(np.array([0.8, 0.5])))
        1
        """
        return int(self.is_better(other).sum())

    def is_better(self, other: ScoreColumn) -> NDArray[np.bool_]:
        """Return a mask of the parties with a better score than in the other column."""
        with np.errstate(invalid="ignore"):
            difference = self.values - other.values
        return (difference > 0) if self.higher_is_better else (difference < 0)

    def masked(self, mask: NDArray[np.bool_]) -> ScoreColumn:
        """Return the column with nan outside the mask.

        >>> ScoreColumn(np.array([0.9, 0.5])).masked(np.array([True, False])).mean
        0.9
        """
        return replace(self, values=np.where(mask, self.values, np.nan))

    @property
    def _known_values(self) -> Numbers:
        known: Numbers = self.values[~np.isnan(self.values)]
        return known


UNKNOWN_SCORES = ScoreColumn(np.empty(0))


@dataclass(frozen=True)
class Scores:
    """The scores of the parties, in the order of ``names``."""

    names: tuple[str, ...]
    metric: str
    personal: ScoreColumn
    global_model: ScoreColumn
    majority: ScoreColumn  # the trivial baseline: see `metrics.trivial_baseline`
    before: ScoreColumn = UNKNOWN_SCORES  # before and after the last evaluated local training; nan without one
    after: ScoreColumn = UNKNOWN_SCORES


def evaluate_parties(plan: Plan, engine: Engine, state: State, names: Iterable[str] | None = None) -> Scores:
    """Evaluate the present models on the test sets of these parties, by default of all."""
    parties: Sequence[str] = tuple(engine.available_parties()) if names is None else tuple(names)
    scores: dict[str, dict[str, float]] = {}
    for first in range(0, len(parties), BATCH_SIZE):
        batch = parties[first : first + BATCH_SIZE]
        scores |= collect_evaluations(engine, list(make_tasks(plan, state, batch, kind="evaluate", index=state.round)))
    for party, local_scores in state.local_scores.items():
        if party in scores:
            scores[party] |= {"before": local_scores.before, "after": local_scores.after}

    def column(name: str) -> ScoreColumn:
        values = np.array([scores.get(party, {}).get(name, np.nan) for party in parties])
        return ScoreColumn(values, plan.metric.higher_is_better)

    columns = ("personal", "global_model", "majority", "before", "after")
    return Scores(tuple(parties), plan.metric.name, *map(column, columns))


def collect_evaluations(engine: Engine, tasks: Sequence[Task]) -> dict[str, dict[str, float]]:
    """Return the scores in the parties' evaluate replies; a failure becomes a warning and is left out."""
    scores: dict[str, dict[str, float]] = {}
    for reply in iterate_replies(engine, tasks):
        if reply.kind != "evaluate":  # a late reply to another task
            continue
        if reply.status == "ok":
            scores[reply.party] = {n: float(v) for n, v in reply.metrics.items() if is_number(v)}
        else:
            reason = reply.reason or reply.status
            message = f"Party {reply.party!r} could not be evaluated and does not count: {reason}"
            warnings.warn(message, DescantWarning, stacklevel=4)
    return scores


def fetch_personal_model(plan: Plan, engine: Engine, state: State, party: str) -> Tensor:
    """Return the row of a party's personal model, private layers included."""
    tasks = list(make_tasks(plan, state, [party], kind="personal", index=state.round))
    for reply in iterate_replies(engine, tasks):
        if reply.kind == "personal" and reply.party == party:
            rejection = (
                reply.reason or reply.status
                if reply.status != "ok"
                else UpdateValidator(plan.net.layout, [party]).check_model(reply)
            )
            if rejection is None:
                return plan.net.layout.join(reply.arrays)
            raise EngineError(f"The model of party {party!r} is not available: {rejection}")
    raise EngineError(f"Party {party!r} did not send its model.")


class PersonalModels(Mapping[str, nn.Module]):
    """A mapping from party name to personal module; modules are built on access."""

    def __init__(self, plan: Plan, engine: Engine, state: Callable[[], State]) -> None:
        self._plan = plan
        self._engine = engine
        self._state = state

    def __getitem__(self, party: str) -> nn.Module:
        name = self._plan.population[str(party)].name  # raises for an unknown name, with the known names
        return self._plan.net.module_from_row(fetch_personal_model(self._plan, self._engine, self._state(), party=name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._plan.population)

    def __len__(self) -> int:
        return len(self._plan.population)


def party_table(
    population: Population, scores: Scores, local_scores: Scores, rounds: Mapping[str, int], notes: tuple[str, ...] = ()
) -> Table:
    """Return one row per party, with the verdict and the findings below.

    ``rounds`` is the number of rounds in which each party has trained. A party that never trained is evaluated with a
    model that it did not influence: it has neither gained nor lost.
    """
    sign = 1 if scores.personal.higher_is_better else -1
    baseline_name = trivial_baseline(scores.metric).split()[0]
    trained = np.array([rounds[name] > 0 for name in scores.names])
    personal_column, local_column = (column.masked(trained) for column in (scores.personal, local_scores.personal))
    rows = [
        {
            "party": name,
            "samples": population[name].samples,
            "personal": float(scores.personal.values[i]),
            "global_model": float(scores.global_model.values[i]),
            "before": float(scores.before.values[i]),
            "after": float(scores.after.values[i]),
            "local": float(local_scores.personal.values[i]),
            baseline_name: float(scores.majority.values[i]),
            "rounds": rounds[name],
            "gain": sign * (float(personal_column.values[i]) - float(local_column.values[i])),
        }
        for i, name in enumerate(scores.names)
    ]
    evaluated_count, trained_count = (
        int((~np.isnan(column.values)).sum()) for column in (scores.personal, personal_column)
    )
    gained_count = personal_column.count_better(local_column)
    lost_count = local_column.count_better(personal_column)
    party_phrase = (
        f"{evaluated_count} parties"
        if trained_count == evaluated_count
        else f"the {trained_count} parties that ever trained"
    )
    hint = "" if evaluated_count else " No party has a test set: give parties.from_arrays(..., test=0.2)."
    means = {
        "personal": scores.personal.mean,
        "local": local_scores.personal.mean,
        "global model": scores.global_model.mean,
    }
    means |= {} if np.isnan(scores.majority.mean) else {baseline_name: scores.majority.mean}
    mean_scores = ", ".join(f"{name} {mean:.3f}" for name, mean in means.items())
    outcome = f"{gained_count} of {party_phrase} gained by joining, {lost_count} lost."
    verdict = f"{scores.metric}: {mean_scores}. {outcome}{hint}"
    columns = (
        "party",
        "samples",
        "rounds",
        "personal",
        "global_model",
        "before",
        "after",
        "local",
        baseline_name,
        "gain",
    )
    return Table(columns, rows, verdict, notes=notes)
