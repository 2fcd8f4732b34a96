"""`descant doctor`: report what is installed and how a model would be computed."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

import typer

from ..errors import SettingError
from .command_helpers import handle_errors, json_option

LOSS = "torch.nn.functional:cross_entropy"


def doctor(
    model: str = typer.Argument(
        "", help="The function that makes your model: package.module:name, or file.py:name.", show_default=False
    ),
    parties: str = typer.Option("", "--parties", help="The function that makes your parties, in the same form."),
    loss: str = typer.Option(LOSS, help=f"The loss function, in the same form. Default: {LOSS}.", show_default=False),
    participation: int = typer.Option(10, help="Number of parties per round. Default: 10.", show_default=False),
    batch: int = typer.Option(10, help="Number of samples per step. Default: 10.", show_default=False),
    as_json: bool = json_option(),
) -> None:
    """Show what is installed and how your model would run.

    The execution mode of a model is stacked, single, vectorized or looped.
    """
    with handle_errors():
        if bool(model) != bool(parties):
            raise SettingError("Give a model and --parties together: a model is tried on a batch of their data.")
        sys.path.insert(0, "")  # as with python -m: find modules in the current folder
        from .doctor_checks import explain_execution, inspect_machine

        findings = inspect_machine()
        if model:
            from ..algorithms import FedAvg
            from ..federation import Federation
            from ..serialization.references import resolve

            settings: dict[str, Any] = {"loss": resolve(loss), "participation": participation, "batch": batch}
            findings += explain_execution(Federation(model, parties, FedAvg(), **settings))
        if as_json:
            typer.echo(json.dumps([dataclasses.asdict(finding) for finding in findings]))
        else:
            typer.echo("\n".join(map(str, findings)))
