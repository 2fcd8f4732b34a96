"""`descant silo`: take part in a federation from the party's own machine."""

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

app = typer.Typer(
    no_args_is_help=True,
    help="Take part in a federation from your own machine.",
)

FILE = typer.Argument(metavar="FILE", hidden=True)
FOLDER = typer.Option(
    None, "--folder", help="Folder for the state of this party. Default: NAME.silo.", show_default=False
)
SILO_FOLDER = typer.Argument(metavar="FOLDER", hidden=True)
LEAVE_FILE = "leave"


@app.command("check")
def check(
    file: Path = FILE,
    name: str = typer.Option(
        "me", help="Name of the party; it determines the draw of the test set. Default: me.", show_default=False
    ),
    as_json: bool = json_option(),
) -> None:
    """Check FILE in a dry run; nothing is sent.

    FILE is your Python file, which defines model and data. The check shows whether the model, the data and the loss
    work together, and what would leave this machine.
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
        shapes = [f"- {tensor} {shape}" for tensor, shape in checks["tensors"].items()]
        typer.echo("\ntensors of an update:\n" + "\n".join(shapes))
        for when, fields in checks["outgoing"].items():
            typer.echo(f"\nleaves {when}:\n" + "\n".join(f"- {field}: {what}" for field, what in fields.items()))
        typer.echo("\nstays:\n" + "\n".join(f"- {item}" for item in checks["local_only"]))


@app.command("join")
def join(
    invite: Path = typer.Argument(metavar="INVITE", hidden=True),  # noqa: B008
    file: Path = FILE,
    folder: Path | None = FOLDER,
) -> None:
    """Join the federation of INVITE with FILE.

    INVITE is a file from the server operator; FILE is your Python file, which defines model and data. The silo takes
    part until the training ends, Ctrl-C or descant silo leave. It reconnects by itself. All state of this party is in
    its folder.
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
            silo_folder / ".lock", advice=f"It already takes part. To end that: descant silo leave {silo_folder}"
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
                f"{opened_invite.party} joins {opened_invite.address}. "
                f"The authority's fingerprint: {opened_invite.fingerprint}"
            )
            with (
                suppress(KeyboardInterrupt),
                closing(FlowerSiloTransport.from_credentials(opened_invite.unpack(silo_folder / "keys"))) as connection,
            ):
                finished = run_silo(connection, worker, stop_event, log=say)
        finally:
            worker.close()
            lock.release()
        evaluate_command = f"descant silo evaluate {silo_folder} {file}"
        closing_message = (
            f"Its models are in {silo_folder / 'state'}. To see whether joining helped: {evaluate_command}"
        )
        typer.echo(closing_message if finished else "Left. The same command joins again.")


def watch_for_file(file: Path, stop_event: threading.Event) -> None:
    while not stop_event.wait(0.5):
        if file.exists():
            stop_event.set()


@app.command("evaluate")
def evaluate(
    folder: Path = SILO_FOLDER,
    file: Path = FILE,
    as_json: bool = json_option(),
) -> None:
    """Show whether joining helped; nothing is sent.

    It compares the models in FOLDER, the silo's folder, with local training of FILE on this machine, with the same work
    in the same rounds. It takes about as long as the party's own part of the training.
    """
    with handle_errors():
        from ..deployment.silo.handshake_reply import require_handshake
        from ..deployment.silo.local_comparison import compare_with_local
        from ..deployment.silo.result_files import GLOBAL_MODEL_FILE, PERSONAL_MODEL_FILE
        from ..deployment.silo.silo_file import SiloFile

        use_one_thread()
        state = folder / "state"
        table = compare_with_local(SiloFile(file, require_handshake(state)["party"]), state, show_progress(as_json))
        files = {"personal": str(state / PERSONAL_MODEL_FILE), "global_model": str(state / GLOBAL_MODEL_FILE)}
        if as_json:
            typer.echo(json.dumps({"verdict": table.verdict, "table": table.to_json_rows(), "models": files}))
        else:
            typer.echo(f"{table}\n\nThe personal model: {files['personal']}\nThe global model: {files['global_model']}")


@app.command("leave")
def leave(folder: Path = SILO_FOLDER) -> None:
    """Stop the silo that runs from FOLDER.

    It finishes its current task first.
    """
    with handle_errors():
        from ..storage.lock import lock_holder

        if not lock_holder(folder / ".lock"):
            raise SettingError(f"No silo runs from {folder}.")
        (folder / LEAVE_FILE).touch()
        typer.echo("The silo leaves after its current task.")


@app.command("forget")
def forget(
    folder: Path = SILO_FOLDER,
    local: bool = typer.Option(False, "--local", help="Remove only what is in FOLDER, and do not ask the server."),
    wait: float = typer.Option(60.0, help="Seconds to wait for the server's reply. Default: 60.", show_default=False),
    as_json: bool = json_option(),
) -> None:
    """Erase the party's state, on the server and in FOLDER.

    The server destroys the party's encrypted coreset. If it does not confirm, nothing is removed. Three things stay in
    FOLDER, so that the limits of the policy hold if the party joins again: an identifier of this machine, the rows that
    have ever left, and the rounds of the day. What models have learned stays in them.
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
            server = "it was not asked" if local else erase_on_server(folder, wait)
            removed, kept = clear_folder(folder)
        finally:
            lock.release()
        if as_json:
            typer.echo(json.dumps({"folder": str(folder), "server": server, "removed": removed, "kept": kept}))
            return
        typer.echo(f"The server: {server}.\nRemoved from {folder}: {', '.join(removed) or 'nothing, it was empty'}.")
        if kept:
            typer.echo(f"Kept, so that the limits of the policy always hold: {', '.join(kept)}.")
        if local:
            typer.echo(f"The server still has the encrypted coreset. {vault_hint}.")


def vault_forget_hint(keys: CredentialFiles) -> str:
    name = keys.party if keys.certificate.exists() else "NAME"
    return f"To destroy it in the vault, the server operator can run: descant vault forget VAULT {name}"


def erase_on_server(folder: Path, seconds: float) -> str:
    """Ask the server to destroy the party's coreset, and return its confirmation or raise with advice."""
    from ..deployment.pki.invite import CredentialFiles
    from ..deployment.silo.forget import request_erasure
    from ..deployment.silo.handshake_reply import HANDSHAKE_FILE, MACHINE_FILE, require_handshake
    from ..errors import EngineError

    state = folder / "state"
    keys = CredentialFiles(folder / "keys")
    if not (state / HANDSHAKE_FILE).exists():
        return "this folder has never connected to one, so it was not asked"
    if not keys.address.exists():
        raise SettingError(f"{folder} holds no address of the server. Join again, or forget with --local.")
    try:
        from ..deployment.flower.silo_transport import FlowerSiloTransport

        with closing(FlowerSiloTransport.from_credentials(keys)) as connection:
            return request_erasure(
                connection, (state / MACHINE_FILE).read_text(), require_handshake(state)["federation"], seconds
            )
    except EngineError as error:
        raise EngineError(
            f"{str(error).rstrip('.')}. The server has not confirmed that the coreset of {keys.party} is destroyed, so "
            f"nothing was removed from {folder}. Try again while the server runs. {vault_forget_hint(keys)}. "
            f"After that, run: descant silo forget {folder} --local"
        ) from error
