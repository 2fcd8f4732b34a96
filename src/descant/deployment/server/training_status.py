"""How far a federation's training has come, and what came of it, from its folder: for `descant server status`."""

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
from ...studies.recorded_run import read_scored_run
from ...tracking import RecordedRun, is_run, read_run
from ..silo.result_files import GLOBAL_MODEL_FILE
from .training_session import TRAINING


def training_status(run: Path) -> dict[str, Any]:
    """Of the training in a server's folder for runs; what is not known, or was not promised, is None."""
    found: dict[str, Any] = {"state": "not begun", "round": 0, "spent": None, "metric": None, "global_model": None}
    if not is_run(run / TRAINING):
        return {**found, "baseline_warnings": [], "scores": {}}
    recorded = read_run(run / TRAINING)
    file = run / GLOBAL_MODEL_FILE
    found |= {
        "state": recorded.state,
        "round": recorded.round,
        "spent": privacy_spent(recorded),
        "metric": recorded.metric or None,
    }
    found["global_model"] = str(file) if file.exists() else None
    table = status_table(recorded)
    collapses = (
        [one.text for one in read_scored_run(run / TRAINING)[1].findings if one.kind == "collapse"]
        if recorded.metric
        else []
    )
    return {
        **found,
        "baseline_warnings": [*table.notes, *collapses],
        "scores": {row["party"]: row for row in table.to_json_rows()},
    }


def status_table(found: RecordedRun) -> Table:
    """Each party: in how many rounds it trained, and what its own model and the centre last had on its own test set.

    Beside it what needs no learning has there; the notes say whose model is no better.
    """
    numbers = found.numbers
    rows = []
    last_scored = [np.flatnonzero(~np.isnan(numbers.scores["global_model"][:, k])) for k in range(len(numbers.parties))]

    def column(name: str) -> ScoreColumn:
        values = [numbers.scores[name][at[-1], k] if len(at) else np.nan for k, at in enumerate(last_scored)]
        return ScoreColumn(np.array(values, dtype=float), found.higher_is_better)

    columns = {name: column(name) for name in ("personal", "global_model", "majority")}
    learned = _beats_baseline(columns["personal"], columns["majority"])
    for k, (party, at) in enumerate(zip(numbers.parties, last_scored, strict=True)):
        evaluated = int(numbers.scored_rounds[at[-1]]) if len(at) else None
        scores = {name: float(column.values[k]) for name, column in columns.items()}
        rounds = int(numbers.accepted[:, k].sum())
        baseline = {baseline_heading(found.metric): scores["majority"]}
        rows.append(
            {"party": party, "rounds": rounds, "evaluated": evaluated, **scores, **baseline, "learned": learned[k]}
        )
    has_baseline = columns["majority"].mean == columns["majority"].mean
    shown = (
        "party",
        "rounds",
        "evaluated",
        "personal",
        "global_model",
        *([baseline_heading(found.metric)] if has_baseline else []),
    )
    return Table(shown, rows, notes=_baseline_warnings(dict(zip(numbers.parties, learned, strict=True)), found.metric))


def baseline_heading(metric: str) -> str:
    """The column of what needs no learning, as a table shows it.

    >>> heading("accuracy"), heading("return")
    ('majority', 'random')
    """
    return trivial_baseline(metric).split()[0]


def _beats_baseline(personal: ScoreColumn, majority: ScoreColumn) -> list[bool | None]:
    """Whether each party's own model is better than what needs no learning; None where that is not known.

    >>> _learned(Column(np.array([0.9, 0.3, np.nan])), Column(np.array([0.3, 0.3, 0.3])))
    [True, False, None]
    """
    known = ~(np.isnan(personal.values) | np.isnan(majority.values))
    return [
        bool(better) if is_known else None for better, is_known in zip(personal.is_better(majority), known, strict=True)
    ]


def _baseline_warnings(learned: Mapping[str, bool | None], metric: str) -> tuple[str, ...]:
    """Whose model is no better than none, in a sentence, and whether that is most of those who were judged."""
    known = [party for party, each in learned.items() if each is not None]
    failed = [party for party in known if not learned[party]]
    if not failed:
        return ()
    most = " That is most of them: this training is ruined, or has taught nothing yet."
    subject = f"the model of {name_list(failed)}, {len(failed)} of {len(known)} parties that were judged"
    return (
        f"No better than {TRIVIAL_BASELINES[trivial_baseline(metric)]}: {subject}."
        + most * (2 * len(failed) > len(known)),
    )


def privacy_spent(found: RecordedRun) -> dict[str, Any] | None:
    """What a private training has given away; `told` says it in words."""
    privacy = _privacy_settings(found.settings)
    rounds = [event for event in found.events if event["event"] == "round"]
    if privacy is None or not rounds:
        return None
    unit = "sample" if privacy["is"] == "DpSgd" else "party"
    spent = (rounds[-1].get(EPSILON_METRIC), privacy["budget"], privacy["delta"])
    return {
        **dict(zip((EPSILON_METRIC, "budget", "delta"), spent, strict=True)),
        "text": f"Privacy of a {unit}: {privacy_message(*spent)}",
    }


def _privacy_settings(settings: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """As `spending.promised`, of settings on record."""
    solver = settings["solver"]
    algorithm = settings["algorithm"]
    return solver if solver["is"] == "DpSgd" else algorithm["privacy"]  # type: ignore[no-any-return]
