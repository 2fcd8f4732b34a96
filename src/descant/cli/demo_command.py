"""`descant demo`: compare six methods on ten parties with real digits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ..core.settings import check_settings
from ..papers import study_summary, table_legend
from .command_helpers import handle_errors, json_option, settings_option, show_progress, use_one_thread, wrap_line
from .demo_study import DESCRIPTION, DemoSettings

if TYPE_CHECKING:
    from ..studies.study import Study


def demo(
    rounds: int = settings_option(DemoSettings, "rounds"),
    seeds: int = settings_option(DemoSettings, "seeds"),
    out: Path = typer.Option(  # noqa: B008
        "descant-demo", help="Folder for report.html and the pictures. Default: descant-demo.", show_default=False
    ),
    as_json: bool = json_option(),
) -> None:
    """Compare six methods on ten parties that differ.

    The data are handwritten digits. It takes under a minute and downloads nothing.
    """
    with handle_errors(out):
        settings = DemoSettings(rounds, seeds)
        check_settings(settings, "demo")
        if not as_json:
            for key, text in {**DESCRIPTION, "length": f"{rounds} rounds, {seeds} seeds"}.items():
                typer.echo(wrap_line(key, f"{text}."))
            typer.echo()
        study = run_and_write(settings, out, progress=show_progress(as_json))
        if as_json:
            typer.echo(json.dumps({**json.loads(study.to_json()), "report": str(out / "report.html")}))
        else:
            report = f"The report with pictures: {out / 'report.html'}"
            typer.echo("\n\n".join([study_summary(study), table_legend(), report]))


def run_and_write(settings: DemoSettings, out: Path, progress: bool) -> Study:
    from ..storage import check_replaceable
    from ..studies.study_report import STUDY_FILES, write_study

    check_replaceable(out, STUDY_FILES)
    from .demo_study import run_demo

    use_one_thread()
    study = run_demo(settings, progress=progress)
    write_study(study, out)
    return study
