"""The snapshots of a run, as they are read: to go on from the newest, and to say what the run was made of."""

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
_FINGERPRINTS = ("data", "validation")  # they tell a reader nothing


def load_newest_snapshot(folder: Path, federation: Federation, strict: bool) -> None:
    """The newest snapshot that can be read. Where rounds cannot be done again it must be the newest."""
    found = snapshots(folder)
    if not found:
        raise StateError(f"{folder / MODELS_FOLDER} holds no snapshot, so that the run cannot be resumed.")
    errors: list[StateError] = []
    for place in found[:1] if strict else found:
        try:
            federation.load(place)
        except StateError as error:
            errors.append(error)
            continue
        if errors:
            warnings.warn(f"{errors[0]} The snapshot before it is taken.", DescantWarning, stacklevel=3)
        return
    raise errors[0]


def check_log_reaches(folder: Path, content: LogContent, round: int) -> None:
    """The log is on the disk before a snapshot is: one that ends before it was cut later."""
    if last_round(content.events) < round:
        raise StateError(
            f"{folder / EVENTS_FILE} is damaged: it ends at round {last_round(content.events)}, before the snapshot of round "
            f"{round}. Restore it from a copy; the snapshots in {MODELS_FOLDER}/ can still be read by Federation.load."
        )


def read_snapshot_manifest(folder: Path) -> dict[str, Any]:
    """What a snapshot says of itself."""
    found: dict[str, Any] = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    return found


def run_settings(folder: Path, note: str) -> dict[str, Any]:
    """What the run was made of, as its first snapshot says it, and what must be known of its data, if anything."""
    found = {
        key: value
        for key, value in read_snapshot_manifest(folder).items()
        if key not in _SNAPSHOT_ONLY_KEYS + _FINGERPRINTS
    }
    return {**found, "note": note} if note else found
