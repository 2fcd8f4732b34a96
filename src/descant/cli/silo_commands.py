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
from .command_helpers import handle_errors, json_option, show_progress, use_one_thread

if TYPE_CHECKING:
    from ..deployment.pki.invite import CredentialFiles

app = typer.Typer(no_args_is_help=True, help="Take part in a federation: check your file, join, judge, leave, forget.")

FILE = typer.Argument(metavar="FILE", hidden=True)
FOLDER = typer.Option(
    None, "--folder", help="Where this party keeps its state. Default: NAME.silo.", show_default=False
)
LEAVE_FILE = "leave"


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
    with handle_errors():
        from ..deployment.silo.dry_run import dry_run
        from ..deployment.silo.silo_file import SiloFile

        checks = dry_run(SiloFile(file, name))
        if as_json:
            typer.echo(json.dumps(checks))
            return
        for key, value in checks.items():
            if key not in ("tensors", "outgoing", "local_only"):
                typer.echo(f"{key + ':':<19} {value}")
        typer.echo("\ntensors of an update:\n" + "\n".join(f"- {one} {to}" for one, to in checks["tensors"].items()))
        for when, fields in checks["outgoing"].items():
            typer.echo(f"\nleaves {when}:\n" + "\n".join(f"- {one}: {what}" for one, what in fields.items()))
        typer.echo("\nstays:\n" + "\n".join(f"- {one}" for one in checks["local_only"]))


@app.command("join")
def join(
    invite: Path = typer.Argument(metavar="INVITE", hidden=True),  # noqa: B008
    file: Path = FILE,
    folder: Path | None = FOLDER,
) -> None:
    """Join the federation of INVITE with FILE, and take part until it is over, Ctrl-C or `descant silo leave`.

    It comes back by itself when the line was down. What this party keeps is in its folder, and nowhere else.
    """
    with handle_errors():
        from ..deployment.flower.silo_transport import FlowerSiloTransport
        from ..deployment.pki.invite import Invite
        from ..deployment.silo.console_messages import timestamped
        from ..deployment.silo.join import check_folder_owner, run_silo
        from ..deployment.silo.silo_worker import SiloWorker
        from ..storage import atomic
        from ..storage.lock import FolderLock

        for given in (invite, file):
            if not given.is_file():
                raise SettingError(f"There is no file {given}.")
        opened_invite = Invite.read(invite)
        silo_folder = folder or Path(f"{opened_invite.party}.silo")
        check_folder_owner(silo_folder, opened_invite)
        atomic.make_folder(silo_folder, 0o700)
        lock = FolderLock(
            silo_folder / ".lock", advice=f"It takes part already. To end that: descant silo leave {silo_folder}"
        )
        stop_event = threading.Event()
        finished = False

        def say(text: str) -> None:
            typer.echo(timestamped(text))

        worker = SiloWorker(
            file.resolve(),
            opened_invite.party,
            silo_folder / "state",
            log=say,
            recipe_digest=opened_invite.recipe,
            vault_fingerprint=opened_invite.vault,
        )
        try:
            worker.check()
            (silo_folder / LEAVE_FILE).unlink(missing_ok=True)
            signal.signal(signal.SIGTERM, lambda *_: stop_event.set())
            threading.Thread(target=watch_for_file, args=(silo_folder / LEAVE_FILE, stop_event), daemon=True).start()
            say(
                f"{opened_invite.party} joins {opened_invite.address}. The authority's fingerprint: {opened_invite.fingerprint}"
            )
            with (
                suppress(KeyboardInterrupt),
                closing(FlowerSiloTransport.from_credentials(opened_invite.unpack(silo_folder / "keys"))) as connection,
            ):
                finished = run_silo(connection, worker, stop_event, log=say)
        finally:
            worker.close()
            lock.release()
        closing_message = f"Its models are in {silo_folder / 'state'}. Whether joining helped: descant silo judge {silo_folder} {file}"
        typer.echo(closing_message if finished else "Left. The same command joins again.")


def watch_for_file(file: Path, stop_event: threading.Event) -> None:
    while not stop_event.wait(0.5):
        if file.exists():
            stop_event.set()


@app.command("evaluate")
def evaluate(
    folder: Path = typer.Argument(metavar="FOLDER", hidden=True),  # noqa: B008
    file: Path = FILE,
    as_json: bool = json_option(),
) -> None:
    """Say whether joining from FOLDER helped: FILE trains alone on this machine, with the same work in the same rounds.

    Nothing is sent. It takes about as long as the party's own part of the training did.
    """
    with handle_errors():
        from ..deployment.silo.handshake_reply import require_handshake
        from ..deployment.silo.result_files import GLOBAL_MODEL_FILE, PERSONAL_MODEL_FILE
        from ..deployment.silo.silo_evaluation import compare_with_local
        from ..deployment.silo.silo_file import SiloFile

        use_one_thread()
        state = folder / "state"
        table = compare_with_local(SiloFile(file, require_handshake(state)["party"]), state, show_progress(as_json))
        files = {"personal": str(state / PERSONAL_MODEL_FILE), "global_model": str(state / GLOBAL_MODEL_FILE)}
        if as_json:
            typer.echo(json.dumps({"verdict": table.verdict, "table": table.to_json_rows(), "models": files}))
        else:
            typer.echo(
                f"{table}\n\nThe model of its own: {files['personal']}\nThe common model: {files['global_model']}"
            )


@app.command("leave")
def leave(folder: Path = typer.Argument(metavar="FOLDER", hidden=True)) -> None:  # noqa: B008
    """End the taking part from FOLDER, in order: the letter that is being answered is finished first."""
    with handle_errors():
        from ..storage.lock import lock_holder

        if not lock_holder(folder / ".lock"):
            raise SettingError(f"Nobody takes part from {folder}.")
        (folder / LEAVE_FILE).touch()
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
    with handle_errors():
        from ..deployment.pki.invite import CredentialFiles
        from ..deployment.silo.forget import clear_folder
        from ..storage.lock import FolderLock, lock_holder

        if owner := lock_holder(folder / ".lock"):
            raise SettingError(f"{folder} is in use by {owner}. Leave first: descant silo leave {folder}")
        if not folder.is_dir():
            raise SettingError(f"There is no folder {folder}.")
        lock = FolderLock(folder / ".lock")
        vault_hint = vault_forget_hint(CredentialFiles(folder / "keys"))
        try:
            server = "it was not asked" if local else request_erasure(folder, wait)
            removed, kept = clear_folder(folder)
        finally:
            lock.release()
        if as_json:
            typer.echo(json.dumps({"folder": str(folder), "server": server, "removed": removed, "kept": kept}))
            return
        typer.echo(f"The server: {server}.\nRemoved from {folder}: {', '.join(removed) or 'nothing was there'}.")
        if kept:
            typer.echo(f"Kept, so that the limits of the policy hold for ever: {', '.join(kept)}.")
        if local:
            typer.echo(f"Rows that have left are still with the organiser, sealed. {vault_hint}.")


def vault_forget_hint(keys: CredentialFiles) -> str:
    name = keys.party if keys.certificate.exists() else "NAME"
    return f"To destroy them in the vault the organiser can run: descant vault forget VAULT {name}"


def request_erasure(folder: Path, seconds: float) -> str:
    """What the server says that it has done, or an error that says what to do."""
    from ..deployment.pki.invite import CredentialFiles
    from ..deployment.silo.forget import request_erasure
    from ..deployment.silo.handshake_reply import HANDSHAKE_FILE, MACHINE_FILE, require_handshake
    from ..errors import EngineError

    state = folder / "state"
    keys = CredentialFiles(folder / "keys")
    if not (state / HANDSHAKE_FILE).exists():
        return "nobody was introduced to one from here, and it was not asked"
    if not keys.address.exists():
        raise SettingError(f"{folder} does not say where its server is. Join once more, or forget with --local.")
    try:
        from ..deployment.flower.silo_transport import FlowerSiloTransport

        with closing(FlowerSiloTransport.from_credentials(keys)) as connection:
            return request_erasure(
                connection, (state / MACHINE_FILE).read_text(), require_handshake(state)["federation"], seconds
            )
    except EngineError as error:
        raise EngineError(
            f"{str(error).rstrip('.')}. So it is not known that the server has destroyed the rows of {keys.party}, and "
            f"nothing was removed from {folder}. Try again while the server runs. {vault_forget_hint(keys)}; and you, "
            f"then: descant silo forget {folder} --local"
        ) from error
