"""`descant server`: run the server of a federation whose parties are silos on their own machines."""

from __future__ import annotations

import dataclasses
import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from ..core.timeouts import WaitLimits
from ..reporting.table import Table
from .command_helpers import handle_errors, json_option, settings_option, use_one_thread

app = typer.Typer(no_args_is_help=True, help="Run the server of a federation.")

DIR = typer.Argument(metavar="DIR", hidden=True)
NAME = typer.Argument(metavar="NAME", hidden=True)
LOAD_MODEL_HINT = "The global model: model.load_state_dict(safetensors.torch.load_file({!r}))"


@app.command("init")
def init(
    folder: Path = DIR,
    recipe: Path = typer.Argument(metavar="RECIPE", hidden=True),  # noqa: B008
    host: list[str] = typer.Option(  # noqa: B008
        ["localhost"],
        help="Host name or address at which parties reach the server; may be repeated. Invites name the first one. "
        "If that is an address or localhost, the server listens only there, else on all interfaces. "
        "Default: localhost.",
        show_default=False,
    ),
    port: int = typer.Option(8443, help="Port at which parties reach the server. Default: 8443.", show_default=False),
    as_json: bool = json_option(),
) -> None:
    """Create a server in the new folder DIR.

    RECIPE is a TOML file with the model and the method. DIR gets the keys and certificates of the server.
    """
    with handle_errors():
        from ..config import read_recipe
        from ..deployment.pki.federation_setup import FederationTerms
        from ..deployment.pki.roster import Roster
        from ..deployment.server.recipe_check import check_servable, unused_settings

        sys.path.insert(0, "")
        loaded = read_recipe(recipe)
        check_servable(loaded, with_key=False)
        roster = Roster.create(folder, recipe, FederationTerms(hosts=tuple(host), port=port))
        output = {"folder": str(folder), "address": roster.address, "fingerprint": roster.fingerprint}
        unused_sections = unused_settings(loaded)
        unused_note = "".join(f"\n{what} is not used: {why}." for what, why in unused_sections.items())
        more = {"unused": unused_sections} if as_json else {}
        print_record(
            {**output, **more}, as_json, f"{unused_note}\nNow invite parties: descant server invite {folder} NAME"
        )


@app.command("invite")
def invite(
    folder: Path = DIR,
    name: str = NAME,
    out: Path | None = typer.Option(None, help="New file for the invite. Default: NAME.invite.", show_default=False),  # noqa: B008
    as_json: bool = json_option(),
) -> None:
    """Write the invite of the party NAME.

    The invite is one file with the party's keys. Send it over a channel that you trust.
    """
    with handle_errors():
        from ..config import read_recipe
        from ..deployment.pki.federation_setup import RECIPE_FILE
        from ..deployment.pki.roster import Roster
        from ..deployment.server.row_erasure import vault_location

        roster = Roster(folder)
        file = out or Path(f"{name}.invite")
        vault = vault_location(read_recipe(folder / RECIPE_FILE, roster.recipe_folder))
        vault_key = "" if vault is None else vault.public_fingerprint
        issued = roster.invite(name, file, vault=vault_key)
        output = {
            "invite": str(file),
            "party": name,
            "expires": f"{issued.expires:%Y-%m-%d}",
            "fingerprint": roster.fingerprint,
        }
        if vault is not None:
            output["vault"] = vault_key or f"{vault.folder} does not exist, so the invite names no vault key"
        print_record(
            output, as_json, "\nAnyone with this file can act as the party. Send the fingerprint over another channel."
        )


@app.command("start")
def start(
    folder: Path = DIR,
    min_parties: int = settings_option(WaitLimits, "min_parties"),
    quorum: int | None = settings_option(WaitLimits, "quorum"),
    deadline: float = settings_option(WaitLimits, "deadline"),
    timeout: float = settings_option(WaitLimits, "timeout"),
    grace: float = settings_option(WaitLimits, "grace"),
    as_json: bool = json_option(),
) -> None:
    """Serve the federation in DIR until all rounds are done.

    After a crash, the same command continues.
    """
    with handle_errors(resume_hint=" The same command continues."):
        from ..deployment.server.serve import FederationServer
        from ..storage.party_store import release_memory_eagerly

        sys.path.insert(0, "")
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM acts like Ctrl-C
        use_one_thread()
        release_memory_eagerly()
        timeouts = WaitLimits(deadline, quorum, min_parties, timeout=timeout, grace=grace)
        outcome = FederationServer(folder, timeouts, lambda text: typer.echo(text, err=as_json)).run_to_completion()
        model_file = outcome["global_model"] if as_json else outcome.pop("global_model")
        print_record(
            outcome,
            as_json,
            f"\n{LOAD_MODEL_HINT.format(model_file)}\nThe report with pictures: descant report {folder}",
        )


@app.command("status")
def status(folder: Path = DIR, as_json: bool = json_option()) -> None:
    """Show the parties, the progress and the results of DIR."""
    with handle_errors():
        from ..config.resume_command import server_start_command
        from ..deployment.pki.roster import Roster
        from ..deployment.server.presence import party_statuses
        from ..deployment.server.serve import serving_process
        from ..deployment.server.training_session import first_rounds
        from ..deployment.server.training_status import baseline_heading, training_status

        roster = Roster(folder)
        first_rounds_by_party = first_rounds(roster.run_folder)
        outcome_record = training_status(roster.run_folder)
        server = serving_process(roster)
        scores = outcome_record.pop("scores")
        presence = party_statuses(roster, bool(server))
        rows = [
            {**dataclasses.asdict(each), **presence[each.name], "first round": first_rounds_by_party.get(each.name)}
            | scores.get(each.name, {})
            for each in roster.parties()
        ]
        if as_json:
            output = {**outcome_record, "server": server or None, "address": roster.address, "parties": rows}
            typer.echo(json.dumps(output))
            return
        typer.echo(
            f"Training: {outcome_record['state']}, round {outcome_record['round']}. Parties reach {roster.address}."
        )
        typer.echo(
            f"The server runs: {server}." if server else "The server is not running: below is the last known state."
        )
        if outcome_record["state"] == "interrupted":
            typer.echo(f"Go on with: {server_start_command(folder)}")
        for text in outcome_sentences(outcome_record):
            typer.echo(text)
        shown = ["name", "presence", "last_seen", "expires", "first round"]
        if outcome_record["metric"]:
            has_baseline = any(row.get("majority") is not None for row in rows)
            shown += [
                "rounds",
                "evaluated",
                "personal",
                "global_model",
                *([baseline_heading(outcome_record["metric"])] if has_baseline else []),
            ]
        typer.echo(f"\n{Table(tuple(shown), rows)}" if rows else "\nNo party is invited yet.")


def outcome_sentences(outcome_record: dict[str, Any]) -> Iterator[str]:
    """Yield the results of a training, in sentences."""
    if outcome_record["spent"]:
        yield f"{outcome_record['spent']['text']}."
    if outcome_record["metric"]:
        explanation = "of the personal and the global model on the party's own test set, after the round in 'evaluated'"
        yield f"personal, global_model: {outcome_record['metric']} {explanation}."
    if outcome_record["global_model"]:
        yield LOAD_MODEL_HINT.format(outcome_record["global_model"])
    yield from outcome_record["baseline_warnings"]


@app.command("revoke")
def revoke(folder: Path = DIR, name: str = NAME, as_json: bool = json_option()) -> None:
    """Revoke the access of the party NAME.

    A running proxy applies it within seconds. The party's encrypted coreset stays in the vault and is not opened unless
    the party is invited again.
    """
    with handle_errors():
        from ..config import read_recipe
        from ..deployment.pki.federation_setup import RECIPE_FILE
        from ..deployment.pki.roster import Roster
        from ..deployment.server.row_erasure import vault_location

        roster = Roster(folder)
        entry = roster.revoke(name)
        vault = vault_location(read_recipe(folder / RECIPE_FILE, roster.recipe_folder))
        output = {"party": entry.name, "state": entry.state, "since": entry.since}
        if vault is not None:
            output["forget"] = f"descant vault forget {vault.folder} {name}"
        next_step = "\nNo coreset proxy trains for it. That command destroys its encrypted coreset, if it has one."
        print_record(output, as_json, "" if vault is None else next_step)


@app.command("audit")
def audit(
    folder: Path = DIR,
    verify: bool = typer.Option(False, "--verify", help="Check that the log, the recipe and the keys are unchanged."),
    line: int = typer.Option(0, help="Number of a log line that you noted elsewhere, with --seal.", show_default=False),
    seal: str = typer.Option("", help="Seal of that line."),
    as_json: bool = json_option(),
) -> None:
    """Show the audit log of DIR, or verify it."""
    with handle_errors():
        from ..deployment.pki.roster import Roster
        from ..storage.audit_log import AUDIT_LOG

        roster = Roster(folder)
        if verify:
            print_record(dataclasses.asdict(roster.verify(line, seal)), as_json, "\nEvery line is unchanged.")
            return
        for text in (folder / AUDIT_LOG).read_text().splitlines():
            typer.echo(text)


def print_record(record: dict[str, Any], as_json: bool, suffix: str = "") -> None:
    if as_json:
        typer.echo(json.dumps(record))
    else:
        typer.echo("\n".join(f"{name + ':':<13}{value}" for name, value in record.items()) + suffix)
