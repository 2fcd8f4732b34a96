"""Options shared by the commands that take a recipe."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import typer

from ..config import Recipe, read_recipe

RECIPE = typer.Argument(metavar="RECIPE", hidden=True)
CHANGES = typer.Option([], "--set", help="Change a value of the recipe, such as run.rounds=20; may be repeated.")
QUICK = typer.Option(False, "--quick", help="Use the recipe's short form.")
ENGINE = typer.Option(
    "", help="Where parties run: in-process, processes (all cores) or ray. Default: as in the recipe."
)
ADDRESS = typer.Option("", help="The host:port of a Ray cluster. Default: start one here.", show_default=False)
DATA = typer.Option(None, help="Folder with the data sets. Default: the environment variable DESCANT_DATA.")


def load_chosen_recipe(
    recipe: Path, changes: list[str], quick: bool, engine: str, data: Path | None, address: str = ""
) -> Recipe:
    sys.path.insert(0, "")  # as with python -m: find modules in the current folder
    loaded = read_recipe(recipe)
    loaded = loaded.quick_form() if quick else loaded
    overrides = {"run.engine": engine, "run.address": address}
    loaded = loaded.with_values(*changes, *(f"{key}={json.dumps(value)}" for key, value in overrides.items() if value))
    if loaded.tables.get("quick") and all(change.startswith(("run.", "quick.")) for change in changes):
        loaded.quick_form().check_tables()  # changed parties or models need not fit the short form
    return loaded.with_data_folder(data)
