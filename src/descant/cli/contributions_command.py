"""`descant contributions`: measure what each party gains and gives."""

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
        None,
        help="Number of orders of arrival to draw. Default: all of them up to 10 parties, else 20.",
        show_default=False,
    ),
    seeds: int | None = typer.Option(None, help="Number of repetitions with other seeds. Default: as in the recipe."),
    changes: list[str] = CHANGES,
    quick: bool = QUICK,
    data: Path | None = DATA,
    out: Path = typer.Option(  # noqa: B008
        "descant-contributions",
        help="Folder for the scores and the picture. Default: descant-contributions.",
        show_default=False,
    ),
    as_json: bool = json_option(),
) -> None:
    """Measure what each party gains and gives.

    It trains coalitions of parties with the [method] of RECIPE, a TOML file. After an interruption, the same command
    continues where it stopped.
    """
    with handle_errors():
        seed_changes = [] if seeds is None else [f"run.seeds={seeds}"]
        selected = (
            load_chosen_recipe(recipe, [*changes, *seed_changes], quick, engine="in-process", data=data)
            .require_no_vault()
            .check(None)
        )
        if selected.has_sweep:
            raise SettingError(
                f"{selected.name} is a sweep over values: choose one, with --set 'sweep={{}}' and --set."
            )
        use_one_thread()
        from ..studies import contribution

        result = contribution.contributions(
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
