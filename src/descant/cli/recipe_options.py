"""Options that the recipe commands share, and the recipe that they choose."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import typer

from ..config import Recipe, read_recipe

RECIPE = typer.Argument(hidden=True)
CHANGES = typer.Option([], "--set", help="Another value: table.key=value, such as run.rounds=20. Repeatable.")
QUICK = typer.Option(False, "--quick", help="The recipe's short form.")
ENGINE = typer.Option("", help="in-process, processes for all cores, or ray. Default: as the recipe says.")
ADDRESS = typer.Option("", help="host:port of a Ray cluster. Default: one is started here.", show_default=False)
DATA = typer.Option(None, help="The data folder. Default: DESCANT_DATA.")


def load_chosen_recipe(
    recipe: Path, changes: list[str], quick: bool, engine: str, data: Path | None, address: str = ""
) -> Recipe:
    sys.path.insert(0, "")  # as python -c and python -m have it: modules in this folder are found
    loaded = read_recipe(recipe)
    loaded = loaded.quick_form() if quick else loaded
    overrides = {"run.engine": engine, "run.address": address}
    loaded = loaded.with_values(*changes, *(f"{key}={json.dumps(value)}" for key, value in overrides.items() if value))
    if loaded.tables.get("quick") and all(change.startswith(("run.", "quick.")) for change in changes):
        loaded.quick_form().check_tables()  # with other parties or models than the file's, its short form need not fit
    return loaded.with_data_folder(data)
