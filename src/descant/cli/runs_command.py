"""`descant runs`: list the runs in a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer

from ..config import how_to_end
from ..errors import StateError
from ..reporting.table import Table
from .command_helpers import json_option, plain_endings


def runs(
    folder: Path = typer.Argument(".", help="Where to look. Default: here.", show_default=False),  # noqa: B008
    as_json: bool = json_option(),
) -> None:
    """List the runs in a folder: how far each came, and how to go on."""
    with plain_endings():
        from ..tracking import runs as found_in

        if not folder.is_dir():
            raise StateError(f"There is no folder {folder}.")
        rows: list[dict[str, Any]] = [
            {
                "run": str(found.folder),
                "state": found.state,
                "round": found.round,
                "method": found.settings.get("algorithm", {}).get("name"),
                "begun": found.begun,
                "reason": found.reason,
                "how to go on": how_to_end(found) if found.state == "broken" else "",
            }
            for found in found_in(folder)
        ]
        if as_json:
            typer.echo(json.dumps(rows))
        else:
            shown = ("run", "state", "round", "method", "begun", "reason")
            typer.echo(Table(shown, rows) if rows else f"There are no runs in {folder}.")
            for row in rows:
                if row["how to go on"]:
                    typer.echo(f"\n{row['run']} is broken. {row['how to go on']}")
