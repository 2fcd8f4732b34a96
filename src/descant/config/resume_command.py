"""How a run comes to its end: by the recipe in its folder. Light, because lists of runs say it too."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from ..core.timeouts import Patience

if TYPE_CHECKING:
    from ..tracking import Recorded

_STARTED = "started.json"


def how_to_end(found: Recorded) -> str:
    """What brings a run to its end, in a sentence."""
    if found.state == "running":
        return f"It is still running ({found.reason}): ask again when it has ended."
    if server := server_of(found.folder):
        return f"Go on with: {starting(server)}"
    if not resumable(found.folder):
        return (
            f"Go on with descant.tracking.Run.resume({str(found.folder)!r}, federation) "
            "and descant.studies.recorded_run.judge(run)."
        )
    return f"Go on with: {resuming(found.folder)}"


def starting(server: Path) -> str:
    """The command that serves a federation as it was last served; with another patience it trains another model."""
    given = _noted(server)
    told = {name: given[name] for name, usual in asdict(Patience()).items() if given.get(name, usual) != usual}
    options = [word for name, value in told.items() for word in (f"--{name}", f"{value:.15g}")]
    return shlex.join(["descant", "server", "start", str(server), *options])


def note_start(server: Path, patience: Patience) -> None:
    """Keep with which patience a federation is served, for whoever has to go on."""
    from ..deployment.pki.federation_setup import RUN
    from ..storage import atomic, clear_errors

    with clear_errors(server / RUN):
        atomic.replace(server / RUN / _STARTED, json.dumps(asdict(patience)).encode(), f".{_STARTED}", atomic.PRIVATE)


def _noted(server: Path) -> dict[str, float]:
    from ..deployment.pki.federation_setup import RUN

    try:
        found = json.loads((server / RUN / _STARTED).read_text())
    except (OSError, ValueError):
        return {}
    given = found.items() if isinstance(found, dict) else ()
    return {name: value for name, value in given if type(value) in (int, float)}


def server_of(folder: Path) -> Path | None:
    """The folder of the federation whose training this run is, if it is one's."""
    from ..deployment.pki.federation_setup import ROSTER, RUN

    place = folder.absolute().parent
    return place.parent if place.name == RUN and (place.parent / ROSTER).is_file() else None


def resumable(folder: Path) -> bool:
    """Whether a folder holds a run that was made of a recipe."""
    from ..tracking import is_run

    recipe = folder / _recipe()
    return is_run(folder) and recipe.is_file() and recipe.stat().st_size > 0


def resuming(folder: Path) -> str:
    """The command that goes on with a run: the recipe in its folder is whole, and has every change in it."""
    return shlex.join(["descant", "run", str(folder / _recipe()), "--out", str(folder), "--resume"])


def _recipe() -> str:
    from ..tracking.run_folder import RECIPE

    return RECIPE
