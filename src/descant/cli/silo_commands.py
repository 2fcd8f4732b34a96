"""`descant silo`: a team that takes part from its own machine."""

from __future__ import annotations

import json
import signal
import threading
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ..errors import SettingError
from .command_helpers import json_option, one_thread, plain_endings, watched

if TYPE_CHECKING:
    from ..deployment.pki.invite import Unpacked

app = typer.Typer(no_args_is_help=True, help="Take part in a federation: check your file, join, judge, leave, forget.")

FILE = typer.Argument(metavar="FILE", hidden=True)
FOLDER = typer.Option(
    None, "--folder", help="Where this party keeps its state. Default: NAME.silo.", show_default=False
)
LEAVE = "leave"


@app.command("check")
def check(
    file: Path = FILE,
    name: str = typer.Option(
        "me", help="The party's name, by which its test set is drawn. Default: me.", show_default=False
    ),
    as_json: bool = json_option(),
) -> None:
    """Try FILE, your own Python with model and data: is its loss finite, and what would leave the building?

    Nothing is sent.
    """
    with plain_endings():
        from ..deployment.silo.dry_run import checked
        from ..deployment.silo.silo_file import SiloFile

        found = checked(SiloFile(file, name))
        if as_json:
            typer.echo(json.dumps(found))
            return
        for key, value in found.items():
            if key not in ("tensors", "leaves", "stays"):
                typer.echo(f"{key + ':':<19} {value}")
        typer.echo("\ntensors of an update:\n" + "\n".join(f"- {one} {to}" for one, to in found["tensors"].items()))
        for when, fields in found["leaves"].items():
            typer.echo(f"\nleaves {when}:\n" + "\n".join(f"- {one}: {what}" for one, what in fields.items()))
        typer.echo("\nstays:\n" + "\n".join(f"- {one}" for one in found["stays"]))


@app.command("join")
def join(
    invite: Path = typer.Argument(metavar="INVITE", hidden=True),  # noqa: B008
    file: Path = FILE,
    folder: Path | None = FOLDER,
) -> None:
    """Join the federation of INVITE with FILE, and take part until it is over, Ctrl-C or `descant silo leave`.

    It comes back by itself when the line was down. What this party keeps is in its folder, and nowhere else.
    """
    with plain_endings():
        from ..deployment.flower.silo_transport import Spoke
        from ..deployment.pki.invite import Invite
        from ..deployment.silo.console_messages import timed
        from ..deployment.silo.join import check_whose, take_part
        from ..deployment.silo.silo_worker import Worker
        from ..storage import atomic
        from ..storage.lock import Lock

        for given in (invite, file):
            if not given.is_file():
                raise SettingError(f"There is no file {given}.")
        held = Invite.read(invite)
        place = folder or Path(f"{held.party}.silo")
        check_whose(place, held)
        atomic.make(place, 0o700)
        lock = Lock(place / ".lock", then=f"It takes part already. To end that: descant silo leave {place}")
        over, ended = threading.Event(), False

        def say(text: str) -> None:
            typer.echo(timed(text))

        worker = Worker(file.resolve(), held.party, place / "state", say, held.recipe, held.vault)
        try:
            worker.check()
            (place / LEAVE).unlink(missing_ok=True)
            signal.signal(signal.SIGTERM, lambda *_: over.set())
            threading.Thread(target=_watch, args=(place / LEAVE, over), daemon=True).start()
            say(f"{held.party} joins {held.address}. The authority's fingerprint: {held.fingerprint}")
            with suppress(KeyboardInterrupt), closing(Spoke.of(held.unpack(place / "keys"))) as line:
                ended = take_part(line, worker, over, say)
        finally:
            worker.close()
            lock.release()
        helped = f"Its models are in {place / 'state'}. Whether joining helped: descant silo judge {place} {file}"
        typer.echo(helped if ended else "Left. The same command joins again.")


def _watch(file: Path, over: threading.Event) -> None:
    while not over.wait(0.5):
        if file.exists():
            over.set()


@app.command("judge")
def judge(
    folder: Path = typer.Argument(metavar="FOLDER", hidden=True),  # noqa: B008
    file: Path = FILE,
    as_json: bool = json_option(),
) -> None:
    """Say whether joining from FOLDER helped: FILE trains alone on this machine, with the same work in the same rounds.

    Nothing is sent. It takes about as long as the party's own part of the training did.
    """
    with plain_endings():
        from ..deployment.silo.handshake_reply import introduced
        from ..deployment.silo.result_files import CENTER, OWN
        from ..deployment.silo.silo_evaluation import judged
        from ..deployment.silo.silo_file import SiloFile

        one_thread()
        state = folder / "state"
        table = judged(SiloFile(file, introduced(state)["party"]), state, watched(as_json))
        files = {"own": str(state / OWN), "center": str(state / CENTER)}
        if as_json:
            typer.echo(json.dumps({"verdict": table.verdict, "table": table.plain(), "models": files}))
        else:
            typer.echo(f"{table}\n\nThe model of its own: {files['own']}\nThe common model: {files['center']}")


@app.command("leave")
def leave(folder: Path = typer.Argument(metavar="FOLDER", hidden=True)) -> None:  # noqa: B008
    """End the taking part from FOLDER, in order: the letter that is being answered is finished first."""
    with plain_endings():
        from ..storage.lock import holder

        if not holder(folder / ".lock"):
            raise SettingError(f"Nobody takes part from {folder}.")
        (folder / LEAVE).touch()
        typer.echo("It leaves when it has answered the letter that it is at.")


@app.command("forget")
def forget(
    folder: Path = typer.Argument(metavar="FOLDER", hidden=True),  # noqa: B008
    local: bool = typer.Option(False, "--local", help="Ask no server: remove what is in FOLDER, and nothing else."),
    wait: float = typer.Option(
        60.0, help="Seconds in which the server must have answered. Default: 60.", show_default=False
    ),
    as_json: bool = json_option(),
) -> None:
    """Let the server destroy the rows that the party of FOLDER has sealed, then remove what is kept in FOLDER.

    If the server does not say that it is done, nothing is removed. What stays in FOLDER: a mark of this machine, which
    rows have ever left, and the rounds of the day, so that the limits of the policy hold if the party joins again. What
    models have learnt stays in them.
    """
    with plain_endings():
        from ..deployment.pki.invite import Unpacked
        from ..deployment.silo.forget import clear
        from ..storage.lock import Lock, holder

        if owner := holder(folder / ".lock"):
            raise SettingError(f"{folder} is in use by {owner}. Leave first: descant silo leave {folder}")
        if not folder.is_dir():
            raise SettingError(f"There is no folder {folder}.")
        lock, organiser = Lock(folder / ".lock"), _at_the_vault(Unpacked(folder / "keys"))
        try:
            server = "it was not asked" if local else _forgotten(folder, wait)
            removed, kept = clear(folder)
        finally:
            lock.release()
        if as_json:
            typer.echo(json.dumps({"folder": str(folder), "server": server, "removed": removed, "kept": kept}))
            return
        typer.echo(f"The server: {server}.\nRemoved from {folder}: {', '.join(removed) or 'nothing was there'}.")
        if kept:
            typer.echo(f"Kept, so that the limits of the policy hold for ever: {', '.join(kept)}.")
        if local:
            typer.echo(f"Rows that have left are still with the organiser, sealed. {organiser}.")


def _at_the_vault(keys: Unpacked) -> str:
    name = keys.party if keys.certificate.exists() else "NAME"
    return f"To destroy them in the vault the organiser can run: descant vault forget VAULT {name}"


def _forgotten(folder: Path, seconds: float) -> str:
    """What the server says that it has done, or an error that says what to do."""
    from ..deployment.pki.invite import Unpacked
    from ..deployment.silo.forget import be_forgotten
    from ..deployment.silo.handshake_reply import INTRODUCED, MACHINE, introduced
    from ..errors import EngineError

    state, keys = folder / "state", Unpacked(folder / "keys")
    if not (state / INTRODUCED).exists():
        return "nobody was introduced to one from here, and it was not asked"
    if not keys.address.exists():
        raise SettingError(f"{folder} does not say where its server is. Join once more, or forget with --local.")
    try:
        from ..deployment.flower.silo_transport import Spoke

        with closing(Spoke.of(keys)) as line:
            return be_forgotten(line, (state / MACHINE).read_text(), introduced(state)["federation"], seconds)
    except EngineError as error:
        raise EngineError(
            f"{str(error).rstrip('.')}. So it is not known that the server has destroyed the rows of {keys.party}, and "
            f"nothing was removed from {folder}. Try again while the server runs. {_at_the_vault(keys)}; and you, "
            f"then: descant silo forget {folder} --local"
        ) from error
