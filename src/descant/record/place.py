"""Where things are in a run's folder."""

from __future__ import annotations

from pathlib import Path

RECIPE = "run.toml"
EVENTS = "events.jsonl"
METRICS = "metrics.db"
MODELS = "models"
LOCK = ".lock"
OURS = (EVENTS, f"{EVENTS}.new", RECIPE, f"{RECIPE}.new", METRICS, f"{METRICS}-journal", MODELS, LOCK)


def snapshots(folder: Path) -> list[Path]:
    """The snapshots that have a manifest, the newest first."""
    return sorted((file.parent for file in (folder / MODELS).glob("*/state.json")), reverse=True)
