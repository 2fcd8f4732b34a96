"""`descant run`: run one method into a durable folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer

from ..config import Recipe
from ..errors import SettingError
from ..reporting.table import Table
from .command_helpers import handle_errors, json_option, progress_until_done, show_progress, use_one_thread
from .recipe_options import ADDRESS, CHANGES, DATA, ENGINE, QUICK, RECIPE, load_chosen_recipe


def run(
    recipe: Path = RECIPE,
    changes: list[str] = CHANGES,
    quick: bool = QUICK,
    engine: str = ENGINE,
    address: str = ADDRESS,
    data: Path | None = DATA,
    out: Path = typer.Option("descant-run", help="Folder of the run. Default: descant-run.", show_default=False),  # noqa: B008
    resume: bool = typer.Option(False, "--resume", help="Resume the interrupted run in the folder."),
    as_json: bool = json_option(),
) -> None:
    """Run one method and show whether joining helped.

    It runs the [method] of RECIPE, a TOML file, into a folder, and compares each party with local training.
    """
    with handle_errors(resume=out):
        selected = load_chosen_recipe(recipe, changes, quick, engine=engine, data=data, address=address).check(None)
        if selected.has_sweep:
            raise SettingError(f"{selected.name} is a sweep over values: use descant compare, or --set 'sweep={{}}'.")
        use_one_thread()
        table, outcome = execute_run(selected, out, resume, as_json=as_json)
        if as_json:
            typer.echo(
                json.dumps(
                    {**outcome, "verdict": table.verdict, "findings": table.notes, "table": table.to_json_rows()}
                )
            )
        else:
            typer.echo(f"{table}\n\nThe run: {out} ({outcome['rounds']} rounds, hash {outcome['hash'][:12]})")
            typer.echo(f"The report with pictures: {outcome['report']}")


def execute_run(selected: Recipe, out: Path, resume: bool, as_json: bool) -> tuple[Table, dict[str, Any]]:
    from ..core.progress import progress_bar
    from ..rounds.checkpoint import digest_of_models
    from ..studies.run_versus_local import evaluate_run, study_from_run, write_report
    from ..tracking import Run

    federation = selected.federation()
    length = selected.length
    started = Run.resume(out, federation) if resume else Run.start(out, federation, recipe=selected.text)
    with started as run, progress_bar(disable=not show_progress(as_json)) as shown:
        progress_task = shown.add_task(federation.algorithm.name, total=length.rounds, summary="–", completed=run.round)
        for round in run.rounds(max(0, length.rounds - run.round), max(1, length.rounds // length.points)):
            shown.update(progress_task, advance=1, summary=round.round.summary)
        shown.add_task("local training, for comparison", total=None, summary="–")
        table = evaluate_run(run)
    outcome = {"folder": str(out), "rounds": federation.state.round, "hash": digest_of_models(federation.state)}
    with progress_until_done("drawing the report", as_json):
        return table, {**outcome, "report": str(write_report(study_from_run(out), out))}
