"""`descant worth`: measure what each party gains and gives."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from ..errors import SettingError
from .command_helpers import handle_errors, json_option, show_progress, use_one_thread
from .recipe_options import CHANGES, DATA, QUICK, RECIPE, load_chosen_recipe


def contributions(
    recipe: Path = RECIPE,
    permutations: int | None = typer.Option(
        None, help="Orders of arrival to draw. Default: exact up to 10 parties, else 20.", show_default=False
    ),
    seeds: int | None = typer.Option(None, help="How often all is repeated. Default: as the recipe says."),
    changes: list[str] = CHANGES,
    quick: bool = QUICK,
    data: Path | None = DATA,
    out: Path = typer.Option(  # noqa: B008
        "descant-contributions", help="The folder for scores and picture. Default: descant-worth.", show_default=False
    ),
    as_json: bool = json_option(),
) -> None:
    """Say what each party of RECIPE is worth by its [method]: what it gains, and what it gives to the others.

    Coalitions of parties train by themselves. Broken off, the same command goes on where it was.
    """
    with handle_errors():
        seed_changes = [] if seeds is None else [f"run.seeds={seeds}"]
        selected = (
            load_chosen_recipe(recipe, [*changes, *seed_changes], quick, engine="in-process", data=data)
            .require_no_vault()
            .check(None)
        )
        if selected.has_sweep:
            raise SettingError(f"{selected.name} goes through values: choose one, with --set 'sweep={{}}' and --set.")
        use_one_thread()
        from ..studies.contribution import contributions as reckoned

        result = reckoned(
            selected.algorithm(),
            selected.model(),
            selected.population(),
            rounds=selected.length.rounds,
            seeds=selected.seeds,
            permutations=permutations,
            file=out / "coalitions.jsonl",
            progress=show_progress(as_json),
            **selected.settings(),
        )
        table = result.table()
        picture = result.plot(out / "contributions.png")
        if as_json:
            output = {"verdict": table.verdict, "notes": table.notes, "table": table.to_json_rows()}
            typer.echo(json.dumps({**output, "pairwise": result.pairwise.tolist(), "picture": str(picture)}))
        else:
            typer.echo(f"{table}\n\nThe picture: {picture}")
