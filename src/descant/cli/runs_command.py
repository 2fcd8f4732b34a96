"""`descant runs`: list the runs in a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer

from ..config import resume_hint
from ..errors import StateError
from ..reporting.table import Table
from .command_helpers import handle_errors, json_option


def runs(
    folder: Path = typer.Argument(".", help="Folder to search. Default: the current folder.", show_default=False),  # noqa: B008
    as_json: bool = json_option(),
) -> None:
    """List the runs in a folder, and how to resume them."""
    with handle_errors():
        from ..tracking import find_runs

        if not folder.is_dir():
            raise StateError(f"There is no folder {folder}.")
        rows: list[dict[str, Any]] = [
            {
                "run": str(recorded.folder),
                "state": recorded.state,
                "round": recorded.round,
                "method": recorded.settings.get("algorithm", {}).get("name"),
                "started_at": recorded.started_at,
                "reason": recorded.reason,
                "how to go on": resume_hint(recorded) if recorded.state == "interrupted" else "",
            }
            for recorded in find_runs(folder)
        ]
        if as_json:
            typer.echo(json.dumps(rows))
        else:
            shown = ("run", "state", "round", "method", "started_at", "reason")
            typer.echo(Table(shown, rows) if rows else f"There are no runs in {folder}.")
            for row in rows:
                if row["how to go on"]:
                    typer.echo(f"\n{row['run']} was interrupted. {row['how to go on']}")
