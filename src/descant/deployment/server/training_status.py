"""Progress and scores of a federation's training, read from its folder for `descant server status`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ...analysis.scores import ScoreColumn
from ...core.metrics import TRIVIAL_BASELINES, trivial_baseline
from ...engines.remote import name_list
from ...privacy.budget import EPSILON_METRIC, privacy_message
from ...reporting.table import Table
from ...studies.run_versus_local import read_scored_run
from ...tracking import RecordedRun, is_run, read_run
from ..silo.result_files import GLOBAL_MODEL_FILE
from .training_session import TRAINING


def training_status(run: Path) -> dict[str, Any]:
    """Return the status of the training in a run folder; None for what is unknown or not part of the run."""
    if not is_run(run / TRAINING):
        return {
            "state": "not begun",
            "round": 0,
            "spent": None,
            "metric": None,
            "global_model": None,
            "baseline_warnings": [],
            "scores": {},
        }
    recorded = read_run(run / TRAINING)
    file = run / GLOBAL_MODEL_FILE
    table = status_table(recorded)
    collapses = []
    if recorded.metric:
        _, result = read_scored_run(run / TRAINING)
        collapses = [finding.text for finding in result.findings if finding.kind == "collapse"]
    return {
        "state": recorded.state,
        "round": recorded.round,
        "spent": privacy_spent(recorded),
        "metric": recorded.metric or None,
        "global_model": str(file) if file.exists() else None,
        "baseline_warnings": [*table.notes, *collapses],
        "scores": {row["party"]: row for row in table.to_json_rows()},
    }


def status_table(recorded: RecordedRun) -> Table:
    """Return a row per party: its rounds, and the last scores of its personal model and the global model.

    A column has the trivial baseline on the same test set. The notes name the parties whose model is no better.
    """
    numbers = recorded.numbers
    rows = []
    last_scored = [np.flatnonzero(~np.isnan(numbers.scores["global_model"][:, k])) for k in range(len(numbers.parties))]

    def column(name: str) -> ScoreColumn:
        values = [numbers.scores[name][at[-1], k] if len(at) else np.nan for k, at in enumerate(last_scored)]
        return ScoreColumn(np.array(values, dtype=float), recorded.higher_is_better)

    columns = {name: column(name) for name in ("personal", "global_model", "majority")}
    learned = _beats_baseline(columns["personal"], columns["majority"])
    for k, (party, at) in enumerate(zip(numbers.parties, last_scored, strict=True)):
        evaluated = int(numbers.scored_rounds[at[-1]]) if len(at) else None
        scores = {name: float(column.values[k]) for name, column in columns.items()}
        rounds = int(numbers.accepted[:, k].sum())
        baseline = {baseline_heading(recorded.metric): scores["majority"]}
        rows.append(
            {"party": party, "rounds": rounds, "evaluated": evaluated, **scores, **baseline, "learned": learned[k]}
        )
    has_baseline = columns["majority"].mean == columns["majority"].mean  # not NaN
    baseline_column = [baseline_heading(recorded.metric)] if has_baseline else []
    shown = ("party", "rounds", "evaluated", "personal", "global_model", *baseline_column)
    notes = _baseline_warnings(dict(zip(numbers.parties, learned, strict=True)), recorded.metric)
    return Table(shown, rows, notes=notes)


def baseline_heading(metric: str) -> str:
    """Return the heading of the trivial baseline's column.

    >>> baseline_heading("accuracy"), baseline_heading("return")
    ('majority', 'random')
    """
    return trivial_baseline(metric).split()[0]


def _beats_baseline(personal: ScoreColumn, majority: ScoreColumn) -> list[bool | None]:
    """Return by party whether its personal model is better than the trivial baseline; None if unknown.

    >>> _beats_baseline(ScoreColumn(np.array([0.9, 0.3, np.nan])), ScoreColumn(np.array([0.3, 0.3, 0.3])))
    [True, False, None]
    """
    known = ~(np.isnan(personal.values) | np.isnan(majority.values))
    return [
        bool(better) if is_known else None for better, is_known in zip(personal.is_better(majority), known, strict=True)
    ]


def _baseline_warnings(learned: Mapping[str, bool | None], metric: str) -> tuple[str, ...]:
    """Return a sentence with the parties whose model is no better than the trivial baseline, if there are any."""
    known = [party for party, each in learned.items() if each is not None]
    failed = [party for party in known if not learned[party]]
    if not failed:
        return ()
    subject = f"the model of {name_list(failed)}, {len(failed)} of {len(known)} evaluated parties"
    sentence = f"No better than {TRIVIAL_BASELINES[trivial_baseline(metric)]}: {subject}."
    if 2 * len(failed) > len(known):
        sentence += " That is most of them: this training has failed, or has learned nothing yet."
    return (sentence,)


def privacy_spent(recorded: RecordedRun) -> dict[str, Any] | None:
    """Return the privacy spent by a private training, with a sentence as "text"; None for another training."""
    privacy = _privacy_settings(recorded.settings)
    rounds = [event for event in recorded.events if event["event"] == "round"]
    if privacy is None or not rounds:
        return None
    unit = "sample" if privacy["is"] == "DpSgd" else "party"
    spent = (rounds[-1].get(EPSILON_METRIC), privacy["budget"], privacy["delta"])
    return {
        **dict(zip((EPSILON_METRIC, "budget", "delta"), spent, strict=True)),
        "text": f"Privacy of a {unit}: {privacy_message(*spent)}",
    }


def _privacy_settings(settings: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the privacy settings in recorded settings, as `privacy.budget.privacy_settings` does for a plan."""
    solver = settings["solver"]
    algorithm = settings["algorithm"]
    return solver if solver["is"] == "DpSgd" else algorithm["privacy"]  # type: ignore[no-any-return]
