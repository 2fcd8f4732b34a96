"""`descant compare`: compare methods with local training."""

from __future__ import annotations

from pathlib import Path

import typer

from ..papers import check_report_folder
from .command_helpers import handle_errors, json_option, run_and_report, wrap_line
from .recipe_options import ADDRESS, CHANGES, DATA, ENGINE, QUICK, RECIPE, load_chosen_recipe


def compare(
    recipe: Path = RECIPE,
    algorithms: str = typer.Option("", help="Which, such as local,fedavg,fedavg+. Default: as the recipe says."),
    seeds: int | None = typer.Option(None, help="How often all is repeated. Default: as the recipe says."),
    changes: list[str] = CHANGES,
    quick: bool = QUICK,
    engine: str = ENGINE,
    address: str = ADDRESS,
    data: Path | None = DATA,
    out: Path = typer.Option(  # noqa: B008
        "descant-study", help="The folder for the report. Default: descant-study.", show_default=False
    ),
    as_json: bool = json_option(),
) -> None:
    """Compare the [[methods]] of RECIPE, a TOML file, or those you name, with training alone.

    It prints a table and writes a report with pictures. Broken off, the same command goes on behind the trainings that
    had finished.
    """
    names = [name.strip() for name in algorithms.split(",") if name.strip()]
    with handle_errors(out):
        seed_changes = [] if seeds is None else [f"run.seeds={seeds}"]
        selected = load_chosen_recipe(
            recipe, [*changes, *seed_changes], quick, engine=engine, data=data, address=address
        )
        selected.check(names)
        check_report_folder(selected, out)
        if not as_json:
            typer.echo(f"{selected.title}\n" + (f"\n{wrap_line('about', selected.about)}\n" if selected.about else ""))
        run_and_report(selected, out, as_json, names=names, quick=quick)
