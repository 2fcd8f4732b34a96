"""`descant vault`: the folder of encrypted coresets, and its audit log."""

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
from .recipe_options import CHANGES, DATA, RECIPE

if TYPE_CHECKING:
    from ..config import Recipe
    from ..coresets.selection import Selection
    from ..storage.vault.private_keys import PrivateKey

SHOWN_VALUES = 6  # values of a row shown on a terminal; JSON has all

app = typer.Typer(no_args_is_help=True, help="Manage a vault of encrypted coresets.")

DIR = typer.Argument(metavar="DIR", hidden=True)
PARTY = typer.Argument(metavar="PARTY", hidden=True)


@app.command("init")
def init(
    folder: Path = DIR,
    key: Path | None = typer.Option(  # noqa: B008
        None, "--key", help="File of the private key, outside DIR; it is created if missing."
    ),
    run: str = typer.Option("", "--run", help="Name of the run that the vault is for. Default: a unique name."),
    as_json: bool = json_option(),
) -> None:
    """Create a vault in the new folder DIR.

    Its private key is written to the file of --key, readable by you alone, or comes from DESCANT_VAULT_KEY. Only the
    worker that trains coreset proxies needs it. Tell the parties the vault's fingerprint by telephone or on paper: with
    it they check that they encrypt for this vault and no other.
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
            typer.echo(f"{'key:':<13}{key}\n\nKeep a copy of the key on another machine: without it no coreset can be")
            typer.echo("opened. Keep DIR/parties out of backups: what is in a backup cannot be forgotten.")


@app.command("list")
def list_parties(
    folder: Path = DIR,
    as_json: bool = json_option(),
) -> None:
    """List the coresets in the vault DIR.

    It shows how often each was opened, and needs no key.
    """
    with handle_errors():
        from ..storage.vault.vault_folder import Vault

        rows = [dataclasses.asdict(held) for held in Vault(folder).parties()]
        if as_json:
            typer.echo(json.dumps(rows))
        elif rows:
            shown = ("party", "state", "since", "generation", "opened", "digest")
            typer.echo(Table(shown, [{**row, "digest": row["digest"][:16]} for row in rows]))
        else:
            typer.echo(f"No party was invited to the vault {folder} yet.")


@app.command("verify")
def verify(
    folder: Path = DIR,
    key: Path | None = typer.Option(  # noqa: B008
        None, "--key", help="File of the private key. Default: DESCANT_VAULT_KEY, or no key."
    ),
    ask_key: bool = typer.Option(False, "--ask-key", help="Ask for the key if it is in neither."),
    anchor: str = typer.Option("", "--anchor", help="LINE:SEAL, as printed by an earlier verify."),
    as_json: bool = json_option(),
) -> None:
    """Check the audit log and the coresets of the vault DIR.

    It checks the log line by line, and that the vault holds exactly what the log says. Without the key, it cannot
    detect that both the log and its head were rewritten. With the key it can, and it opens every coreset as well. Keep
    the printed LINE:SEAL elsewhere and give it to --anchor next time: that shows whether the whole folder was replaced
    by an older copy.
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
        counts = f"{verification.parties} parties, {verification.coresets} coresets"
        typer.echo(f"{counts}, {verification.lines} lines in the audit log.")
        typer.echo(f"Keep this elsewhere, for --anchor: {verification.lines}:{verification.chain_hash}")


@app.command("forget")
def forget(
    folder: Path = DIR,
    party: str = PARTY,
    as_json: bool = json_option(),
) -> None:
    """Destroy the key and the coreset of PARTY in DIR.

    It is logged, needs no private key and cannot be undone. Afterward no copy of the party's coreset can be opened,
    unless someone has copies of both the party's key from DIR/parties and the vault's private key. What models have
    learned stays in them.
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
    recipe: Path = RECIPE,
    party: str = PARTY,
    method: str = typer.Option("", help="Method of the recipe. Default: the one with coreset proxies."),
    share: float | None = typer.Option(
        None, help="Share of the party's rows. Default: as in the method's coreset proxies."
    ),
    selection_method: str = typer.Option(
        "", help="How the rows are selected. Default: as in the method's coreset proxies."
    ),
    changes: list[str] = CHANGES,
    data: Path | None = DATA,
    as_json: bool = json_option(),
) -> None:
    """Show which rows of PARTY would leave as a coreset.

    RECIPE is a TOML file that names the parties' data. Nothing is sent. If the rows are selected by a model, the
    preview uses the initial model: later ones are not known yet.
    """
    with handle_errors():
        from ..algorithms import FedAvg
        from ..config import read_recipe
        from ..coresets.features import FEATURE_SPACES
        from ..coresets.row_preview import coreset_preview
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
        table = coreset_preview(chosen_party, coreset, selection.drop_columns, None if as_json else SHOWN_VALUES)
        typer.echo(json.dumps({"rows": table.to_json_rows(), "verdict": table.verdict}) if as_json else table)


def preview_selection(recipe: Recipe, method: str, required: bool) -> Selection:
    """Return the coreset selection of the named method, of [method], or of all methods if they agree."""
    from ..coresets.selection import Selection

    if method:
        algorithms = recipe.algorithms([method])
    else:
        own_method = [recipe.algorithm()] if recipe.tables.get("method") else []
        algorithms = own_method if own_method and own_method[0].coreset_proxy else recipe.algorithms()
    selections = {one.name: one.coreset_proxy.selection for one in algorithms if one.coreset_proxy}
    if len(set(selections.values())) > 1:
        names = ", ".join(map(repr, selections))
        raise SettingError(f"The methods of {recipe.name} select different coresets. Choose one: --method {names}.")
    if required and not selections:
        raise SettingError(
            f"{method or recipe.name} has no coreset proxies: nothing would leave. "
            "Give --share or --selection-method to see what would."
        )
    return next(iter(selections.values()), Selection())


def vault_key(folder: Path, file: Path | None) -> PrivateKey:
    """Return the key for a new vault, created if its file does not exist."""
    from ..storage.atomic_folder import write_errors
    from ..storage.vault.private_keys import KEY_VARIABLE, PrivateKey, read_key

    if file is None:
        if not os.environ.get(KEY_VARIABLE):
            raise SettingError(f"Say where to put the private key: --key FILE, or set {KEY_VARIABLE}.")
        return read_key()
    if file.resolve().is_relative_to(folder.resolve()):
        raise SettingError(f"The private key must not be in the vault: give --key a file outside {folder}.")
    if file.exists():
        return read_key(file)
    key = PrivateKey.new()
    with write_errors(file.parent):
        key.write(file)
    return key


def parse_anchor(text: str) -> tuple[int, str]:
    line, _, seal = text.partition(":")
    if text and (not line.isdecimal() or not seal or int(line) < 1):
        raise SettingError(f"--anchor must be LINE:SEAL, as printed by descant vault verify. Got {text!r:.80}.")
    return int(line or 0), seal
