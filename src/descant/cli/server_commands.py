"""`descant server`: the organiser of a federation whose parties are on machines of their own."""

from __future__ import annotations

import dataclasses
import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from ..core.timeouts import Patience
from ..reporting.table import Table
from .command_helpers import json_option, one_thread, option, plain_endings

app = typer.Typer(no_args_is_help=True, help="Organise a federation: make it, invite parties, start it, look after it.")

DIR = typer.Argument(metavar="DIR", hidden=True)
NAME = typer.Argument(metavar="NAME", hidden=True)
_LOADED = "The common model: model.load_state_dict(safetensors.torch.load_file({!r}))"


@app.command("init")
def init(
    folder: Path = DIR,
    recipe: Path = typer.Argument(metavar="RECIPE", hidden=True),  # noqa: B008
    host: list[str] = typer.Option(  # noqa: B008
        ["localhost"],
        help="The name or address by which parties reach it. Repeatable: invites name the first. If that is an "
        "address, it listens there only; for a name other than localhost, at all addresses. Default: localhost.",
        show_default=False,
    ),
    port: int = typer.Option(8443, help="The port at which parties reach it. Default: 8443.", show_default=False),
    as_json: bool = json_option(),
) -> None:
    """Make a federation in the new folder DIR, by RECIPE: its keys and certificates, and nobody invited yet."""
    with plain_endings():
        from ..config import read
        from ..deployment.pki.federation_setup import Terms
        from ..deployment.pki.roster import Roster
        from ..deployment.server.recipe_check import servable, unused

        sys.path.insert(0, "")
        found = read(recipe)
        servable(found, with_key=False)
        roster = Roster.create(folder, recipe, Terms(hosts=tuple(host), port=port))
        told = {"folder": str(folder), "address": roster.address, "fingerprint": roster.fingerprint}
        said = unused(found)
        then = "".join(f"\n{what} is not used: {why}." for what, why in said.items())
        more = {"unused": said} if as_json else {}
        _tell({**told, **more}, as_json, f"{then}\nNow invite parties: descant server invite {folder} NAME")


@app.command("invite")
def invite(
    folder: Path = DIR,
    name: str = NAME,
    out: Path | None = typer.Option(None, help="The invite's new file. Default: NAME.invite.", show_default=False),  # noqa: B008
    as_json: bool = json_option(),
) -> None:
    """Let the party NAME in: writes its invite, one file with its keys, to be sent by a way that you trust."""
    with plain_endings():
        from ..config import read
        from ..deployment.pki.federation_setup import RECIPE
        from ..deployment.pki.roster import Roster
        from ..deployment.server.row_erasure import vault_of

        roster = Roster(folder)
        file, vault = out or Path(f"{name}.invite"), vault_of(read(folder / RECIPE, roster.home))
        known = "" if vault is None else vault.shown
        made = roster.invite(name, file, vault=known)
        told = {
            "invite": str(file),
            "party": name,
            "expires": f"{made.expires:%Y-%m-%d}",
            "fingerprint": roster.fingerprint,
        }
        if vault is not None:
            told["vault"] = known or f"{vault.folder} is not there, and the invite does not say for whom to seal"
        _tell(told, as_json, "\nWhoever holds this file is the party. Tell it the fingerprint by another way.")


@app.command("start")
def start(
    folder: Path = DIR,
    gather: int = option(Patience, "gather"),
    quorum: int | None = option(Patience, "quorum"),
    deadline: float = option(Patience, "deadline"),
    limit: float = option(Patience, "limit"),
    farewell: float = option(Patience, "farewell"),
    as_json: bool = json_option(),
) -> None:
    """Serve the federation in DIR until its rounds are done. After any kill the same command goes on."""
    with plain_endings(again=" The same command goes on."):
        from ..deployment.server.serve import Serving
        from ..storage.party_state import give_back_at_once

        sys.path.insert(0, "")
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # whoever ends it by that may go on as after Ctrl-C
        one_thread()
        give_back_at_once()
        patience = Patience(deadline, quorum, gather, limit, farewell)
        done = Serving(folder, patience, lambda text: typer.echo(text, err=as_json)).until_done()
        center = done["center"] if as_json else done.pop("center")
        _tell(done, as_json, f"\n{_LOADED.format(center)}\nThe report with pictures: descant report {folder}")


@app.command("status")
def status(folder: Path = DIR, as_json: bool = json_option()) -> None:
    """Say who is there, away, has left, was invited or revoked, how far the training has come, and what came of it."""
    with plain_endings():
        from ..config.resume_command import starting
        from ..deployment.pki.roster import Roster
        from ..deployment.server.presence import whereabouts
        from ..deployment.server.serve import serves
        from ..deployment.server.training_session import first_rounds
        from ..deployment.server.training_status import heading, outcome

        roster = Roster(folder)
        first, found, server = first_rounds(roster.run), outcome(roster.run), serves(roster)
        scores, places = found.pop("scores"), whereabouts(roster, bool(server))
        rows = [
            {**dataclasses.asdict(each), **places[each.name], "first round": first.get(each.name)}
            | scores.get(each.name, {})
            for each in roster.parties()
        ]
        if as_json:
            told = {**found, "server": server or None, "address": roster.address, "parties": rows}
            typer.echo(json.dumps(told))
            return
        typer.echo(f"Training: {found['state']}, round {found['round']}. Parties reach {roster.address}.")
        typer.echo(
            f"The server runs: {server}." if server else "The server is not running: what is below was last known."
        )
        if found["state"] == "broken":
            typer.echo(f"Go on with: {starting(folder)}")
        for text in _judged(found):
            typer.echo(text)
        shown = ["name", "now", "heard", "expires", "first round"]
        if found["metric"]:
            known = any(row.get("majority") is not None for row in rows)
            shown += ["rounds", "judged", "own", "center", *([heading(found["metric"])] if known else [])]
        typer.echo(f"\n{Table(tuple(shown), rows)}" if rows else "\nNobody is invited yet.")


def _judged(found: dict[str, Any]) -> Iterator[str]:
    """What came of a training, in sentences."""
    if found["spent"]:
        yield f"{found['spent']['told']}."
    if found["metric"]:
        told = "of its own model and of the common one on a party's own test set, after the round under 'judged'"
        yield f"Own, center: {found['metric']} {told}."
    if found["center"]:
        yield _LOADED.format(found["center"])
    yield from found["ruined"]


@app.command("revoke")
def revoke(folder: Path = DIR, name: str = NAME, as_json: bool = json_option()) -> None:
    """Let the party NAME in no more; a proxy that runs knows it within seconds.

    What it has sealed stays in the vault, for when it is invited again, and nobody opens it until then.
    """
    with plain_endings():
        from ..config import read
        from ..deployment.pki.federation_setup import RECIPE
        from ..deployment.pki.roster import Roster
        from ..deployment.server.row_erasure import vault_of

        roster = Roster(folder)
        entry, vault = roster.revoke(name), vault_of(read(folder / RECIPE, roster.home))
        told = {"party": entry.name, "state": entry.state, "since": entry.since}
        if vault is not None:
            told["forget"] = f"descant vault forget {vault.folder} {name}"
        then = "\nNobody stands in for it. That command destroys what it has sealed, if anything."
        _tell(told, as_json, "" if vault is None else then)


@app.command("audit")
def audit(
    folder: Path = DIR,
    verify: bool = typer.Option(False, "--verify", help="Check every line, the recipe and the keys."),
    line: int = typer.Option(0, help="With --seal: the number of a line that you noted elsewhere.", show_default=False),
    seal: str = typer.Option("", help="That line's seal."),
    as_json: bool = json_option(),
) -> None:
    """Show the log of everything that was done with DIR, or --verify that nobody has changed it."""
    with plain_endings():
        from ..deployment.pki.roster import Roster
        from ..storage.audit_log import LOG

        roster = Roster(folder)
        if verify:
            _tell(dataclasses.asdict(roster.verify(line, seal)), as_json, "\nEvery line is as it was written.")
            return
        for text in (folder / LOG).read_text().splitlines():
            typer.echo(text)


def _tell(told: dict[str, Any], as_json: bool, then: str = "") -> None:
    if as_json:
        typer.echo(json.dumps(told))
    else:
        typer.echo("\n".join(f"{name + ':':<13}{value}" for name, value in told.items()) + then)
