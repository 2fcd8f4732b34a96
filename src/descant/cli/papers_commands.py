"""`descant papers`: run the papers' experiments and compare our numbers with theirs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer

from ..papers import (
    check_recordable,
    check_report_folder,
    compare_with_expected,
    experiment_keys,
    load_recipe,
    read_expected,
    write_expected,
)
from .command_helpers import handle_errors, json_option, run_and_report, wrap_line
from .recipe_options import CHANGES, DATA

app = typer.Typer(no_args_is_help=True, help="List and run the experiments of the papers.")


@app.command("list")
def list_experiments(as_json: bool = json_option()) -> None:
    """List the experiments with their keys, titles and run times.

    The run times are those of the machine that made the expected numbers.
    """
    with handle_errors():
        rows: list[dict[str, Any]] = []
        for key in experiment_keys():
            recipe = load_recipe(key)
            expected_by_form = {form: read_expected(key, quick) for form, quick in (("quick", True), ("full", False))}
            row: dict[str, Any] = {
                form: None if expected is None else expected.seconds for form, expected in expected_by_form.items()
            }
            data = recipe.tables.get("parties", {}).get("population")
            rows.append({"experiment": key, "title": recipe.title, "parties": data, **row})
        if as_json:
            typer.echo(json.dumps(rows))
            return
        width = max(len(row["experiment"]) for row in rows) + 2
        typer.echo(f"{'experiment':<{width}}{'quick':>7}{'full':>8}  what it is")
        for row in rows:
            times = f"{_duration(row['quick']):>7}{_duration(row['full']):>8}"
            typer.echo(f"{row['experiment']:<{width}}{times}  {row['title']}")
        typer.echo("\nRun one: descant papers run fed_plus/synthetic --quick")


@app.command("run")
def run_experiment(
    key: str = typer.Argument(metavar="KEY", hidden=True),
    quick: bool = typer.Option(False, "--quick", help="Run the short form: under two minutes on two cores."),
    seeds: int | None = typer.Option(None, help="Number of repetitions with other seeds. Default: as in the recipe."),
    changes: list[str] = CHANGES,
    data: Path | None = DATA,
    out: Path | None = typer.Option(None, help="Folder for the report. Default: descant-papers/KEY."),  # noqa: B008
    update_expected: bool = typer.Option(
        False, "--update-expected", help="Store the numbers in expected.json for later comparisons."
    ),
    as_json: bool = json_option(),
) -> None:
    """Run one experiment and compare it with the paper.

    KEY is one of those that descant papers list shows, such as fed_plus/synthetic. It prints a table with the paper's
    figures beside ours, reports differences from the expected numbers, and writes a report. After an interruption, the
    same command continues after the finished trainings.
    """
    folder = out or Path("descant-papers") / (key + ("-quick" if quick else ""))
    with handle_errors(folder):
        recipe = load_recipe(key)
        recipe = (recipe.quick_form() if quick else recipe).with_values(
            *changes, *([] if seeds is None else [f"run.seeds={seeds}"])
        )
        recipe = recipe.with_data_folder(data).check()
        check_report_folder(recipe, folder)
        if update_expected:
            check_recordable(recipe)
        if not as_json:
            typer.echo(f"{recipe.title}\n")
            typer.echo(wrap_line("about", recipe.about) + "\n")
        expected = read_expected(key, quick)
        experiment = run_and_report(
            recipe,
            folder,
            as_json,
            quick=quick,
            compare_results=lambda experiment: compare_with_expected(experiment, expected),
        )
        if update_expected:  # last: the results are printed and reported even if this fails
            typer.echo(f"Kept in {write_expected(key, experiment)}.", err=as_json)


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
