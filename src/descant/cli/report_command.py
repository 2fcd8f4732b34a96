"""`descant report`: write report.html for a study, a run or a server."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from ..errors import StateError
from ..papers import MANIFEST, findings_text, write_sweep
from .command_helpers import handle_errors, json_option, progress_until_done


def report(
    folder: Path = typer.Argument(metavar="FOLDER", hidden=True),  # noqa: B008
    as_json: bool = json_option(),
) -> None:
    """Write report.html for a study, a run or a server.

    FOLDER was made by descant compare, run or server init. The command also prints the verdict.
    """
    with handle_errors():
        from ..config import server_folder
        from ..studies.run_versus_local import study_from_run, write_report
        from ..studies.study import Study
        from ..tracking import is_run

        folder = run_folder_of(folder)
        if server_folder(folder):
            report_on_server(folder, as_json)
            return
        if is_run(folder):
            with progress_until_done("drawing the report", as_json):
                study = study_from_run(folder)
                page = write_report(study, folder)
        elif (folder / MANIFEST).exists():
            verdict, page = write_sweep(folder)
            message = f"{verdict}\n\nThe report with pictures: {page}"
            typer.echo(json.dumps({"report": str(page), "verdict": verdict}) if as_json else message)
            return
        elif not folder.is_dir():
            raise StateError(f"{folder} does not hold a study, a run or a federation: there is no such folder.")
        else:
            with progress_until_done("drawing the report", as_json):
                study = Study.load(folder)
                page = study.save(folder) / "report.html"
        if as_json:
            output = {"verdict": study.verdict(), "note": study.note, "findings": study.findings()}
            typer.echo(json.dumps({"report": str(page), **output}))
        else:
            typer.echo(f"{findings_text(study)}\n\nThe report with pictures: {page}")


def run_folder_of(folder: Path) -> Path:
    """Return the run of a server folder, or the folder itself if it is not a server's."""
    from ..deployment.pki.federation_setup import ROSTER_FILE, RUN_FOLDER

    if not (folder / ROSTER_FILE).is_file():
        return folder
    from ..deployment.server.training_session import TRAINING

    return folder / RUN_FOLDER / TRAINING


def report_on_server(folder: Path, as_json: bool) -> None:
    from ..deployment.server.server_report import write_report

    with progress_until_done("drawing the report", as_json):
        table, page = write_report(folder)
    if as_json:
        output = {"verdict": table.verdict, "findings": table.notes, "table": table.to_json_rows()}
        typer.echo(json.dumps({"report": str(page), **output}))
    else:
        typer.echo(f"{table}\n\nThe report with pictures: {page}")
