"""`descant papers`: the papers' experiments, our numbers beside theirs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer

from ..papers import check_folder, check_keepable, differences, keep, kept, keys, recipe_of
from .command_helpers import json_option, plain_endings, side_by_side, wrapped

app = typer.Typer(no_args_is_help=True, help="The papers' experiments: list them, run one, our numbers beside theirs.")


@app.command("list")
def show(as_json: bool = json_option()) -> None:
    """List the experiments: their keys, what they are, and how long each took where its kept numbers were made."""
    with plain_endings():
        rows: list[dict[str, Any]] = []
        for key in keys():
            recipe = recipe_of(key)
            known = {form: kept(key, quick) for form, quick in (("quick", True), ("full", False))}
            row: dict[str, Any] = {form: None if found is None else found.seconds for form, found in known.items()}
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
def run(
    key: str = typer.Argument(hidden=True),
    quick: bool = typer.Option(False, "--quick", help="The short form: under two minutes on two cores."),
    seeds: int | None = typer.Option(None, help="How often all is repeated. Default: as the recipe says."),
    changes: list[str] = typer.Option([], "--set", help="Another value: table.key=value. Repeatable."),  # noqa: B008
    data: Path | None = typer.Option(None, help="The data folder. Default: DESCANT_DATA."),  # noqa: B008
    out: Path | None = typer.Option(None, help="The folder for the report. Default: descant-papers/KEY."),  # noqa: B008
    expect: bool = typer.Option(False, "--expect", help="Keep the numbers in expected.json, to compare with later."),
    as_json: bool = json_option(),
) -> None:
    """Run the experiment KEY (see descant papers list).

    It prints a table with the paper's figures beside ours, says where we differ from the numbers that we keep, and
    writes a report. Broken off, the same command goes on behind the trainings that had finished.
    """
    folder = out or Path("descant-papers") / (key + ("-quick" if quick else ""))
    with plain_endings(folder):
        recipe = recipe_of(key)
        recipe = (recipe.quick() if quick else recipe).set(*changes, *([] if seeds is None else [f"run.seeds={seeds}"]))
        recipe = recipe.where(data).check()
        check_folder(recipe, folder)
        if expect:
            check_keepable(recipe)
        if not as_json:
            typer.echo(f"{recipe.title}\n")
            typer.echo(wrapped("about", recipe.about) + "\n")
        known = kept(key, quick)
        done = side_by_side(recipe, folder, as_json, quick=quick, compared=lambda done: differences(done, known))
        if expect:  # last: what cannot be kept has been told, and stands in the report
            typer.echo(f"Kept in {keep(key, done)}.", err=as_json)


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
