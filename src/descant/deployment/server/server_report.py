"""The server's report of a training, from the parties' own evaluations, because the server has no data."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from ... import __version__
from ...config import server_folder
from ...core.metrics import TRIVIAL_BASELINES, trivial_baseline
from ...errors import StateError
from ...reporting.captions import CAPTIONS
from ...reporting.html import (
    Section,
    figure_section,
    format_setting,
    key_value_table,
    render_page,
    score_table,
    sentence_list,
)
from ...reporting.participation_timeline import ParticipationTimeline, draw_participation
from ...reporting.table import Table
from ...storage import atomic, write_errors
from ...studies.run_versus_local import read_scored_run
from ...studies.training_result import TrainingResult
from ...tracking import RecordedRun, is_run
from .training_status import baseline_heading, privacy_spent, status_table

_EVALUATION_HINT = "Each silo finds out on its own machine whether joining helped: descant silo evaluate."
_LEGEND = (
    "Rounds: number of rounds in which a party's update was accepted. Evaluated: the round after which it last "
    "evaluated models on its own test set. Personal: its personal model, or the global model if the method has none. "
    "Global: the global model. {}: {}; a model that is no better has learned nothing."
)


def write_report(folder: Path) -> tuple[Table, Path]:
    """Write report.html into the folder of a server's training; return its table with the verdict, and its path."""
    if not is_run(folder):
        raise StateError(f"The training has not begun yet. Start it: descant server start {server_folder(folder)}")
    recorded, result = read_scored_run(folder)
    table = status_table(recorded)
    page = folder / "report.html"
    verdict = _verdict(result)
    spent = privacy_spent(recorded)
    privacy_notes = [f"{spent['text']}."] if spent else []
    notes = (*table.notes, *privacy_notes, *(one.text for one in result.findings))
    table = Table(table.columns, table.rows, verdict, notes=notes)
    curve = [dict(zip(("round", "personal", "global_model"), point, strict=True)) for point in result.curve]
    text = render_page(
        "Results of the federation",
        verdict,
        score_table(
            "Party by party",
            table,
            _LEGEND.format(
                baseline_heading(recorded.metric).capitalize(), TRIVIAL_BASELINES[trivial_baseline(recorded.metric)]
            ),
        ),
        score_table(
            "Round by round",
            Table(("round", "personal", "global_model"), curve),
            "Means over the evaluated parties.",
        ),
        _participation_figure(result),
        sentence_list("Other findings", table.notes),
        key_value_table("Settings", ((key, format_setting(value)) for key, value in _settings(recorded).items())),
    )
    with write_errors(folder):
        atomic.replace(page, text.encode(), f".{page.name}")
    return table, page


def _verdict(result: TrainingResult) -> str:
    round, personal, global_model = result.curve[-1]
    evaluated = int((~np.isnan(result.scores.global_model.values)).sum())
    if not evaluated:
        return f"No party connected after round {round} has a test set, so the quality of the models is unknown."
    return (
        f"After round {round}, evaluated by {evaluated} of {len(result.scores.names)} parties on their own test sets: "
        f"mean {result.scores.metric} {personal:.3f} with their personal models, {global_model:.3f} with the global "
        f"model. {_EVALUATION_HINT}"
    )


def _participation_figure(result: TrainingResult) -> Section | None:
    if not result.presence:  # there are too many parties to draw
        return None
    rounds, values = (np.array(each) for each in zip(*result.global_model_scores, strict=True))
    timeline = ParticipationTimeline(result.scores.names, result.presence, rounds, scores=values)
    with tempfile.TemporaryDirectory() as folder:
        file = draw_participation(Path(folder) / "presence.png", {result.method: timeline}, result.scores.metric)
        heading, caption = CAPTIONS["presence"]
        return figure_section(heading, caption.removesuffix(" With the first seed."), file.read_bytes())


def _settings(recorded: RecordedRun) -> dict[str, Any]:
    selected = {key: recorded.settings[key] for key in ("algorithm", "solver", "loss", "metric", "seed")}
    return {"run": str(recorded.folder), "rounds": recorded.round, **selected, "made by": f"descant {__version__}"}
