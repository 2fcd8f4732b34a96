"""How a run comes to its end: by the recipe in its folder. Light, because lists of runs say it too."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..record import Recorded


def how_to_end(found: Recorded) -> str:
    """What brings a run to its end, in a sentence."""
    if found.state == "running":
        return f"It is still running ({found.reason}): ask again when it has ended."
    if server := server_of(found.folder):
        return f"Go on with: {shlex.join(['descant', 'server', 'start', str(server)])}"
    if not resumable(found.folder):
        return f"Go on with descant.record.Run.resume({str(found.folder)!r}, federation) and descant.judged.judge(run)."
    return f"Go on with: {resuming(found.folder)}"


def server_of(folder: Path) -> Path | None:
    """The folder of the federation whose training this run is, if it is one's."""
    from ..trust.founding import ROSTER, RUN

    place = folder.absolute().parent
    return place.parent if place.name == RUN and (place.parent / ROSTER).is_file() else None


def resumable(folder: Path) -> bool:
    """Whether a folder holds a run that was made of a recipe."""
    from ..record import is_run

    recipe = folder / _recipe()
    return is_run(folder) and recipe.is_file() and recipe.stat().st_size > 0


def resuming(folder: Path) -> str:
    """The command that goes on with a run: the recipe in its folder is whole, and has every change in it."""
    return shlex.join(["descant", "run", str(folder / _recipe()), "--out", str(folder), "--resume"])


def _recipe() -> str:
    from ..record.place import RECIPE

    return RECIPE
