"""`descant silo`: a team that takes part from its own machine."""

from __future__ import annotations

import json
import signal
import threading
from pathlib import Path

import typer

from ..errors import SettingError
from .common import json_option, one_thread, plain_endings, watched

app = typer.Typer(no_args_is_help=True, help="Take part in a federation: check your file, join, judge, leave, forget.")

FILE = typer.Argument(metavar="FILE", hidden=True)
FOLDER = typer.Option(
    None, "--folder", help="Where this party keeps its state. Default: NAME.silo.", show_default=False
)
LEAVE = "leave"


@app.command("check")
def check(
    file: Path = FILE,
    name: str = typer.Option("me", help="The party's name, by which its test set is drawn."),
    as_json: bool = json_option(),
) -> None:
    """Try FILE, your own Python with model and data: is its loss finite, and what would leave the building?

    Nothing is sent.
    """
    with plain_endings():
        from ..silo.checking import checked
        from ..silo.file import SiloFile

        found = checked(SiloFile(file, name))
        if as_json:
            typer.echo(json.dumps(found))
            return
        for key, value in found.items():
            if isinstance(value, list):
                typer.echo(f"\n{key}:\n" + "\n".join(f"- {one}" for one in value))
            else:
                typer.echo(f"{key + ':':<20}{value}")


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
        from ..engines.spoke import Spoke
        from ..silo.join import take_part
        from ..silo.worker import Worker
        from ..store import disk
        from ..store.lock import Lock
        from ..trust.invite import Invite

        held = Invite.read(invite)
        place = folder or Path(f"{held.party}.silo")
        if not file.is_file():
            raise SettingError(f"There is no file {file}.")
        disk.make(place, 0o700)
        lock = Lock(place / ".lock")
        (place / LEAVE).unlink(missing_ok=True)
        over = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: over.set())
        threading.Thread(target=_watch, args=(place / LEAVE, over), daemon=True).start()
        keys = held.unpack(place / "keys")
        worker = Worker(file.resolve(), held.party, place / "state", typer.echo, held.recipe)
        typer.echo(f"{held.party} joins {held.address}. The authority's fingerprint: {held.fingerprint}")
        line = Spoke(held.address, held.authority, keys.certificate, keys.key, held.node_key.encode())
        try:
            take_part(line, worker, over, typer.echo)
        finally:
            worker.close()
            line.close()
            lock.release()
        typer.echo("Left. The same command joins again.")


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
        from ..silo.desk import introduced
        from ..silo.file import SiloFile
        from ..silo.judging import judged
        from ..silo.result import CENTER, OWN

        one_thread()
        state = folder / "state"
        table = judged(SiloFile(file, introduced(state)), state, watched(as_json))
        files = {"own": str(state / OWN), "center": str(state / CENTER)}
        if as_json:
            typer.echo(json.dumps({"verdict": table.verdict, "table": table.plain(), "models": files}))
        else:
            typer.echo(f"{table}\n\nThe model of its own: {files['own']}\nThe common model: {files['center']}")


@app.command("leave")
def leave(folder: Path = typer.Argument(metavar="FOLDER", hidden=True)) -> None:  # noqa: B008
    """End the taking part from FOLDER, in order: the letter that is being answered is finished first."""
    with plain_endings():
        from ..store.lock import holder

        if not holder(folder / ".lock"):
            raise SettingError(f"Nobody takes part from {folder}.")
        (folder / LEAVE).touch()
        typer.echo("It leaves when it has answered the letter that it is at.")


@app.command("forget")
def forget(folder: Path = typer.Argument(metavar="FOLDER", hidden=True), as_json: bool = json_option()) -> None:  # noqa: B008
    """Remove what this party has kept in FOLDER: memory, answers, keys, and whose folder it was.

    Only a mark of this machine stays, by which the server knows that the invite is used in one place.
    What has left the building (models, coresets) is with the organiser: ask for `descant vault forget`.
    """
    with plain_endings():
        from ..silo.desk import MACHINE
        from ..store.lock import holder

        if owner := holder(folder / ".lock"):
            raise SettingError(f"{folder} is in use by {owner}. Leave first: descant silo leave {folder}")
        if not folder.is_dir():
            raise SettingError(f"There is no folder {folder}.")
        files = [
            file for part in ("state", "keys") for file in sorted((folder / part).glob("*")) if file.name != MACHINE
        ]
        for file in files:
            file.unlink()
        removed = {"folder": str(folder), "removed": [str(file.relative_to(folder)) for file in files]}
        told = f"Removed from {folder}: {', '.join(removed['removed']) or 'nothing was there'}."
        typer.echo(json.dumps(removed) if as_json else told)
