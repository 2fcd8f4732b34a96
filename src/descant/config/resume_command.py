"""Commands that resume a run from the recipe in its folder. Light to import: lists of runs show them too."""

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
    """Return a sentence with the command that finishes a run."""
    if recorded.state == "running":
        return f"It is still running ({recorded.reason}): try again when it has ended."
    if server := server_folder(recorded.folder):
        return f"Go on with: {server_start_command(server)}"
    if not is_resumable(recorded.folder):
        return (
            f"Go on with descant.tracking.Run.resume({str(recorded.folder)!r}, federation) "
            "and descant.studies.run_versus_local.evaluate_run(run)."
        )
    return f"Go on with: {run_resume_command(recorded.folder)}"


def server_start_command(server: Path) -> str:
    """Return the command that starts the server with the same timeouts: other timeouts train another model."""
    saved = saved_start_options(server)
    changed = {
        name: saved[name] for name, default in asdict(WaitLimits()).items() if saved.get(name, default) != default
    }
    options = [word for name, value in changed.items() for word in (f"--{name.replace('_', '-')}", f"{value:.15g}")]
    return shlex.join(["descant", "server", "start", str(server), *options])


def save_start_options(server: Path, timeouts: WaitLimits) -> None:
    """Save the timeouts with which a federation is served, so that it can be resumed."""
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
        saved = json.loads((server / RUN_FOLDER / START_FILE).read_text())
    except (OSError, ValueError):
        return {}
    items = saved.items() if isinstance(saved, dict) else ()
    return {name: value for name, value in items if type(value) in (int, float)}


def server_folder(folder: Path) -> Path | None:
    """Return the server folder that this run belongs to, or None."""
    from ..deployment.pki.federation_setup import ROSTER_FILE, RUN_FOLDER

    parent = folder.absolute().parent
    return parent.parent if parent.name == RUN_FOLDER and (parent.parent / ROSTER_FILE).is_file() else None


def is_resumable(folder: Path) -> bool:
    """Return whether a folder holds a run that was started from a recipe."""
    from ..tracking import is_run

    recipe = folder / recipe_file_name()
    return is_run(folder) and recipe.is_file() and recipe.stat().st_size > 0


def run_resume_command(folder: Path) -> str:
    """Return the command that resumes a run: the recipe in its folder is complete."""
    return shlex.join(["descant", "run", str(folder / recipe_file_name()), "--out", str(folder), "--resume"])


def recipe_file_name() -> str:
    from ..tracking.run_folder import RECIPE_FILE

    return RECIPE_FILE
