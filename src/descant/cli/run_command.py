"""`descant run`: run one method into a durable folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer

from ..config import Recipe
from ..errors import SettingError
from ..reporting.table import Table
from .command_helpers import json_option, one_thread, plain_endings, waiting, watched
from .recipe_options import ADDRESS, CHANGES, DATA, ENGINE, QUICK, RECIPE, chosen_recipe


def run(
    recipe: Path = RECIPE,
    changes: list[str] = CHANGES,
    quick: bool = QUICK,
    engine: str = ENGINE,
    address: str = ADDRESS,
    data: Path | None = DATA,
    out: Path = typer.Option("descant-run", help="The run's folder. Default: descant-run.", show_default=False),  # noqa: B008
    resume: bool = typer.Option(False, "--resume", help="Go on with the run in the folder, where it was broken off."),
    as_json: bool = json_option(),
) -> None:
    """Run the [method] of RECIPE, a TOML file, into a folder, and say party by party whether joining helped."""
    with plain_endings(resume=out):
        chosen = chosen_recipe(recipe, changes, quick, engine, data, address).check(None)
        if chosen.swept:
            raise SettingError(f"{chosen.name} goes through values: use descant compare, or --set 'sweep={{}}'.")
        one_thread()
        table, found = _carried_out(chosen, out, resume, as_json)
        if as_json:
            typer.echo(json.dumps({**found, "verdict": table.verdict, "findings": table.notes, "table": table.plain()}))
        else:
            typer.echo(f"{table}\n\nThe run: {out} ({found['rounds']} rounds, hash {found['hash'][:12]})")
            typer.echo(f"The report with pictures: {found['report']}")


def _carried_out(chosen: Recipe, out: Path, resume: bool, as_json: bool) -> tuple[Table, dict[str, Any]]:
    from ..core.progress import bar
    from ..rounds.checkpoint import models_digest
    from ..studies.recorded_run import judge, study_of, write_page
    from ..tracking import Run

    federation, length = chosen.federation(), chosen.length
    started = Run.resume(out, federation) if resume else Run.start(out, federation, recipe=chosen.text)
    with started as run, bar(disable=not watched(as_json)) as shown:
        line = shown.add_task(federation.algorithm.name, total=length.rounds, told="–", completed=run.round)
        for round in run.rounds(max(0, length.rounds - run.round), max(1, length.rounds // length.points)):
            shown.update(line, advance=1, told=round.round.told)
        shown.add_task("training alone, to compare with", total=None, told="–")
        table = judge(run)
    found = {"folder": str(out), "rounds": federation.state.round, "hash": models_digest(federation.state)}
    with waiting("drawing the report", as_json):
        return table, {**found, "report": str(write_page(study_of(out), out))}
