"""Did it help my party? Its own test set, judged with its own model, the centre and its majority class."""

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
BATCH_SIZE = 64  # parties whose models are in memory together


@dataclass(frozen=True)
class ScoreColumn:
    """One number a party, and what they come to; a party without a test set is nan and does not count."""

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
        with np.errstate(invalid="ignore"):  # a model that failed has the score -∞
            return float(self._known_values.std()) if len(self._known_values) else float("nan")

    def quantile(self, share: float) -> float:
        """The score that this share of the parties does not surpass, from the worst side whichever that is.

        >>> losses = Column(np.array([4.0, 1.0, 2.0, 3.0, 0.0]), higher_is_better=False)
        >>> losses.quantile(0.1), losses.quantile(0.5), losses.quantile(0.9)
        (4.0, 2.0, 0.0)
        """
        if not len(self._known_values):
            return float("nan")
        sign = 1 if self.higher_is_better else -1
        return sign * float(np.quantile(sign * self._known_values, share, method="inverted_cdf"))

    def count_better(self, other: ScoreColumn) -> int:
        """How many parties are better off than with the other column.

        >>> Column(np.array([0.9, 0.5])).gained(Column(np.array([0.8, 0.5])))
        1
        """
        return int(self.is_better(other).sum())

    def is_better(self, other: ScoreColumn) -> NDArray[np.bool_]:
        """Which parties they are."""
        with np.errstate(invalid="ignore"):
            difference = self.values - other.values
        return (difference > 0) if self.higher_is_better else (difference < 0)

    def masked(self, mask: NDArray[np.bool_]) -> ScoreColumn:
        """The same of some parties; nan for the others.

        >>> Column(np.array([0.9, 0.5])).only(np.array([True, False])).mean
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
    """What the parties reach, in the order of ``names``."""

    names: tuple[str, ...]
    metric: str
    personal: ScoreColumn
    global_model: ScoreColumn
    majority: ScoreColumn  # what is reached without learning: see `metrics.trivial`
    before: ScoreColumn = UNKNOWN_SCORES  # before and after their last local work that was judged; nan for the others
    after: ScoreColumn = UNKNOWN_SCORES


def evaluate_parties(plan: Plan, engine: Engine, state: State, names: Iterable[str] | None = None) -> Scores:
    """Ask parties (all, if none are named) to judge the models as they stand."""
    parties: Sequence[str] = tuple(engine.available_parties()) if names is None else tuple(names)
    found: dict[str, dict[str, float]] = {}
    for first in range(0, len(parties), BATCH_SIZE):
        batch = parties[first : first + BATCH_SIZE]
        found |= collect_evaluations(engine, list(make_tasks(plan, state, batch, kind="evaluate", index=state.round)))
    for party, local_scores in state.local_scores.items():
        if party in found:
            found[party] |= {"before": local_scores.before, "after": local_scores.after}

    def column(name: str) -> ScoreColumn:
        values = np.array([found.get(party, {}).get(name, np.nan) for party in parties])
        return ScoreColumn(values, plan.metric.higher_is_better)

    columns = ("personal", "global_model", "majority", "before", "after")
    return Scores(tuple(parties), plan.metric.name, *map(column, columns))


def collect_evaluations(engine: Engine, tasks: Sequence[Task]) -> dict[str, dict[str, float]]:
    """What parties answer when they are asked to evaluate; who cannot is named in a warning, and left out."""
    found: dict[str, dict[str, float]] = {}
    for report in iterate_replies(engine, tasks):
        if report.kind != "evaluate":  # a late answer to something else
            continue
        if report.status == "ok":
            found[report.party] = {n: float(v) for n, v in report.metrics.items() if is_number(v)}
        else:
            reason = report.reason or report.status
            message = f"Party {report.party!r} could not be evaluated, and does not count: {reason}"
            warnings.warn(message, DescantWarning, stacklevel=4)
    return found


def fetch_personal_model(plan: Plan, engine: Engine, state: State, party: str) -> Tensor:
    """The numbers of a party's own model, private layers included, as its owner would use it."""
    tasks = list(make_tasks(plan, state, [party], kind="personal", index=state.round))
    for report in iterate_replies(engine, tasks):
        if report.kind == "personal" and report.party == party:
            rejection = (
                report.reason or report.status
                if report.status != "ok"
                else UpdateValidator(plan.net.layout, [party]).check_model(report)
            )
            if rejection is None:
                return plan.net.layout.join(report.arrays)
            raise EngineError(f"Party {party!r} could not show its model: {rejection}")
    raise EngineError(f"Party {party!r} did not show its model.")


class PersonalModels(Mapping[str, nn.Module]):
    """Party name -> its personal module, made when it is asked for."""

    def __init__(self, plan: Plan, engine: Engine, state: Callable[[], State]) -> None:
        self._plan = plan
        self._engine = engine
        self._state = state

    def __getitem__(self, party: str) -> nn.Module:
        name = self._plan.population[str(party)].name  # an unknown name is an error here, with the names that exist
        return self._plan.net.module_from_row(fetch_personal_model(self._plan, self._engine, self._state(), party=name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._plan.population)

    def __len__(self) -> int:
        return len(self._plan.population)


def party_table(
    population: Population, scores: Scores, local_scores: Scores, rounds: Mapping[str, int], notes: tuple[str, ...] = ()
) -> Table:
    """One row a party, the verdict and the findings below.

    ``rounds`` is in how many each has trained: who never did is judged by a model that it had no part in, and has
    neither gained nor lost.
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
    verdict = (
        f"{scores.metric}: own {scores.personal.mean:.3f}, alone {local_scores.personal.mean:.3f}, centre {scores.global_model.mean:.3f}"
        + ("" if np.isnan(scores.majority.mean) else f", {baseline_name} {scores.majority.mean:.3f}")
        + f". {gained_count} of {party_phrase} gained by joining, {lost_count} lost.{hint}"
    )
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
