"""`descant compare`: compare methods with local training."""

from __future__ import annotations

from pathlib import Path

import typer

from ..papers import check_report_folder
from .command_helpers import handle_errors, json_option, run_and_report, wrap_line
from .recipe_options import ADDRESS, CHANGES, DATA, ENGINE, QUICK, RECIPE, load_chosen_recipe


def compare(
    recipe: Path = RECIPE,
    algorithms: str = typer.Option(
        "", help="Methods to compare, such as local,fedavg,fedavg+. Default: those of the recipe."
    ),
    seeds: int | None = typer.Option(None, help="Number of repetitions with other seeds. Default: as in the recipe."),
    changes: list[str] = CHANGES,
    quick: bool = QUICK,
    engine: str = ENGINE,
    address: str = ADDRESS,
    data: Path | None = DATA,
    out: Path = typer.Option(  # noqa: B008
        "descant-study", help="Folder for the report. Default: descant-study.", show_default=False
    ),
    as_json: bool = json_option(),
) -> None:
    """Compare methods with local training.

    It trains with the [[methods]] of RECIPE, a TOML file, or with those that you name. It prints a table and writes a
    report with pictures. After an interruption, the same command continues after the finished trainings.
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
