"""The command line. It imports nothing heavy: torch, numpy and the rest wait until a command needs them."""

from __future__ import annotations

import io
import sys
import warnings
from typing import Annotated

import typer

from .. import __version__
from ..errors import DescantWarning
from . import papers, recipes, server, silo, tools, vault

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,  # plain help starts faster
    pretty_exceptions_enable=False,  # a traceback with local values would show a party's data
)


def show_version(wanted: bool) -> None:
    """Print the version and leave."""
    if wanted:
        typer.echo(f"descant {__version__}")
        raise typer.Exit


@app.callback()
def descant(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Federated learning for parties that differ: own models, robust centres, and numbers that say who gained."""


for command in (tools.demo, recipes.run, recipes.compare, recipes.report, recipes.runs, tools.doctor, tools.bench):
    app.command()(command)
app.command()(recipes.worth)
app.add_typer(papers.app, name="papers")
app.add_typer(vault.app, name="vault")
app.add_typer(server.app, name="server")
app.add_typer(silo.app, name="silo")


_as_ever = warnings.formatwarning


def told(message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None) -> str:
    """A warning as a user reads it: where in our code it was given says nothing."""
    if issubclass(category, DescantWarning):
        return f"Warning: {message}\n"
    return _as_ever(message, category, filename, lineno, line)


def main() -> None:
    """The entry point."""
    warnings.formatwarning = told
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without ± or α still gets its table
    app()
