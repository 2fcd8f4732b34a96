"""A recorded run, judged: a study of two, the run's method and training alone, read from the run's folder.

What the parties reach alone is the one thing that a run does not know by itself. It is trained once, when the run has
ended, and kept in the run's log.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from .errors import StateError
from .evaluate import Column, Scores
from .record import Recorded, Run, read
from .store import clear_errors
from .study import LOCAL, Result, Study
from .table import Table


def judge(run: Run) -> Table:
    """Party by party, whether joining helped; what a party reaches alone is noted for later."""
    table = run.federation.table()
    run.log("alone", round=run.round, own={row["party"]: row["alone"] for row in table.plain()})
    for note in table.notes:
        run.log("warning", text=note)
    return table


def study_of(folder: Path) -> Study:
    """What came of the run in a folder."""
    found = read(folder)
    if not len(found.numbers.scored):
        raise StateError(f"The run in {folder} has no scores yet: let it end (descant run ... --resume).")
    method = _result(found, str(found.settings["algorithm"]["name"]))
    if method.method == LOCAL:
        return Study((method,), _settings(found))
    events = [event for event in found.events if event["event"] == "alone"]
    if not events:
        raise StateError(
            f"Whether the run in {folder} helped is not known yet: nobody has trained alone beside it. Let it end by "
            f"descant run ... --out {folder} --resume, or by descant.judged.judge(run)."
        )
    alone: Mapping[str, float | None] = events[-1]["own"]
    own = np.array([np.nan if alone.get(name) is None else alone[name] for name in method.scores.names], dtype=float)
    column = Column(own, found.higher_is_better)
    scores = _scores(found, {"own": column, "majority": method.scores.majority})
    curve = ((found.round, column.mean, column.mean),)
    local = Result(LOCAL, method.seed, scores, curve, 0.0, 0, attended=method.attended)
    return Study((local, method), _settings(found))


def write_page(folder: Path) -> Path:
    """Put report.html into a run's folder."""
    study = study_of(folder)
    with clear_errors(folder), tempfile.TemporaryDirectory() as place:
        made = study.save(Path(place) / "study")
        shutil.copyfile(made / "report.html", folder / "report.html")
    return folder / "report.html"


def _result(found: Recorded, method: str) -> Result:
    held = found.numbers
    columns = {name: Column(values[-1], found.higher_is_better) for name, values in held.scores.items()}
    means = {name: [Column(row).mean for row in held.scores[name]] for name in ("own", "center")}
    curve = tuple(zip(held.scored.tolist(), means["own"], means["center"], strict=True))
    refused = sum(event["event"] == "refused" for event in found.events)
    seconds = float(np.nansum(held.metrics.get("seconds", np.zeros(1))))
    attended = held.accepted.sum(axis=0).astype(float)
    scores = _scores(found, columns)
    return Result(method, int(found.settings["seed"]), scores, curve, seconds, refused, attended=attended)


def _scores(found: Recorded, columns: Mapping[str, Column]) -> Scores:
    """Scores of these columns; what is not known is nan."""
    names = found.numbers.parties
    unknown = Column(np.full(len(names), np.nan), found.higher_is_better)
    rest = [each.name for each in fields(Scores) if each.name not in ("names", "metric")]
    return Scores(names, found.metric, **{name: columns.get(name, unknown) for name in rest})


def _settings(found: Recorded) -> dict[str, Any]:
    settings = {key: value for key, value in found.settings.items() if key != "algorithm"}
    told = {"run": str(found.folder), "rounds": found.round, "parties": len(found.numbers.parties), **settings}
    told |= {"recipe": found.recipe, "warnings": list(dict.fromkeys(found.warnings))}
    return {**told, "algorithms": [found.settings["algorithm"]]}
