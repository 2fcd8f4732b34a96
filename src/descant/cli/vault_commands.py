"""`descant vault`: the folder that keeps sealed coresets, and the log of everything that was done with them."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ..errors import SettingError
from ..reporting.table import Table
from .command_helpers import handle_errors, json_option
from .recipe_options import CHANGES, DATA

if TYPE_CHECKING:
    from ..config import Recipe
    from ..coresets.selection import Selection
    from ..storage.vault.private_keys import PrivateKey

SHOWN_VALUES = 6  # values of a row that a terminal has room for; JSON has all

app = typer.Typer(no_args_is_help=True, help="Coresets that parties left sealed: make a vault, list, verify, forget.")


@app.command("init")
def init(
    folder: Path = typer.Argument(metavar="DIR", hidden=True),  # noqa: B008
    key: Path | None = typer.Option(None, "--key", help="The private key's file, outside DIR; made if there is none."),  # noqa: B008
    run: str = typer.Option("", "--run", help="The run that it is for. Default: a name that nobody else has."),
    as_json: bool = json_option(),
) -> None:
    """Make a vault in the new folder DIR.

    Its private key goes into the file of --key, readable for you alone, or comes from DESCANT_VAULT_KEY. Only the
    worker that stands in for absent parties needs it. Tell the parties the vault's fingerprint by telephone or on
    paper: it is how they know that they seal for this vault and for nobody else.
    """
    with handle_errors():
        from ..storage.vault.private_keys import key_fingerprint
        from ..storage.vault.vault_folder import Vault, check_new_vault

        check_new_vault(folder)
        vault = Vault.create(folder, vault_key(folder, key), run)
        output = {"vault": str(folder), "run": vault.run, "fingerprint": key_fingerprint(vault.public)}
        if as_json:
            typer.echo(json.dumps({**output, "key": None if key is None else str(key)}))
            return
        typer.echo("\n".join(f"{name + ':':<13}{value}" for name, value in output.items()))
        if key is not None:
            typer.echo(
                f"{'key:':<13}{key}\n\nKeep a copy of the key where the vault is not: without it no coreset can be"
            )
            typer.echo("opened. Keep DIR/parties out of backups: what is there cannot be forgotten.")


@app.command("list")
def list_parties(
    folder: Path = typer.Argument(metavar="DIR", hidden=True),  # noqa: B008
    as_json: bool = json_option(),
) -> None:
    """List what the vault in DIR holds of whom, and how often it was opened. It needs no key."""
    with handle_errors():
        from ..storage.vault.vault_folder import Vault

        rows = [dataclasses.asdict(held) for held in Vault(folder).parties()]
        if as_json:
            typer.echo(json.dumps(rows))
        elif rows:
            shown = ("party", "state", "since", "generation", "opened", "digest")
            typer.echo(Table(shown, [{**row, "digest": row["digest"][:16]} for row in rows]))
        else:
            typer.echo(f"Nobody was invited to the vault {folder} yet.")


@app.command("verify")
def verify(
    folder: Path = typer.Argument(metavar="DIR", hidden=True),  # noqa: B008
    key: Path | None = typer.Option(None, "--key", help="Its file. Default: DESCANT_VAULT_KEY, or no key."),  # noqa: B008
    ask_key: bool = typer.Option(False, "--ask-key", help="Ask for the key, if it is in neither."),
    anchor: str = typer.Option("", "--anchor", help="LINE:SEAL, as an earlier verify has printed it."),
    as_json: bool = json_option(),
) -> None:
    """Check the audit log of DIR line by line, and that the vault holds exactly what it says.

    Without the key, somebody who wrote both the log and its head anew is not found out; with it, he is, and every
    coreset is opened as well. Keep the line that is printed elsewhere and give it to --noted the next time: that shows
    whether the whole folder was put back to an older copy.
    """
    with handle_errors():
        from ..storage.vault.private_keys import KEY_VARIABLE, read_key
        from ..storage.vault.vault_folder import Vault

        private_key = read_key(key) if key is not None or ask_key or os.environ.get(KEY_VARIABLE) else None
        line, seal = parse_anchor(anchor)
        verification = Vault(folder, private_key).verify(line, seal)
        if as_json:
            typer.echo(json.dumps({"vault": str(folder), **dataclasses.asdict(verification)}))
            return
        key_note = (
            "with the vault's key"
            if verification.with_key
            else "without the vault's key: see descant vault verify --help"
        )
        typer.echo(f"In order, checked {key_note}.")
        typer.echo(
            f"{verification.parties} parties, {verification.coresets} coresets, {verification.lines} lines in the audit log."
        )
        typer.echo(f"Keep this elsewhere, for --noted: {verification.lines}:{verification.chain_hash}")


@app.command("forget")
def forget(
    folder: Path = typer.Argument(metavar="DIR", hidden=True),  # noqa: B008
    party: str = typer.Argument(metavar="PARTY", hidden=True),
    as_json: bool = json_option(),
) -> None:
    """Forget PARTY: destroy its key and its coreset in the vault DIR, and log it. It needs no key, and has no way back.

    No copy of what the party has sealed can be opened any more, wherever it lies, unless somebody has a copy of the
    party's key from DIR/parties and the vault's private key. What models have learnt stays in them.
    """
    with handle_errors():
        from ..storage.vault.vault_folder import Vault

        vault = Vault(folder)
        vault.forget(party)
        (row,) = (dataclasses.asdict(held) for held in vault.parties() if held.party == party)
        if as_json:
            typer.echo(json.dumps(row))
        else:
            typer.echo(f"Forgotten at {row['since']}: {party}. Its key and its coreset are destroyed; the log says so.")


@app.command("preview")
def preview(
    recipe: Path = typer.Argument(metavar="RECIPE", hidden=True),  # noqa: B008
    party: str = typer.Argument(metavar="PARTY", hidden=True),
    method: str = typer.Option("", help="Which of the recipe's methods. Default: the one that has stand-ins."),
    share: float | None = typer.Option(None, help="Of its rows. Default: as the method's stand-ins."),
    selection_method: str = typer.Option("", help="How they are chosen. Default: as the method's stand-ins."),
    changes: list[str] = CHANGES,
    data: Path | None = DATA,
    as_json: bool = json_option(),
) -> None:
    """Show exactly which rows of PARTY would leave it as a coreset, before they do: nothing leaves here.

    RECIPE is a TOML file that says where the parties' data is. Where the rows are chosen by a model, it is the first
    one: later ones are not known yet.
    """
    with handle_errors():
        from ..algorithms import FedAvg
        from ..config import read_recipe
        from ..coresets.features import FEATURE_SPACES
        from ..coresets.preview import coreset_preview as rows_of
        from ..federation import Federation

        selected = read_recipe(recipe).with_values(*changes).with_data_folder(data)
        overrides: dict[str, Any] = {
            **({} if share is None else {"share": share, "count": None}),
            **({"method": selection_method} if selection_method else {}),
        }
        selection = dataclasses.replace(preview_selection(selected, method, required=not overrides), **overrides)
        settings = {"seed": selected.length.seed, **selected.settings()}
        plan = Federation(selected.model(), selected.population(), FedAvg(), **settings).plan_
        features = (
            None
            if selection.space == "input"
            else FEATURE_SPACES[selection.space](plan.net.module_from_row(plan.net.copy_initial_row()))
        )
        chosen_party = plan.population[party]
        coreset = selection.choose(chosen_party, plan.seed, features)
        table = rows_of(chosen_party, coreset, selection.drop_columns, None if as_json else SHOWN_VALUES)
        typer.echo(json.dumps({"rows": table.to_json_rows(), "verdict": table.verdict}) if as_json else table)


def preview_selection(recipe: Recipe, method: str, required: bool) -> Selection:
    """How parties choose what they leave: by the method that is named, by [method], or by all others alike."""
    from ..coresets.selection import Selection

    if method:
        algorithms = recipe.algorithms([method])
    else:
        own_method = [recipe.algorithm()] if recipe.tables.get("method") else []
        algorithms = own_method if own_method and own_method[0].coreset_proxy else recipe.algorithms()
    found = {one.name: one.coreset_proxy.selection for one in algorithms if one.coreset_proxy}
    if len(set(found.values())) > 1:
        names = ", ".join(map(repr, found))
        raise SettingError(f"The methods of {recipe.name} leave unlike coresets. Say which: --method {names}.")
    if required and not found:
        raise SettingError(
            f"{method or recipe.name} has no stand-ins: nothing would leave. Give --share or --by to see what would."
        )
    return next(iter(found.values()), Selection())


def vault_key(folder: Path, file: Path | None) -> PrivateKey:
    """The key for a new vault: a new one if the file is not there yet."""
    from ..storage.atomic_folder import write_errors
    from ..storage.vault.private_keys import KEY_VARIABLE, PrivateKey, read_key

    if file is None:
        if not os.environ.get(KEY_VARIABLE):
            raise SettingError(f"Say where the private key is to be: --key FILE, or set {KEY_VARIABLE}.")
        return read_key()
    if file.resolve().is_relative_to(folder.resolve()):
        raise SettingError(f"The private key must not lie in the vault: give --key a file outside {folder}.")
    if file.exists():
        return read_key(file)
    key = PrivateKey.new()
    with write_errors(file.parent):
        key.write(file)
    return key


def parse_anchor(text: str) -> tuple[int, str]:
    line, _, seal = text.partition(":")
    if text and (not line.isdecimal() or not seal or int(line) < 1):
        raise SettingError(f"--noted must be LINE:SEAL, as descant vault verify has printed it. Got {text!r:.80}.")
    return int(line or 0), seal
