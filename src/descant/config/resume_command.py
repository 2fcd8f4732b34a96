"""How a run comes to its end: by the recipe in its folder. Light, because lists of runs say it too."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from ..core.timeouts import WaitLimits

if TYPE_CHECKING:
    from ..tracking import RecordedRun

START_FILE = "started.json"


def resume_hint(recorded: RecordedRun) -> str:
    """What brings a run to its end, in a sentence."""
    if recorded.state == "running":
        return f"It is still running ({recorded.reason}): ask again when it has ended."
    if server := server_folder(recorded.folder):
        return f"Go on with: {server_start_command(server)}"
    if not is_resumable(recorded.folder):
        return (
            f"Go on with descant.tracking.Run.resume({str(recorded.folder)!r}, federation) "
            "and descant.studies.recorded_run.judge(run)."
        )
    return f"Go on with: {run_resume_command(recorded.folder)}"


def server_start_command(server: Path) -> str:
    """The command that serves a federation as it was last served; with another patience it trains another model."""
    saved = saved_start_options(server)
    changed = {
        name: saved[name] for name, default in asdict(WaitLimits()).items() if saved.get(name, default) != default
    }
    options = [word for name, value in changed.items() for word in (f"--{name.replace('_', '-')}", f"{value:.15g}")]
    return shlex.join(["descant", "server", "start", str(server), *options])


def save_start_options(server: Path, timeouts: WaitLimits) -> None:
    """Keep with which patience a federation is served, for whoever has to go on."""
    from ..deployment.pki.federation_setup import RUN_FOLDER
    from ..storage import atomic, write_errors

    with write_errors(server / RUN_FOLDER):
        atomic.replace(
            server / RUN_FOLDER / START_FILE,
            json.dumps(asdict(timeouts)).encode(),
            f".{START_FILE}",
            atomic.PRIVATE_MODE,
        )


def saved_start_options(server: Path) -> dict[str, float]:
    from ..deployment.pki.federation_setup import RUN_FOLDER

    try:
        found = json.loads((server / RUN_FOLDER / START_FILE).read_text())
    except (OSError, ValueError):
        return {}
    given = found.items() if isinstance(found, dict) else ()
    return {name: value for name, value in given if type(value) in (int, float)}


def server_folder(folder: Path) -> Path | None:
    """The folder of the federation whose training this run is, if it is one's."""
    from ..deployment.pki.federation_setup import ROSTER_FILE, RUN_FOLDER

    parent = folder.absolute().parent
    return parent.parent if parent.name == RUN_FOLDER and (parent.parent / ROSTER_FILE).is_file() else None


def is_resumable(folder: Path) -> bool:
    """Whether a folder holds a run that was made of a recipe."""
    from ..tracking import is_run

    recipe = folder / recipe_file_name()
    return is_run(folder) and recipe.is_file() and recipe.stat().st_size > 0


def run_resume_command(folder: Path) -> str:
    """The command that goes on with a run: the recipe in its folder is whole, and has every change in it."""
    return shlex.join(["descant", "run", str(folder / recipe_file_name()), "--out", str(folder), "--resume"])


def recipe_file_name() -> str:
    from ..tracking.run_folder import RECIPE_FILE

    return RECIPE_FILE
