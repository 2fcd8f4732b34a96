"""`descant compare`: compare methods with local training."""

from __future__ import annotations

from pathlib import Path

import typer

from ..papers import check_folder
from .command_helpers import json_option, plain_endings, side_by_side, wrapped
from .recipe_options import ADDRESS, CHANGES, DATA, ENGINE, QUICK, RECIPE, chosen_recipe


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
    with plain_endings(out):
        more = [] if seeds is None else [f"run.seeds={seeds}"]
        chosen = chosen_recipe(recipe, [*changes, *more], quick, engine, data, address)
        chosen.check(names)
        check_folder(chosen, out)
        if not as_json:
            typer.echo(f"{chosen.title}\n" + (f"\n{wrapped('about', chosen.about)}\n" if chosen.about else ""))
        side_by_side(chosen, out, as_json, names, quick)
