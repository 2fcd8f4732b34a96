"""Names of the files in a run's folder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

RECIPE_FILE = "run.toml"
EVENTS_FILE = "events.jsonl"
METRICS_FILE = "metrics.db"
MODELS_FOLDER = "models"
LOCK_FILE = ".lock"
RUN_FILES = (
    EVENTS_FILE,
    f"{EVENTS_FILE}.new",
    RECIPE_FILE,
    f"{RECIPE_FILE}.new",
    METRICS_FILE,
    f"{METRICS_FILE}-journal",
    MODELS_FOLDER,
    LOCK_FILE,
)


def last_round(events: Iterable[Mapping[str, Any]]) -> int:
    """Return the round at which a log ends, by our own events; "resumed" may set it back."""
    rounds = [event["round"] for event in events if event["event"] in ("started", "resumed", "round")]
    return int(rounds[-1]) if rounds else 0


def snapshots(folder: Path) -> list[Path]:
    """Return the snapshots that have a manifest, the newest first."""
    return sorted((file.parent for file in (folder / MODELS_FOLDER).glob("*/state.json")), reverse=True)
