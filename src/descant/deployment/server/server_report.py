"""The organiser's page of a federation's training: what parties said of it, because no data of theirs are here."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from ... import __version__
from ...config import server_of
from ...core.metrics import UNLEARNED, trivial
from ...errors import StateError
from ...reporting.captions import CAPTIONS
from ...reporting.html import figure, page_of, pairs, phrase, scores, sentences
from ...reporting.participation_timeline import Presence, draw_presence
from ...reporting.table import Table
from ...storage import atomic, clear_errors
from ...studies.recorded_run import scored_in
from ...studies.result import Result
from ...tracking import Recorded, is_run
from .training_status import by_party, heading, spent_in

_JUDGING = "Whether joining helped, each team finds out on its own machine: descant silo judge."
_LEGEND = (
    "Rounds: in how many a party's work counted. Judged: the round after which it last judged models on its own test "
    "set. Own: its own model, where the method has one, else the common one. Center: the common model. {}: {}; a model "
    "that is no better has learned nothing."
)


def write_report(folder: Path) -> tuple[Table, Path]:
    """Put report.html into the folder of a server's training; the same party by party, with the verdict."""
    if not is_run(folder):
        raise StateError(f"The training has not begun yet. Start it: descant server start {server_of(folder)}")
    found, result = scored_in(folder)
    table, page = by_party(found), folder / "report.html"
    verdict, spent = _verdict(result), spent_in(found)
    given = [f"{spent['told']}."] if spent else []
    notes = (*table.notes, *given, *(one.text for one in result.findings))
    table = Table(table.columns, table.rows, verdict, notes=notes)
    curve = [dict(zip(("round", "own", "center"), point, strict=True)) for point in result.curve]
    text = page_of(
        "What came of the federation",
        verdict,
        scores(
            "Party by party",
            table,
            _LEGEND.format(heading(found.metric).capitalize(), UNLEARNED[trivial(found.metric)]),
        ),
        scores("Round by round", Table(("round", "own", "center"), curve), "Means over the parties that were judged."),
        _who_came(result),
        sentences("What else was found", table.notes),
        pairs("Settings", ((key, phrase(value)) for key, value in _settings(found).items())),
    )
    with clear_errors(folder):
        atomic.replace(page, text.encode(), f".{page.name}")
    return table, page


def _verdict(result: Result) -> str:
    at, own, center = result.curve[-1]
    judged = int((~np.isnan(result.scores.center.values)).sum())
    if not judged:
        return f"No party that was there after round {at} has a test set, so that nobody knows how good models are."
    by = f"{judged} of {len(result.scores.names)} parties, on their own test sets"
    of = f"{result.scores.metric} {own:.3f} in the mean with their own models, {center:.3f} with the common one"
    return f"After round {at}, as judged by {by}: {of}. {_JUDGING}"


def _who_came(result: Result) -> str:
    if not result.presence:  # of too many parties
        return ""
    at, values = (np.array(each) for each in zip(*result.centers, strict=True))
    shown = Presence(result.scores.names, result.presence, at, values)
    with tempfile.TemporaryDirectory() as place:
        file = draw_presence(Path(place) / "presence.png", {result.method: shown}, result.scores.metric)
        heading, caption = CAPTIONS["presence"]
        return figure(heading, caption.removesuffix(" With the first seed."), file.read_bytes())


def _settings(found: Recorded) -> dict[str, Any]:
    told = {key: found.settings[key] for key in ("algorithm", "solver", "loss", "metric", "seed")}
    return {"run": str(found.folder), "rounds": found.round, **told, "made by": f"descant {__version__}"}
