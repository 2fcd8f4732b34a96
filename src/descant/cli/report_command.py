"""`descant report`: write report.html for a study, a run or a server."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from ..errors import StateError
from ..papers import MANIFEST, told, write_sweep
from .command_helpers import json_option, plain_endings, waiting


def report(
    folder: Path = typer.Argument(hidden=True),  # noqa: B008
    as_json: bool = json_option(),
) -> None:
    """Write report.html into FOLDER, which descant compare, run or server init made, and print its verdict."""
    with plain_endings():
        from ..config import server_of
        from ..studies.recorded_run import study_of, write_page
        from ..studies.study import Study
        from ..tracking import is_run

        folder = _training_in(folder)
        if server_of(folder):
            _tell_of_server(folder, as_json)
            return
        if is_run(folder):
            with waiting("drawing the report", as_json):
                study = study_of(folder)
                page = write_page(study, folder)
        elif (folder / MANIFEST).exists():
            verdict, page = write_sweep(folder)
            said = f"{verdict}\n\nThe report with pictures: {page}"
            typer.echo(json.dumps({"report": str(page), "verdict": verdict}) if as_json else said)
            return
        elif not folder.is_dir():
            raise StateError(f"{folder} does not hold a study, a run or a federation: there is no such folder.")
        else:
            with waiting("drawing the report", as_json):
                study = Study.load(folder)
                page = study.save(folder) / "report.html"
        if as_json:
            found = {"verdict": study.verdict(), "note": study.note, "findings": study.findings()}
            typer.echo(json.dumps({"report": str(page), **found}))
        else:
            typer.echo(f"{told(study)}\n\nThe report with pictures: {page}")


def _training_in(folder: Path) -> Path:
    """The run of a federation, where its folder is given; else the same."""
    from ..deployment.pki.federation_setup import ROSTER, RUN

    if not (folder / ROSTER).is_file():
        return folder
    from ..deployment.server.training_session import TRAINING

    return folder / RUN / TRAINING


def _tell_of_server(folder: Path, as_json: bool) -> None:
    from ..deployment.server.server_report import write_report

    with waiting("drawing the report", as_json):
        table, page = write_report(folder)
    if as_json:
        found = {"verdict": table.verdict, "findings": table.notes, "table": table.plain()}
        typer.echo(json.dumps({"report": str(page), **found}))
    else:
        typer.echo(f"{table}\n\nThe report with pictures: {page}")
