"""How far a federation's training has come, and what came of it, from its folder: for `descant server status`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..record import Recorded, is_run, read
from ..silo.result import CENTER
from ..spending import EPSILON, told
from ..table import Table
from .training import TRAINING


def outcome(run: Path) -> dict[str, Any]:
    """Of the training in a server's folder for runs; what is not known, or was not promised, is None."""
    found: dict[str, Any] = {"state": "not begun", "round": 0, "spent": None, "metric": None, "center": None}
    if not is_run(run / TRAINING):
        return {**found, "scores": {}}
    held, file = read(run / TRAINING), run / CENTER
    found |= {"state": held.state, "round": held.round, "spent": spent_in(held), "metric": held.metric or None}
    found["center"] = str(file) if file.exists() else None
    return {**found, "scores": {row["party"]: row for row in by_party(held).plain()}}


def by_party(found: Recorded) -> Table:
    """Each party: in how many rounds it trained, and what its own model and the centre last had on its own test set."""
    held, rows = found.numbers, []
    for k, party in enumerate(held.parties):
        known = np.flatnonzero(~np.isnan(held.scores["center"][:, k]))
        last = {name: float(held.scores[name][known[-1], k]) if len(known) else np.nan for name in ("own", "center")}
        judged = int(held.scored[known[-1]]) if len(known) else None
        rows.append({"party": party, "rounds": int(held.accepted[:, k].sum()), "judged": judged, **last})
    return Table(("party", "rounds", "judged", "own", "center"), rows)


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
