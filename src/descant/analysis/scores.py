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
from ..core.metrics import trivial
from ..errors import DescantWarning, EngineError
from ..parties import People
from ..reporting.table import Table
from ..rounds.dispatch import gather, tasks_for
from ..rounds.plan import Plan
from ..rounds.state import State
from ..rounds.validation import Gate, is_number

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
        with np.errstate(invalid="ignore"):  # a model that failed has the score -∞
            return float(self._known.std()) if len(self._known) else float("nan")

    def quantile(self, share: float) -> float:
        """The score that this share of the parties does not surpass, from the worst side whichever that is.

        >>> losses = Column(np.array([4.0, 1.0, 2.0, 3.0, 0.0]), higher_is_better=False)
        >>> losses.quantile(0.1), losses.quantile(0.5), losses.quantile(0.9)
        (4.0, 2.0, 0.0)
        """
        if not len(self._known):
            return float("nan")
        sign = 1 if self.higher_is_better else -1
        return sign * float(np.quantile(sign * self._known, share, method="inverted_cdf"))

    def gained(self, alone: Column) -> int:
        """How many parties are better off than with the other column.

        >>> Column(np.array([0.9, 0.5])).gained(Column(np.array([0.8, 0.5])))
        1
        """
        return int(self.better(alone).sum())

    def better(self, other: Column) -> NDArray[np.bool_]:
        """Which parties they are."""
        with np.errstate(invalid="ignore"):
            difference = self.values - other.values
        return (difference > 0) if self.higher_is_better else (difference < 0)

    def only(self, some: NDArray[np.bool_]) -> Column:
        """The same of some parties; nan for the others.

        >>> Column(np.array([0.9, 0.5])).only(np.array([True, False])).mean
        0.9
        """
        return replace(self, values=np.where(some, self.values, np.nan))

    @property
    def _known(self) -> Numbers:
        known: Numbers = self.values[~np.isnan(self.values)]
        return known


UNKNOWN = Column(np.empty(0))


@dataclass(frozen=True)
class Scores:
    """What the parties reach, in the order of ``names``."""

    names: tuple[str, ...]
    metric: str
    own: Column
    center: Column
    majority: Column  # what is reached without learning: see `metrics.trivial`
    before: Column = UNKNOWN  # before and after their last local work that was judged; nan for the others
    after: Column = UNKNOWN


def score(plan: Plan, engine: Engine, state: State, names: Iterable[str] | None = None) -> Scores:
    """Ask parties (all, if none are named) to judge the models as they stand."""
    parties: Sequence[str] = tuple(engine.members()) if names is None else tuple(names)
    found: dict[str, dict[str, float]] = {}
    for first in range(0, len(parties), _AT_ONCE):
        some = parties[first : first + _AT_ONCE]
        found |= answers(engine, list(tasks_for(plan, state, some, "evaluate", state.round)))
    for party, judged in state.judged.items():
        if party in found:
            found[party] |= {"before": judged.before, "after": judged.after}

    def column(name: str) -> Column:
        values = np.array([found.get(party, {}).get(name, np.nan) for party in parties])
        return Column(values, plan.metric.higher_is_better)

    columns = ("own", "center", "majority", "before", "after")
    return Scores(tuple(parties), plan.metric.name, *map(column, columns))


def answers(engine: Engine, tasks: Sequence[Task]) -> dict[str, dict[str, float]]:
    """What parties answer when they are asked to evaluate; who cannot is named in a warning, and left out."""
    found: dict[str, dict[str, float]] = {}
    for report in gather(engine, tasks):
        if report.kind != "evaluate":  # a late answer to something else
            continue
        if report.status == "ok":
            found[report.party] = {n: float(v) for n, v in report.metrics.items() if is_number(v)}
        else:
            why = report.reason or report.status
            told = f"Party {report.party!r} could not be evaluated, and does not count: {why}"
            warnings.warn(told, DescantWarning, stacklevel=4)
    return found


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


class Models(Mapping[str, nn.Module]):
    """Party name -> its personal module, made when it is asked for."""

    def __init__(self, plan: Plan, engine: Engine, state: Callable[[], State]) -> None:
        self._plan, self._engine, self._state = plan, engine, state

    def __getitem__(self, party: str) -> nn.Module:
        name = self._plan.people[str(party)].name  # an unknown name is an error here, with the names that exist
        return self._plan.net.module_of(personal_row(self._plan, self._engine, self._state(), name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._plan.people)

    def __len__(self) -> int:
        return len(self._plan.people)


def party_table(
    people: People, scores: Scores, alone: Scores, rounds: Mapping[str, int], notes: tuple[str, ...] = ()
) -> Table:
    """One row a party, the verdict and the findings below.

    ``rounds`` is in how many each has trained: who never did is judged by a model that it had no part in, and has
    neither gained nor lost.
    """
    sign, beside = 1 if scores.own.higher_is_better else -1, trivial(scores.metric).split()[0]
    trained = np.array([rounds[name] > 0 for name in scores.names])
    own, local = (column.only(trained) for column in (scores.own, alone.own))
    rows = [
        {
            "party": name,
            "samples": people[name].samples,
            "own": float(scores.own.values[i]),
            "center": float(scores.center.values[i]),
            "before": float(scores.before.values[i]),
            "after": float(scores.after.values[i]),
            "alone": float(alone.own.values[i]),
            beside: float(scores.majority.values[i]),
            "rounds": rounds[name],
            "gain": sign * (float(own.values[i]) - float(local.values[i])),
        }
        for i, name in enumerate(scores.names)
    ]
    judged, known = (int((~np.isnan(column.values)).sum()) for column in (scores.own, own))
    gained, lost = own.gained(local), local.gained(own)
    who = f"{judged} parties" if known == judged else f"the {known} parties that ever trained"
    hint = "" if judged else " No party has a test set: give parties.from_arrays(..., test=0.2)."
    verdict = (
        f"{scores.metric}: own {scores.own.mean:.3f}, alone {alone.own.mean:.3f}, centre {scores.center.mean:.3f}"
        + ("" if np.isnan(scores.majority.mean) else f", {beside} {scores.majority.mean:.3f}")
        + f". {gained} of {who} gained by joining, {lost} lost.{hint}"
    )
    columns = ("party", "samples", "rounds", "own", "center", "before", "after", "alone", beside, "gain")
    return Table(columns, rows, verdict, notes=notes)
