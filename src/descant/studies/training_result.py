"""The result of one method with one seed, with its conversion to JSON and back."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from ..algorithms.components import keep_global_model
from ..analysis import BacktestResults, Finding, Interpolation, coverage
from ..analysis.desk_results import backtest_federation
from ..analysis.findings import is_coreset_rejection
from ..analysis.interpolation import interpolate
from ..analysis.scores import Numbers, ScoreColumn, Scores
from ..errors import DescantError
from ..federation import Federation
from ..rounds.state import PRESENT

LOCAL = "Local"
SERIES = ("round", "loss", "change", "norm", "jump", "jump_sd")
MAX_INTERPOLATED_PARTIES = 100  # most parties in an interpolation
TUNED_SERIES = ("lr", "work", "lr_mean", "work_mean", "rolled_back", "validation", "received_loss")
AGENT_SERIES = ("reward", "steps")  # of agents and desks: mean reward of a round and steps per agent
SCORE_COLUMNS = ("personal", "global_model", "majority", "before", "after")


@dataclass(frozen=True)
class TrainingResult:
    """One method with one seed: final scores and a curve of (round, mean personal score, mean global score)."""

    method: str
    seed: int
    scores: Scores
    curve: tuple[tuple[int, float, float], ...]
    seconds: float
    rejected: int  # number of rejected updates; missing coresets are in the findings
    baseline: str = LOCAL  # name of local training with the same participation and work
    rounds_trained: Numbers = field(default_factory=lambda: np.empty(0))  # [parties] rounds trained
    series: Mapping[str, Numbers] = field(default_factory=dict)  # by round: SERIES, TUNED_SERIES and AGENT_SERIES
    findings: tuple[Finding, ...] = ()
    interpolation: Interpolation | None = None
    presence: tuple[str, ...] = ()  # one text per round, one character per party (see state.PRESENT)
    global_model_scores: tuple[tuple[int, Numbers], ...] = ()  # scored rounds with the global model's score by party
    backtest: BacktestResults | None = None  # portfolio desks only

    @property
    def has_absences(self) -> bool:
        """Return True if an available party was absent in any round."""
        return any(set(codes) != {PRESENT} for codes in self.presence)

    @property
    def trained_count(self) -> float:
        """The number of parties that ever trained; nan if it is not on record."""
        return float((self.rounds_trained > 0).sum()) if len(self.rounds_trained) else math.nan

    @property
    def trained_scores(self) -> ScoreColumn:
        """The personal scores of the parties that trained; nan for the others."""
        return self.mask_untrained(self.scores.personal)

    def mask_untrained(self, column: ScoreColumn) -> ScoreColumn:
        """Return the column with nan for parties that never trained: they did not influence their model."""
        return column.masked(self.rounds_trained > 0) if len(self.rounds_trained) else column

    @property
    def best(self) -> tuple[int, float]:
        """The round of the curve with the best mean score of the personal models, and that score."""
        sign = 1 if self.scores.personal.higher_is_better else -1
        known = [(at, personal) for at, personal, _ in self.curve if personal == personal]
        return max(known, key=lambda point: sign * point[1]) if known else (0, math.nan)

    @property
    def tuned_rounds(self) -> list[dict[str, Any]]:
        """The learning rate and the work that a tuner chose, by round; empty without a tuner."""
        rates, steps = (self.series.get(name, np.empty(0)).tolist() for name in ("lr", "work"))
        return [{"lr": lr, "work": int(work)} for lr, work in zip(rates, steps, strict=True)]

    def to_json(self) -> dict[str, Any]:
        """Return JSON values: nan is null, and the infinite score of a diverged model is a string."""
        interpolation = (
            None
            if self.interpolation is None
            else {**vars(self.interpolation), "names": list(self.interpolation.names)}
        )
        return {
            "method": self.method,
            "seed": self.seed,
            "metric": self.scores.metric,
            "higher_is_better": self.scores.personal.higher_is_better,
            "parties": list(self.scores.names),
            **{name: to_json_numbers(getattr(self.scores, name).values) for name in SCORE_COLUMNS},
            "curve": [[point[0], *to_json_numbers(point[1:])] for point in self.curve],
            "seconds": self.seconds,
            "rejected": self.rejected,
            "baseline": self.baseline,
            "rounds_trained": to_json_numbers(self.rounds_trained),
            "series": {name: to_json_numbers(values) for name, values in self.series.items()},
            "findings": [asdict(finding) for finding in self.findings],
            "presence": list(self.presence),
            "global_model_scores": [[at, to_json_numbers(values)] for at, values in self.global_model_scores],
            "backtest": None if self.backtest is None else self.backtest.to_json(),
            "interpolation": interpolation
            and {name: to_json_numbers(v) if isinstance(v, np.ndarray) else v for name, v in interpolation.items()},
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> TrainingResult:
        """Return the result that :meth:`to_json` described."""
        better = record["higher_is_better"]
        interpolation = record["interpolation"]
        columns = (ScoreColumn(from_json_numbers(record[name]), better) for name in SCORE_COLUMNS)
        if interpolation is not None:
            arrays = {name: from_json_numbers(interpolation[name]) for name in ("shares", "scores", "previous")}
            interpolation = Interpolation(
                tuple(interpolation["names"]), interpolation["metric"], interpolation["higher_is_better"], **arrays
            )
        return cls(
            record["method"],
            record["seed"],
            Scores(tuple(record["parties"]), record["metric"], *columns),
            tuple((int(at), *from_json_numbers(means).tolist()) for at, *means in record["curve"]),
            record["seconds"],
            record["rejected"],
            record["baseline"],
            from_json_numbers(record["rounds_trained"]),
            {name: from_json_numbers(values) for name, values in record["series"].items()},
            tuple(Finding(**finding) for finding in record["findings"]),
            interpolation,
            tuple(record.get("presence", ())),
            tuple((int(at), from_json_numbers(values)) for at, values in record.get("global_model_scores", ())),
            BacktestResults.from_json(record["backtest"]) if record.get("backtest") else None,
        )


def available_series(names: Collection[str]) -> tuple[str, ...]:
    """Return the series to store, out of the recorded names; a reward without steps is a tuner's, and not stored."""
    agents = AGENT_SERIES if "steps" in names else ()
    return SERIES + tuple(name for name in (*TUNED_SERIES, *agents) if name in names)


def make_result(
    federation: Federation,
    curve: Sequence[tuple[int, float, float]],
    seconds: float,
    interpolation: Interpolation | None,
) -> TrainingResult:
    """Return the result of a federation that has run."""
    scores = federation.scores()
    history = federation.history_
    rounds_by_party = coverage(federation).rounds
    series_names = available_series({name for entry in history for name in entry})
    series = {name: np.array([entry.get(name, np.nan) for entry in history], dtype=float) for name in series_names}
    return TrainingResult(
        federation.algorithm.name,
        federation.seed,
        scores,
        curve=tuple(curve),
        seconds=seconds,
        rejected=sum(not is_coreset_rejection(str(rejection)) for rejection in federation.rejections_),
        rounds_trained=np.array([rounds_by_party[name] for name in scores.names], dtype=float),
        series=series,
        findings=federation._findings(),
        interpolation=interpolation,
        presence=tuple(entry["presence"] for entry in history if "presence" in entry),
        global_model_scores=tuple(
            (entry["round"], from_json_numbers(entry["global_model_scores"]))
            for entry in history
            if "global_model_scores" in entry
        ),
        backtest=backtest_federation(federation),
    )


def run_and_score(federation: Federation, rounds: int, points: int, tick: Callable[..., None]) -> TrainingResult:
    """Run a federation, score ``points`` rounds for its curve, and interpolate at the end."""
    scored_rounds = {round(at) for at in np.linspace(rounds, 1, min(points, rounds))}
    curve = []
    seconds = 0.0
    for scored in federation.rounds(rounds, evaluate_local_in={*scored_rounds, rounds}):
        tick(summary=scored.round.summary)
        seconds += scored.round.seconds
        if scored.index in scored_rounds:
            curve.append((scored.index, scored.scores.personal.mean, scored.scores.global_model.mean))
    interpolation = None
    if federation.algorithm.server_update is not keep_global_model:  # else there is no global model to interpolate to
        with suppress(DescantError):  # not possible if every update was rejected
            interpolation = interpolate(federation, max_parties=MAX_INTERPOLATED_PARTIES)
    return make_result(federation, curve, seconds, interpolation=interpolation)


def score_spread(columns: Sequence[ScoreColumn]) -> dict[str, float]:
    """Return the spread of scores over parties, as means over seeds."""
    each = {
        "worst": [column.worst for column in columns],
        **{f"p{share}": [column.quantile(share / 100) for column in columns] for share in (10, 50, 90)},
        "spread": [column.spread for column in columns],
    }
    return {name: float(np.mean(values)) for name, values in each.items()}


def nanmean(each: Numbers) -> Numbers:
    """Return the mean over the first axis, without nan entries and without a warning.

    >>> nanmean(np.array([[1.0, np.nan, np.nan], [3.0, 5.0, np.nan]]))
    array([ 2.,  5., nan])
    """
    known = ~np.isnan(each)
    mean: Numbers = np.where(known, each, 0).sum(0) / np.where(known.any(0), known.sum(0), np.nan)
    return mean


def to_json_numbers(values: Any) -> Any:
    """Return numbers as JSON values.

    >>> to_json_numbers([1.0, float("nan"), float("-inf")])
    [1.0, None, '-inf']
    """
    if isinstance(values, np.ndarray | list | tuple):
        return [to_json_numbers(value) for value in values]
    number = float(values)
    return number if math.isfinite(number) else None if math.isnan(number) else repr(number)


def from_json_numbers(values: Any) -> Numbers:
    """Return the numbers that :func:`to_json_numbers` encoded.

    >>> from_json_numbers([1.0, None, "-inf"])
    array([  1.,  nan, -inf])
    """
    if isinstance(values, list) and values and isinstance(values[0], list):
        return np.stack([from_json_numbers(row) for row in values])
    return np.array([math.nan if value is None else float(value) for value in values])
