"""`descant worth`: measure what each party gains and gives."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from ..errors import SettingError
from .command_helpers import json_option, one_thread, plain_endings, watched
from .recipe_options import CHANGES, DATA, QUICK, RECIPE, chosen_recipe


def worth(
    recipe: Path = RECIPE,
    permutations: int | None = typer.Option(
        None, help="Orders of arrival to draw. Default: exact up to 10 parties, else 20.", show_default=False
    ),
    seeds: int | None = typer.Option(None, help="How often all is repeated. Default: as the recipe says."),
    changes: list[str] = CHANGES,
    quick: bool = QUICK,
    data: Path | None = DATA,
    out: Path = typer.Option(  # noqa: B008
        "descant-worth", help="The folder for scores and picture. Default: descant-worth.", show_default=False
    ),
    as_json: bool = json_option(),
) -> None:
    """Say what each party of RECIPE is worth by its [method]: what it gains, and what it gives to the others.

    Coalitions of parties train by themselves. Broken off, the same command goes on where it was.
    """
    with plain_endings():
        more = [] if seeds is None else [f"run.seeds={seeds}"]
        chosen = chosen_recipe(recipe, [*changes, *more], quick, "in-process", data).unsealed().check(None)
        if chosen.swept:
            raise SettingError(f"{chosen.name} goes through values: choose one, with --set 'sweep={{}}' and --set.")
        one_thread()
        from ..studies.contribution import worth as reckoned

        found = reckoned(
            chosen.algorithm(),
            chosen.model(),
            chosen.people(),
            rounds=chosen.length.rounds,
            seeds=chosen.seeds,
            permutations=permutations,
            file=out / "coalitions.jsonl",
            progress=watched(as_json),
            **chosen.settings(),
        )
        table, picture = found.table(), found.plot(out / "worth.png")
        if as_json:
            told = {"verdict": table.verdict, "notes": table.notes, "table": table.plain()}
            typer.echo(json.dumps({**told, "between": found.between.tolist(), "picture": str(picture)}))
        else:
            typer.echo(f"{table}\n\nThe picture: {picture}")
