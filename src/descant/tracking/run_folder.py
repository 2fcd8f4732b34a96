"""Where things are in a run's folder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

RECIPE = "run.toml"
EVENTS = "events.jsonl"
METRICS = "metrics.db"
MODELS = "models"
LOCK = ".lock"
OURS = (EVENTS, f"{EVENTS}.new", RECIPE, f"{RECIPE}.new", METRICS, f"{METRICS}-journal", MODELS, LOCK)


def reached(events: Iterable[Mapping[str, Any]]) -> int:
    """The round that a log ends at, by our own events; "resumed" may set it back."""
    rounds = [event["round"] for event in events if event["event"] in ("begun", "resumed", "round")]
    return int(rounds[-1]) if rounds else 0


def snapshots(folder: Path) -> list[Path]:
    """The snapshots that have a manifest, the newest first."""
    return sorted((file.parent for file in (folder / MODELS).glob("*/state.json")), reverse=True)
