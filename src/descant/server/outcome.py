"""How far a federation's training has come, and what came of it, from its folder: for `descant server status`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..record import Recorded, is_run, read
from ..spending import EPSILON, told
from .training import TRAINING


def outcome(run: Path) -> dict[str, Any]:
    """Of the training in a server's folder for runs; what is not known, or not asked of it, is None."""
    if not is_run(run / TRAINING):
        return {"state": "not begun", "round": 0, "spent": None}
    found = read(run / TRAINING)
    return {"state": found.state, "round": found.round, "spent": _spent(found)}


def _spent(found: Recorded) -> dict[str, Any] | None:
    """What a private training has given away; `told` says it in words."""
    privacy = _promised(found.settings)
    rounds = [event for event in found.events if event["event"] == "round"]
    if privacy is None or not rounds:
        return None
    given = (rounds[-1].get(EPSILON), privacy["budget"], privacy["delta"])
    return {**dict(zip((EPSILON, "budget", "delta"), given, strict=True)), "told": told(*given)}


def _promised(settings: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """As `spending.promised`, of settings on record."""
    solver, algorithm = settings["solver"], settings["algorithm"]
    return solver if solver["is"] == "PrivateSgd" else algorithm["privacy"]  # type: ignore[no-any-return]
