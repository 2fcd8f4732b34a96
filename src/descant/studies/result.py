"""One method with one seed, as a comparison keeps it: all its numbers, and their way to JSON and back."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from ..algorithms.components import stay
from ..analysis import Finding, Traded, Walk, coverage
from ..analysis.desk_results import traded
from ..analysis.findings import of_a_coreset
from ..analysis.interpolation import walk
from ..analysis.scores import Column, Numbers, Scores
from ..errors import DescantError
from ..federation import Federation
from ..rounds.state import PRESENT

LOCAL = "Local"
SERIES = ("round", "loss", "change", "norm", "jump", "jump_sd")
_WALKED = 100  # parties a walk, at most
TUNED = ("lr", "work", "lr_mean", "work_mean", "went_back", "validation", "received_loss")
AGENTS = ("reward", "steps")  # of agents: what they earned in a round's episodes, and how many steps one took
_COLUMNS = ("own", "center", "majority", "before", "after")


@dataclass(frozen=True)
class Result:
    """One method with one seed: its scores at the end, and a curve of (round, mean own, mean centre) on the way."""

    method: str
    seed: int
    scores: Scores
    curve: tuple[tuple[int, float, float], ...]
    seconds: float
    refused: int  # updates; what was not left of coresets is in the findings
    beside: str = LOCAL  # the local-only run with the same attendance and work
    attended: Numbers = field(default_factory=lambda: np.empty(0))  # [parties] in how many rounds each trained
    series: Mapping[str, Numbers] = field(
        default_factory=dict
    )  # numbers by round, by the names of SERIES, TUNED and AGENTS
    findings: tuple[Finding, ...] = ()
    walk: Walk | None = None
    presence: tuple[str, ...] = ()  # a text a round, a letter a party (see state.PRESENT); () of too many parties
    centers: tuple[tuple[int, Numbers], ...] = ()  # where it was scored: the round, and the centre's score by party
    traded: Traded | None = None  # of portfolio desks

    @property
    def comes_and_goes(self) -> bool:
        """Whether some party that could be there was not, in any round."""
        return any(set(letters) != {PRESENT} for letters in self.presence)

    @property
    def trained(self) -> float:
        """How many parties ever trained; nan where nobody counted."""
        return float((self.attended > 0).sum()) if len(self.attended) else math.nan

    @property
    def learned(self) -> Column:
        """The scores of the parties that trained; nan for others."""
        return self.of_trained(self.scores.own)

    def of_trained(self, column: Column) -> Column:
        """A column without the parties that never trained: they are judged by a model that they had no part in."""
        return column.only(self.attended > 0) if len(self.attended) else column

    @property
    def best(self) -> tuple[int, float]:
        """The round of the curve with the best mean score of the parties' own models, and that score."""
        sign = 1 if self.scores.own.higher_is_better else -1
        known = [(at, own) for at, own, _ in self.curve if own == own]
        return max(known, key=lambda point: sign * point[1]) if known else (0, math.nan)

    @property
    def tuned(self) -> list[dict[str, Any]]:
        """By round, the rate and the steps that a tuner chose; nothing without one."""
        rates, steps = (self.series.get(name, np.empty(0)).tolist() for name in ("lr", "work"))
        return [{"lr": lr, "work": int(work)} for lr, work in zip(rates, steps, strict=True)]

    def to_json(self) -> dict[str, Any]:
        """JSON values: nan is null, and the infinite score of a model that failed a string."""
        walked = None if self.walk is None else {**vars(self.walk), "names": list(self.walk.names)}
        return {
            "method": self.method,
            "seed": self.seed,
            "metric": self.scores.metric,
            "higher_is_better": self.scores.own.higher_is_better,
            "parties": list(self.scores.names),
            **{name: plain(getattr(self.scores, name).values) for name in _COLUMNS},
            "curve": [[point[0], *plain(point[1:])] for point in self.curve],
            "seconds": self.seconds,
            "refused": self.refused,
            "beside": self.beside,
            "attended": plain(self.attended),
            "series": {name: plain(values) for name, values in self.series.items()},
            "findings": [asdict(finding) for finding in self.findings],
            "presence": list(self.presence),
            "centers": [[at, plain(values)] for at, values in self.centers],
            "traded": None if self.traded is None else self.traded.to_json(),
            "walk": walked and {name: plain(v) if isinstance(v, np.ndarray) else v for name, v in walked.items()},
        }

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Result:
        """What :meth:`to_json` made."""
        better, walked = found["higher_is_better"], found["walk"]
        columns = (Column(numbers(found[name]), better) for name in _COLUMNS)
        if walked is not None:
            arrays = {name: numbers(walked[name]) for name in ("shares", "scores", "previous")}
            walked = Walk(tuple(walked["names"]), walked["metric"], walked["higher_is_better"], **arrays)
        return cls(
            found["method"],
            found["seed"],
            Scores(tuple(found["parties"]), found["metric"], *columns),
            tuple((int(at), *numbers(means).tolist()) for at, *means in found["curve"]),
            found["seconds"],
            found["refused"],
            found["beside"],
            numbers(found["attended"]),
            {name: numbers(values) for name, values in found["series"].items()},
            tuple(Finding(**finding) for finding in found["findings"]),
            walked,
            tuple(found.get("presence", ())),
            tuple((int(at), numbers(values)) for at, values in found.get("centers", ())),
            Traded.from_json(found["traded"]) if found.get("traded") else None,
        )


def series_of(known: Collection[str]) -> tuple[str, ...]:
    """The series that are kept, of numbers by these names; a tuner may have rewards, but it takes no steps."""
    agents = AGENTS if "steps" in known else ()
    return SERIES + tuple(name for name in (*TUNED, *agents) if name in known)


def result_of(
    federation: Federation, curve: Sequence[tuple[int, float, float]], seconds: float, walk: Walk | None
) -> Result:
    """What came of a federation that has run."""
    scores, history, counted = federation.scores(), federation.history_, coverage(federation).rounds
    known = series_of({name for entry in history for name in entry})
    series = {name: np.array([entry.get(name, np.nan) for entry in history], dtype=float) for name in known}
    return Result(
        federation.algorithm.name,
        federation.seed,
        scores,
        tuple(curve),
        seconds,
        sum(not of_a_coreset(str(refusal)) for refusal in federation.refusals_),
        attended=np.array([counted[name] for name in scores.names], dtype=float),
        series=series,
        findings=federation._findings(),
        walk=walk,
        presence=tuple(entry["presence"] for entry in history if "presence" in entry),
        centers=tuple((entry["round"], numbers(entry["centers"])) for entry in history if "centers" in entry),
        traded=traded(federation),
    )


def carry_out(federation: Federation, rounds: int, points: int, tick: Callable[..., None]) -> Result:
    """Run it, its curve measured so many times on the way, and walk at the end."""
    looked = {round(at) for at in np.linspace(rounds, 1, min(points, rounds))}
    curve = []
    seconds = 0.0
    for scored in federation.rounds(rounds, judge={*looked, rounds}):
        tick(told=scored.round.told)
        seconds += scored.round.seconds
        if scored.index in looked:
            curve.append((scored.index, scored.scores.own.mean, scored.scores.center.mean))
    walked = None
    if federation.algorithm.advance is not stay:  # else there is no centre to walk to
        with suppress(DescantError):  # where every report is refused, there is nowhere to walk from
            walked = walk(federation, most=_WALKED)
    return result_of(federation, curve, seconds, walked)


def spread(columns: Sequence[Column]) -> dict[str, float]:
    """How unlike the parties fare, the mean over seeds."""
    each = {
        "worst": [column.worst for column in columns],
        **{f"p{share}": [column.quantile(share / 100) for column in columns] for share in (10, 50, 90)},
        "spread": [column.spread for column in columns],
    }
    return {name: float(np.mean(values)) for name, values in each.items()}


def mean_of_known(each: Numbers) -> Numbers:
    """The mean over the first axis of what is not nan.

    >>> mean_of_known(np.array([[1.0, np.nan, np.nan], [3.0, 5.0, np.nan]]))
    array([ 2.,  5., nan])
    """
    known = ~np.isnan(each)
    mean: Numbers = np.where(known, each, 0).sum(0) / np.where(known.any(0), known.sum(0), np.nan)
    return mean


def plain(values: Any) -> Any:
    """Numbers as JSON has them.

    >>> plain([1.0, float("nan"), float("-inf")])
    [1.0, None, '-inf']
    """
    if isinstance(values, np.ndarray | list | tuple):
        return [plain(value) for value in values]
    number = float(values)
    return number if math.isfinite(number) else None if math.isnan(number) else repr(number)


def numbers(values: Any) -> Numbers:
    """What :func:`plain` made, as numbers.

    >>> numbers([1.0, None, "-inf"])
    array([  1.,  nan, -inf])
    """
    if isinstance(values, list) and values and isinstance(values[0], list):
        return np.stack([numbers(row) for row in values])
    return np.array([math.nan if value is None else float(value) for value in values])
