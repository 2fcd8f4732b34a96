"""`descant silo forget`: the server erases its copy of a party's rows, then the party clears its folder.

The record of shared rows stays for good. Without it a party that is forgotten and joins again could share more rows
than its policy allows.
"""

from __future__ import annotations

import time
from pathlib import Path

from ...core.messages import Reply, Task
from ...rounds.validation import printable
from ...serialization.wire import pack, unpack
from ...storage import atomic, write_errors
from ..flower.flower_connection import ConnectionRejected, PeerUnavailable
from .handshake_reply import MACHINE_FILE
from .join import SiloConnection
from .outgoing_fields import FORGET_REQUEST
from .silo_state import DAILY_TASKS_FILE, SHARED_ROWS_FILE
from .silo_worker import REASON, ROUNDS

FORGOTTEN = "forgotten"
"""The goodbye setting that confirms the erasure; the goodbye's reason says what was erased."""
KEPT_FILES = (MACHINE_FILE, SHARED_ROWS_FILE, DAILY_TASKS_FILE)
"""The files of a party's folder that stay: they tie the invite to one machine and keep the policy in force."""
_RETRY_DELAY = 0.5  # seconds between two attempts to connect


def request_erasure(connection: SiloConnection, machine_id: str, federation: str, timeout: float) -> str:
    """Ask the server to forget this party and return its confirmation; raise if there is none within the timeout."""
    stop_at = time.monotonic() + timeout
    reason = "there was no time to connect"
    while time.monotonic() < stop_at:
        try:
            with connection.session():
                return _exchange(connection, machine_id, federation, stop_at=stop_at)
        except PeerUnavailable as error:
            reason = str(error)
        time.sleep(min(_RETRY_DELAY, max(0.0, stop_at - time.monotonic())))
    raise PeerUnavailable(f"No confirmation within {timeout:g} s: {reason}")


def _exchange(connection: SiloConnection, machine_id: str, federation: str, stop_at: float) -> str:
    """Answer the handshake with the request to be forgotten, decline other tasks, and await the confirmation."""
    is_requested = False
    while time.monotonic() < stop_at:
        received = connection.pull()
        if received is None:
            time.sleep(_RETRY_DELAY / 5)
            continue
        request, payload = received
        task = unpack(payload, Task)
        if task.kind == "goodbye":
            message = printable(str(task.settings.get(REASON, "")))
            if FORGOTTEN in task.settings:
                return message
            if is_requested or ROUNDS in task.settings:  # otherwise it belongs to an earlier session
                raise ConnectionRejected(message or "The training is over")
        elif task.kind == "handshake" and task.settings.get("federation") != federation:
            other = task.settings.get("federation")
            message = f"The folder belongs to the federation {federation!r}, the server to {other!r:.80}"
            raise ConnectionRejected(message)
        elif task.kind == "handshake":
            connection.push(
                request, pack(Reply(task.party, task.round, "handshake", metrics={FORGET_REQUEST: machine_id}))
            )
            is_requested = True
        else:
            connection.push(
                request,
                pack(
                    Reply(task.party, task.round, task.kind, status="declined", reason="the party asks to be forgotten")
                ),
            )
    raise PeerUnavailable(
        "the server has not confirmed the erasure" if is_requested else "the server has sent no handshake"
    )


def clear_folder(folder: Path) -> tuple[list[str], list[str]]:
    """Remove a party's state, then its keys; return the names of removed and of kept files."""
    files = [file for part in ("state", "keys") for file in sorted((folder / part).glob("*"))]
    removed = [file for file in files if file.name not in KEPT_FILES]
    with write_errors(folder):
        for file in removed:
            atomic.remove(file)
    names = [str(file.relative_to(folder)) for file in files]
    removed_names = {str(file.relative_to(folder)) for file in removed}
    return [name for name in names if name in removed_names], [name for name in names if name not in removed_names]
