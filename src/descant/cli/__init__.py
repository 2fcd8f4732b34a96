"""The command line. Heavy packages such as torch and numpy are imported only when a command needs them."""

from __future__ import annotations

import io
import sys
import warnings
from typing import Annotated

import typer

from .. import __version__
from ..errors import DescantWarning
from . import papers_commands, server_commands, silo_commands, vault_commands
from .compare_command import compare
from .contributions_command import contributions
from .demo_command import demo
from .doctor_command import doctor
from .report_command import report
from .run_command import run
from .runs_command import runs

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,  # plain help starts faster
    pretty_exceptions_enable=False,  # a traceback with local values would show a party's data
)


def show_version(requested: bool) -> None:
    """Print the version and exit."""
    if requested:
        typer.echo(f"descant {__version__}")
        raise typer.Exit


@app.callback()
def descant(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Federated learning for parties that differ: personal models, robust aggregation, and a measure of who gained."""


for command in (demo, run, compare, report, runs, doctor, contributions):
    app.command()(command)
app.add_typer(papers_commands.app, name="papers")
app.add_typer(vault_commands.app, name="vault")
app.add_typer(server_commands.app, name="server")
app.add_typer(silo_commands.app, name="silo")


default_format_warning = warnings.formatwarning


def format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Return a Descant warning as a plain sentence, without its place in our code."""
    if issubclass(category, DescantWarning):
        return f"Warning: {message}\n"
    return default_format_warning(message, category, filename, lineno, line)


def main() -> None:
    """Run the command line."""
    warnings.formatwarning = format_warning
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without ± or α still prints the table
    app()
