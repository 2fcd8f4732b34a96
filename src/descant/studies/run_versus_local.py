"""A recorded run as a study of two methods, the run's own and local training, read from the run's folder.

A run does not know the scores of local training. They are computed once, when the run has ended, and stored in its log.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..analysis import BacktestResults, Finding
from ..analysis.desk_results import backtest_federation
from ..analysis.findings import detect_collapse, is_coreset_rejection, rejection_findings
from ..analysis.scores import Numbers, ScoreColumn, Scores
from ..config import resume_hint
from ..errors import StateError
from ..reporting.table import Table
from ..rounds.state import presence_from_arrays
from ..storage import write_errors
from ..tracking import RecordedRun, Run, read_run
from .study import LOCAL, Study, TrainingResult
from .training_result import AGENT_SERIES, SERIES, available_series, from_json_numbers, to_json_numbers

LOCAL_CURVE_NOTE = "Local training was scored at the end of the run only: its line by round is constant at that score."

OMITTED_SETTINGS = (
    "algorithm",
    "seed",
    "version",
    "layout",
    "constants",
)  # shown elsewhere, or about the folder's format


def evaluate_run(run: Run) -> Table:
    """Return the table that says party by party if joining helped, and log the scores of local training."""
    table = run.federation.table()
    local_scores = {row["party"]: row["local"] for row in table.to_json_rows()}
    local_federation = run.federation._twin  # trained by the table
    history = local_federation.history_
    series_names = SERIES + tuple(name for name in AGENT_SERIES if any("steps" in entry for entry in history))
    series = {name: to_json_numbers([entry.get(name, np.nan) for entry in history]) for name in series_names}
    backtests = {
        name: backtest_federation(each) for name, each in (("personal", run.federation), ("local", local_federation))
    }
    desks = {"backtest": {name: each.to_json() for name, each in backtests.items() if each is not None}}
    run.log("local", round=run.round, personal=local_scores, series=series, **(desks if desks["backtest"] else {}))
    for note in table.notes:
        run.log("warning", text=note)
    return table


def read_scored_run(folder: Path) -> tuple[RecordedRun, TrainingResult]:
    """Read the run in a folder and its result; raise if it has no scores yet."""
    recorded = read_run(folder)
    if not len(recorded.numbers.scored_rounds):
        raise StateError(f"The run in {folder} has no scores yet. {resume_hint(recorded)}")
    return recorded, _result(recorded, str(recorded.settings["algorithm"]["name"]))


def study_from_run(folder: Path) -> Study:
    """Return the study of the run in a folder; raise if local training is not on record."""
    recorded, result = read_scored_run(folder)
    if result.method == LOCAL:
        return Study((result,), _settings(recorded))
    events = [event for event in recorded.events if event["event"] == "local"]
    if not events:
        raise StateError(
            f"The run in {folder} has no scores of local training yet to compare with. {resume_hint(recorded)}"
        )
    backtest_records = events[-1].get("backtest", {})
    backtests = {
        name: BacktestResults.from_json(backtest_records[name]) if name in backtest_records else None
        for name in ("personal", "local")
    }
    results = (
        replace(_local_result(recorded, result, events[-1]), backtest=backtests["local"]),
        replace(result, backtest=backtests["personal"]),
    )
    return Study(results, _settings(recorded))


def write_report(study: Study, folder: Path) -> Path:
    """Write report.html into a run's folder."""
    with write_errors(folder), tempfile.TemporaryDirectory() as temporary_folder:
        study_folder = study.save(Path(temporary_folder) / "study")
        shutil.copyfile(study_folder / "report.html", folder / "report.html")
    return folder / "report.html"


def _result(recorded: RecordedRun, method: str) -> TrainingResult:
    numbers_by_round = recorded.numbers
    columns = {
        name: ScoreColumn(values[-1], recorded.higher_is_better) for name, values in numbers_by_round.scores.items()
    }
    means = {
        name: [ScoreColumn(row).mean for row in numbers_by_round.scores[name]] for name in ("personal", "global_model")
    }
    curve = tuple(zip(numbers_by_round.scored_rounds.tolist(), means["personal"], means["global_model"], strict=True))
    return TrainingResult(
        method,
        int(recorded.settings["seed"]),
        _scores(recorded, columns),
        curve=curve,
        seconds=float(np.nansum(numbers_by_round.metrics.get("seconds", np.zeros(1)))),
        rejected=sum(not is_coreset_rejection(text) for _, text in _rejections(recorded)),
        rounds_trained=numbers_by_round.accepted.sum(axis=0).astype(float),
        presence=tuple(presence_from_arrays(numbers_by_round.accepted, numbers_by_round.proxied)),
        global_model_scores=tuple(
            zip(numbers_by_round.scored_rounds.tolist(), numbers_by_round.scores["global_model"], strict=True)
        ),
        series=_series(recorded, numbers_by_round.metrics),
        findings=tuple(_findings(recorded, method)),
    )


def _local_result(recorded: RecordedRun, method: TrainingResult, event: Mapping[str, Any]) -> TrainingResult:
    """Return the result of local training from the run's log."""
    local_scores: Mapping[str, float | None] = event["personal"]
    values = np.array(
        [np.nan if local_scores.get(name) is None else local_scores[name] for name in method.scores.names], dtype=float
    )
    column = ScoreColumn(values, recorded.higher_is_better)
    scores = _scores(recorded, {"personal": column, "majority": method.scores.majority})
    curve = tuple((at, column.mean, column.mean) for at, _, _ in method.curve)
    series = _series(recorded, {name: from_json_numbers(each) for name, each in event.get("series", {}).items()})
    findings = (Finding("local", LOCAL_CURVE_NOTE),)
    return TrainingResult(
        LOCAL,
        method.seed,
        scores,
        curve=curve,
        seconds=0.0,
        rejected=0,
        rounds_trained=method.rounds_trained,
        series=series,
        findings=findings,
    )


def _series(recorded: RecordedRun, known: Mapping[str, Numbers]) -> dict[str, Numbers]:
    """Return numbers by round; nan where they are missing or of other rounds."""
    rounds = recorded.numbers.rounds.astype(float)
    matching = {name: values for name, values in known.items() if len(values) == len(rounds)}
    unknown = np.full(len(rounds), np.nan)
    return {name: rounds if name == "round" else matching.get(name, unknown) for name in available_series(matching)}


def _rejections(recorded: RecordedRun) -> set[tuple[int, str]]:
    """Return the round and text of each rejection, once even if its round was repeated."""
    return {(event["round"], event["text"]) for event in recorded.events if event["event"] == "rejected"}


def trained_means(recorded: RecordedRun) -> dict[int, float]:
    """Return, by scored round, the mean score of the parties that had trained by then."""
    numbers_by_round = recorded.numbers
    trained = np.logical_or.accumulate(numbers_by_round.accepted, axis=0)[
        np.searchsorted(numbers_by_round.rounds, numbers_by_round.scored_rounds)
    ]
    return {
        at: ScoreColumn(personal).masked(trained_mask).mean
        for at, personal, trained_mask in zip(
            numbers_by_round.scored_rounds.tolist(), numbers_by_round.scores["personal"], trained, strict=True
        )
    }


def _findings(recorded: RecordedRun, method: str) -> Iterator[Finding]:
    """Yield a collapse, the rejections, and every logged warning once with its rounds."""
    series = _series(recorded, recorded.numbers.metrics)
    personal_trained = trained_means(recorded)
    rounds = recorded.numbers.rounds.tolist()
    history = [
        {"round": round, "change": change, "loss": loss, "personal_trained": personal_trained.get(round, np.nan)}
        for round, change, loss in zip(rounds, series["change"].tolist(), series["loss"].tolist(), strict=True)
    ]
    collapse_finding = detect_collapse(method, history, recorded.higher_is_better)
    if collapse_finding is not None:
        yield collapse_finding
    yield from rejection_findings(method, [text for _, text in sorted(_rejections(recorded))])
    rounds_by_warning: dict[str, set[int]] = {}
    for event in current_warnings(recorded):
        rounds_by_warning.setdefault(event["text"], set()).update([event["round"]] if "round" in event else [])
    for text, at in rounds_by_warning.items():
        already_covered = (collapse_finding is not None and text == collapse_finding.text) or any(
            text in other for other in rounds_by_warning if other != text
        )
        if not already_covered:
            yield Finding(text, text + rounds_suffix(at))  # its own kind: a study shows one finding per kind


def current_warnings(recorded: RecordedRun) -> Iterator[Mapping[str, Any]]:
    """Yield every warning except those of evaluations before the last one."""
    last = max((event["n"] for event in recorded.events if event["event"] == "local"), default=None)
    superseded = False
    for event in recorded.events:
        if event["event"] != "warning":
            superseded = event["event"] == "local" and event["n"] != last
        elif "round" in event or not superseded:
            yield event


def rounds_suffix(rounds: set[int]) -> str:
    if not rounds:
        return ""
    return f" (round {min(rounds)})" if len(rounds) == 1 else f" ({len(rounds)} rounds, the first {min(rounds)})"


def _scores(recorded: RecordedRun, columns: Mapping[str, ScoreColumn]) -> Scores:
    """Return scores with these columns; missing columns are nan."""
    names = recorded.numbers.parties
    unknown = ScoreColumn(np.full(len(names), np.nan), recorded.higher_is_better)
    rest = [each.name for each in fields(Scores) if each.name not in ("names", "metric")]
    return Scores(names, recorded.metric, **{name: columns.get(name, unknown) for name in rest})


def _settings(recorded: RecordedRun) -> dict[str, Any]:
    """Return the settings for the report; the recipe is in the folder."""
    settings = {key: value for key, value in recorded.settings.items() if key not in OMITTED_SETTINGS}
    run_settings = {
        "run": str(recorded.folder),
        "rounds": recorded.round,
        **settings,
        "parties": len(recorded.numbers.parties),
    }
    return {**run_settings, "algorithms": [recorded.settings["algorithm"]]}
