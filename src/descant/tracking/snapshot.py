"""Reading of a run's snapshots: to resume from the newest one, and to describe the run's settings."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import DescantWarning, StateError
from ..storage.event_log import LogContent
from .run_folder import EVENTS_FILE, MODELS_FOLDER, last_round, snapshots

if TYPE_CHECKING:
    from ..federation import Federation

_SNAPSHOT_ONLY_KEYS = ("files", "digest", "seal", "history", "rejections", "feedback", "round", "local_scores")
_FINGERPRINTS = ("data", "validation")  # meaningless to a reader


def load_newest_snapshot(folder: Path, federation: Federation, strict: bool) -> None:
    """Load the newest readable snapshot; with `strict`, where rounds cannot be repeated, only the newest one."""
    candidates = snapshots(folder)
    if not candidates:
        raise StateError(f"{folder / MODELS_FOLDER} holds no snapshot, so the run cannot be resumed.")
    errors: list[StateError] = []
    for snapshot in candidates[:1] if strict else candidates:
        try:
            federation.load(snapshot)
        except StateError as error:
            errors.append(error)
            continue
        if errors:
            warnings.warn(f"{errors[0]} The snapshot before it is used.", DescantWarning, stacklevel=3)
        return
    raise errors[0]


def check_log_reaches(folder: Path, content: LogContent, round: int) -> None:
    """Raise if the log ends before the snapshot: the log is written first, so it was cut later."""
    if last_round(content.events) < round:
        raise StateError(
            f"{folder / EVENTS_FILE} is damaged: it ends at round {last_round(content.events)}, before the snapshot of "
            f"round {round}. Restore it from a copy; the snapshots in {MODELS_FOLDER}/ can still be read by "
            "Federation.load."
        )


def read_snapshot_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a snapshot."""
    manifest: dict[str, Any] = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    return manifest


def run_settings(folder: Path, note: str) -> dict[str, Any]:
    """Return the run's settings from its first snapshot, and a note on its data, if any."""
    settings = {
        key: value
        for key, value in read_snapshot_manifest(folder).items()
        if key not in _SNAPSHOT_ONLY_KEYS + _FINGERPRINTS
    }
    return {**settings, "note": note} if note else settings
