"""A recorded run, judged: a study of two, the run's method and training alone, read from the run's folder.

What the parties reach alone is the one thing that a run does not know by itself. It is trained once, when the run has
ended, and kept in the run's log.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..analysis import Finding, Traded
from ..analysis.desk_results import traded
from ..analysis.findings import collapse, of_a_coreset, refused
from ..analysis.scores import Column, Numbers, Scores
from ..config import how_to_end
from ..errors import StateError
from ..reporting.table import Table
from ..rounds.state import presence_in
from ..storage import clear_errors
from ..tracking import Recorded, Run, read
from .result import AGENTS, SERIES, numbers, plain, series_of
from .study import LOCAL, Result, Study

_ENDS = "Training alone was scored at the end of the run only: its line by round stands at that score."

_UNTOLD = ("algorithm", "seed", "version", "layout", "constants")  # told elsewhere, or of the folder's form


def judge(run: Run) -> Table:
    """Party by party, whether joining helped; what a party reaches alone is noted for later."""
    table = run.federation.table()
    own = {row["party"]: row["alone"] for row in table.plain()}
    twin = run.federation._twin  # the table trained it
    history = twin.history_
    known = SERIES + tuple(name for name in AGENTS if any("steps" in entry for entry in history))
    series = {name: plain([entry.get(name, np.nan) for entry in history]) for name in known}
    walked = {name: traded(each) for name, each in (("own", run.federation), ("alone", twin))}
    desks = {"traded": {name: each.to_json() for name, each in walked.items() if each is not None}}
    run.log("alone", round=run.round, own=own, series=series, **(desks if desks["traded"] else {}))
    for note in table.notes:
        run.log("warning", text=note)
    return table


def scored_in(folder: Path) -> tuple[Recorded, Result]:
    """The run in a folder, and what is on record of it; an error if nothing was scored yet."""
    found = read(folder)
    if not len(found.numbers.scored):
        raise StateError(f"The run in {folder} has no scores yet. {how_to_end(found)}")
    return found, _result(found, str(found.settings["algorithm"]["name"]))


def study_of(folder: Path) -> Study:
    """What came of the run in a folder."""
    found, method = scored_in(folder)
    if method.method == LOCAL:
        return Study((method,), _settings(found))
    events = [event for event in found.events if event["event"] == "alone"]
    if not events:
        raise StateError(
            f"Whether the run in {folder} helped is not known yet: nobody has trained alone beside it. "
            f"{how_to_end(found)}"
        )
    held = events[-1].get("traded", {})
    ways = {name: Traded.from_json(held[name]) if name in held else None for name in ("own", "alone")}
    both = (replace(_alone(found, method, events[-1]), traded=ways["alone"]), replace(method, traded=ways["own"]))
    return Study(both, _settings(found))


def write_page(study: Study, folder: Path) -> Path:
    """Put report.html into a run's folder."""
    with clear_errors(folder), tempfile.TemporaryDirectory() as place:
        made = study.save(Path(place) / "study")
        shutil.copyfile(made / "report.html", folder / "report.html")
    return folder / "report.html"


def _result(found: Recorded, method: str) -> Result:
    held = found.numbers
    columns = {name: Column(values[-1], found.higher_is_better) for name, values in held.scores.items()}
    means = {name: [Column(row).mean for row in held.scores[name]] for name in ("own", "center")}
    curve = tuple(zip(held.scored.tolist(), means["own"], means["center"], strict=True))
    return Result(
        method,
        int(found.settings["seed"]),
        _scores(found, columns),
        curve,
        float(np.nansum(held.metrics.get("seconds", np.zeros(1)))),
        sum(not of_a_coreset(text) for _, text in _refusals(found)),
        attended=held.accepted.sum(axis=0).astype(float),
        presence=tuple(presence_in(held.accepted, held.stood_in)),
        centers=tuple(zip(held.scored.tolist(), held.scores["center"], strict=True)),
        series=_series(found, held.metrics),
        findings=tuple(_findings(found, method)),
    )


def _alone(found: Recorded, method: Result, event: Mapping[str, Any]) -> Result:
    """Training alone, as the run's log has it."""
    own: Mapping[str, float | None] = event["own"]
    values = np.array([np.nan if own.get(name) is None else own[name] for name in method.scores.names], dtype=float)
    column = Column(values, found.higher_is_better)
    scores = _scores(found, {"own": column, "majority": method.scores.majority})
    curve = tuple((at, column.mean, column.mean) for at, _, _ in method.curve)
    series = _series(found, {name: numbers(each) for name, each in event.get("series", {}).items()})
    told = (Finding("alone", _ENDS),)
    return Result(LOCAL, method.seed, scores, curve, 0.0, 0, attended=method.attended, series=series, findings=told)


def _series(found: Recorded, known: Mapping[str, Numbers]) -> dict[str, Numbers]:
    """Numbers by round; nan where they are not known, or are not of these rounds."""
    rounds = found.numbers.round.astype(float)
    fitting = {name: values for name, values in known.items() if len(values) == len(rounds)}
    unknown = np.full(len(rounds), np.nan)
    return {name: rounds if name == "round" else fitting.get(name, unknown) for name in series_of(fitting)}


def _refusals(found: Recorded) -> set[tuple[int, str]]:
    """Round and text of each; a round that was done again refused the same ones."""
    return {(event["round"], event["text"]) for event in found.events if event["event"] == "refused"}


def _learned(found: Recorded) -> dict[int, float]:
    """By round, the mean score of the parties that had trained by then."""
    held = found.numbers
    trained = np.logical_or.accumulate(held.accepted, axis=0)[np.searchsorted(held.round, held.scored)]
    return {
        at: Column(own).only(some).mean
        for at, own, some in zip(held.scored.tolist(), held.scores["own"], trained, strict=True)
    }


def _findings(found: Recorded, method: str) -> Iterator[Finding]:
    """Whether it collapsed, and every warning on record, each once with the rounds at which it came."""
    series, learned = _series(found, found.numbers.metrics), _learned(found)
    rounds = found.numbers.round.tolist()
    history = [
        {"round": round, "change": change, "loss": loss, "learned": learned.get(round, np.nan)}
        for round, change, loss in zip(rounds, series["change"].tolist(), series["loss"].tolist(), strict=True)
    ]
    fell = collapse(method, history, found.higher_is_better)
    if fell is not None:
        yield fell
    yield from refused(method, [text for _, text in sorted(_refusals(found))])
    warned: dict[str, set[int]] = {}
    for event in _current(found):
        warned.setdefault(event["text"], set()).update([event["round"]] if "round" in event else [])
    for text, at in warned.items():
        said = (fell is not None and text == fell.text) or any(text in other for other in warned if other != text)
        if not said:
            yield Finding(text, text + _when(at))  # a kind of its own, because a study tells one finding a kind


def _current(found: Recorded) -> Iterator[Mapping[str, Any]]:
    """Every warning but those of a judgement that came before the last, which the run has outgrown."""
    last = max((event["n"] for event in found.events if event["event"] == "alone"), default=None)
    outgrown = False
    for event in found.events:
        if event["event"] != "warning":
            outgrown = event["event"] == "alone" and event["n"] != last
        elif "round" in event or not outgrown:
            yield event


def _when(rounds: set[int]) -> str:
    if not rounds:
        return ""
    return f" (round {min(rounds)})" if len(rounds) == 1 else f" ({len(rounds)} rounds, the first {min(rounds)})"


def _scores(found: Recorded, columns: Mapping[str, Column]) -> Scores:
    """Scores of these columns; what is not known is nan."""
    names = found.numbers.parties
    unknown = Column(np.full(len(names), np.nan), found.higher_is_better)
    rest = [each.name for each in fields(Scores) if each.name not in ("names", "metric")]
    return Scores(names, found.metric, **{name: columns.get(name, unknown) for name in rest})


def _settings(found: Recorded) -> dict[str, Any]:
    """What a reader asks for; the recipe stands in the folder."""
    settings = {key: value for key, value in found.settings.items() if key not in _UNTOLD}
    told = {"run": str(found.folder), "rounds": found.round, **settings, "parties": len(found.numbers.parties)}
    return {**told, "algorithms": [found.settings["algorithm"]]}
