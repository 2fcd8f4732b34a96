"""`descant demo`: compare six methods on ten parties with real digits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ..core.settings import check
from ..papers import legend, summary
from .command_helpers import json_option, one_thread, option, plain_endings, watched, wrapped
from .demo import ABOUT, Demo

if TYPE_CHECKING:
    from ..studies.study import Study


def demo(
    rounds: int = option(Demo, "rounds"),
    seeds: int = option(Demo, "seeds"),
    out: Path = typer.Option(  # noqa: B008
        "descant-demo", help="The folder for report.html and the pictures. Default: descant-demo.", show_default=False
    ),
    as_json: bool = json_option(),
) -> None:
    """Compare six methods on ten parties with unlike handwritten digits: under a minute, nothing to download."""
    with plain_endings(out):
        chosen = Demo(rounds, seeds)
        check(chosen, "demo")
        if not as_json:
            for key, text in {**ABOUT, "length": f"{rounds} rounds, {seeds} seeds"}.items():
                typer.echo(wrapped(key, f"{text}."))
            typer.echo()
        study = _run(chosen, out, progress=watched(as_json))
        if as_json:
            typer.echo(json.dumps({**json.loads(study.to_json()), "report": str(out / "report.html")}))
        else:
            report = f"The report with pictures: {out / 'report.html'}"
            typer.echo("\n\n".join([summary(study), legend(), report]))


def _run(chosen: Demo, out: Path, progress: bool) -> Study:
    from ..storage import check_replaceable
    from ..studies.study_report import FILES, write

    check_replaceable(out, FILES)
    from .demo import run_demo

    one_thread()
    study = run_demo(chosen, progress=progress)
    write(study, out)
    return study
