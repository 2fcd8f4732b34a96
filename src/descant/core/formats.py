"""Versions of what Descant writes to disk, and the error for folders of earlier versions."""

from __future__ import annotations

from pathlib import Path

from ..errors import StateError

RUN_FORMAT = 3
"""The format of checkpoints and run folders; 2 had other names of files and keys."""


def earlier_format_error(folder: Path) -> StateError:
    """Return the error for a folder in the format of an earlier version."""
    return StateError(
        f"{folder} was written by an earlier version of Descant, whose format this version does not read. "
        "Train again, or install the version that wrote it."
    )
