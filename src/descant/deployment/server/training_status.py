"""How far a federation's training has come, and what came of it, from its folder: for `descant server status`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ...analysis.scores import Column
from ...core.metrics import UNLEARNED, trivial
from ...engines.remote import some
from ...privacy.budget import EPSILON, told
from ...reporting.table import Table
from ...studies.recorded_run import scored_in
from ...tracking import Recorded, is_run, read
from ..silo.result_files import CENTER
from .training_session import TRAINING


def outcome(run: Path) -> dict[str, Any]:
    """Of the training in a server's folder for runs; what is not known, or was not promised, is None."""
    found: dict[str, Any] = {"state": "not begun", "round": 0, "spent": None, "metric": None, "center": None}
    if not is_run(run / TRAINING):
        return {**found, "ruined": [], "scores": {}}
    held, file = read(run / TRAINING), run / CENTER
    found |= {"state": held.state, "round": held.round, "spent": spent_in(held), "metric": held.metric or None}
    found["center"] = str(file) if file.exists() else None
    table = by_party(held)
    fell = [one.text for one in scored_in(run / TRAINING)[1].findings if one.kind == "collapse"] if held.metric else []
    return {**found, "ruined": [*table.notes, *fell], "scores": {row["party"]: row for row in table.plain()}}


def by_party(found: Recorded) -> Table:
    """Each party: in how many rounds it trained, and what its own model and the centre last had on its own test set.

    Beside it what needs no learning has there; the notes say whose model is no better.
    """
    held, rows = found.numbers, []
    last = [np.flatnonzero(~np.isnan(held.scores["center"][:, k])) for k in range(len(held.parties))]

    def column(name: str) -> Column:
        values = [held.scores[name][at[-1], k] if len(at) else np.nan for k, at in enumerate(last)]
        return Column(np.array(values, dtype=float), found.higher_is_better)

    columns = {name: column(name) for name in ("own", "center", "majority")}
    learned = _learned(columns["own"], columns["majority"])
    for k, (party, at) in enumerate(zip(held.parties, last, strict=True)):
        judged = int(held.scored[at[-1]]) if len(at) else None
        scores = {name: float(column.values[k]) for name, column in columns.items()}
        rounds = int(held.accepted[:, k].sum())
        beside = {heading(found.metric): scores["majority"]}
        rows.append({"party": party, "rounds": rounds, "judged": judged, **scores, **beside, "learned": learned[k]})
    applies = columns["majority"].mean == columns["majority"].mean
    shown = ("party", "rounds", "judged", "own", "center", *([heading(found.metric)] if applies else []))
    return Table(shown, rows, notes=_ruined(dict(zip(held.parties, learned, strict=True)), found.metric))


def heading(metric: str) -> str:
    """The column of what needs no learning, as a table shows it.

    >>> heading("accuracy"), heading("return")
    ('majority', 'random')
    """
    return trivial(metric).split()[0]


def _learned(own: Column, majority: Column) -> list[bool | None]:
    """Whether each party's own model is better than what needs no learning; None where that is not known.

    >>> _learned(Column(np.array([0.9, 0.3, np.nan])), Column(np.array([0.3, 0.3, 0.3])))
    [True, False, None]
    """
    known = ~(np.isnan(own.values) | np.isnan(majority.values))
    return [bool(better) if is_known else None for better, is_known in zip(own.better(majority), known, strict=True)]


def _ruined(learned: Mapping[str, bool | None], metric: str) -> tuple[str, ...]:
    """Whose model is no better than none, in a sentence, and whether that is most of those who were judged."""
    known = [party for party, each in learned.items() if each is not None]
    none = [party for party in known if not learned[party]]
    if not none:
        return ()
    most = " That is most of them: this training is ruined, or has taught nothing yet."
    who = f"the model of {some(none)}, {len(none)} of {len(known)} parties that were judged"
    return (f"No better than {UNLEARNED[trivial(metric)]}: {who}." + most * (2 * len(none) > len(known)),)


def spent_in(found: Recorded) -> dict[str, Any] | None:
    """What a private training has given away; `told` says it in words."""
    privacy = _promised(found.settings)
    rounds = [event for event in found.events if event["event"] == "round"]
    if privacy is None or not rounds:
        return None
    who = "sample" if privacy["is"] == "PrivateSgd" else "party"
    given = (rounds[-1].get(EPSILON), privacy["budget"], privacy["delta"])
    return {
        **dict(zip((EPSILON, "budget", "delta"), given, strict=True)),
        "told": f"Privacy of a {who}: {told(*given)}",
    }


def _promised(settings: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """As `spending.promised`, of settings on record."""
    solver, algorithm = settings["solver"], settings["algorithm"]
    return solver if solver["is"] == "PrivateSgd" else algorithm["privacy"]  # type: ignore[no-any-return]
