"""`descant papers`: the papers' experiments, our numbers beside theirs."""

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

app = typer.Typer(no_args_is_help=True, help="The papers' experiments: list them, run one, our numbers beside theirs.")


@app.command("list")
def list_experiments(as_json: bool = json_option()) -> None:
    """List the experiments: their keys, what they are, and how long each took where its kept numbers were made."""
    with handle_errors():
        rows: list[dict[str, Any]] = []
        for key in experiment_keys():
            recipe = load_recipe(key)
            expected_by_form = {form: read_expected(key, quick) for form, quick in (("quick", True), ("full", False))}
            row: dict[str, Any] = {
                form: None if found is None else found.seconds for form, found in expected_by_form.items()
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
    key: str = typer.Argument(hidden=True),
    quick: bool = typer.Option(False, "--quick", help="The short form: under two minutes on two cores."),
    seeds: int | None = typer.Option(None, help="How often all is repeated. Default: as the recipe says."),
    changes: list[str] = typer.Option([], "--set", help="Another value: table.key=value. Repeatable."),  # noqa: B008
    data: Path | None = typer.Option(None, help="The data folder. Default: DESCANT_DATA."),  # noqa: B008
    out: Path | None = typer.Option(None, help="The folder for the report. Default: descant-papers/KEY."),  # noqa: B008
    update_expected: bool = typer.Option(
        False, "--update-expected", help="Keep the numbers in expected.json, to compare with later."
    ),
    as_json: bool = json_option(),
) -> None:
    """Run the experiment KEY (see descant papers list).

    It prints a table with the paper's figures beside ours, says where we differ from the numbers that we keep, and
    writes a report. Broken off, the same command goes on behind the trainings that had finished.
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
            recipe, folder, as_json, quick=quick, compare_results=lambda done: compare_with_expected(done, expected)
        )
        if update_expected:  # last: what cannot be kept has been told, and stands in the report
            typer.echo(f"Kept in {write_expected(key, experiment)}.", err=as_json)


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
