"""`descant silo forget`: the server destroys what it holds of a party's rows, and the party what it has kept.

What has left stays counted here, for ever: else a party that is forgotten and joins again could lose more of its rows
than its policy lets go.
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
"""The setting of a goodbye that says that it is done; its reason says what was done."""
KEPT_FILES = (MACHINE_FILE, SHARED_ROWS_FILE, DAILY_TASKS_FILE)
"""What stays of a party's folder: by it the invite is known to be used in one place, and the policy holds."""
_RETRY_DELAY = 0.5  # seconds between two tries, or two looks for a letter


def request_erasure(connection: SiloConnection, machine_id: str, federation: str, timeout: float) -> str:
    """Ask the server to forget this party; what it says that it has done, or an error if it has not within so long."""
    stop_at = time.monotonic() + timeout
    reason = "there was no time"
    while time.monotonic() < stop_at:
        try:
            with connection.session():
                return _exchange(connection, machine_id, federation, stop_at=stop_at)
        except PeerUnavailable as error:
            reason = str(error)
        time.sleep(min(_RETRY_DELAY, max(0.0, stop_at - time.monotonic())))
    raise PeerUnavailable(f"It has not answered within {timeout:g} s: {reason}")


def _exchange(connection: SiloConnection, machine_id: str, federation: str, stop_at: float) -> str:
    """Whoever is asked who it is says that it wishes to be forgotten; other letters to it are given up by that."""
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
            if is_requested or ROUNDS in task.settings:  # else it is of a time before
                raise ConnectionRejected(message or "The training is over")
        elif task.kind == "handshake" and task.settings.get("federation") != federation:
            other = task.settings.get("federation")
            raise ConnectionRejected(f"The folder is of the federation {federation!r}, and the server of {other!r:.80}")
        elif task.kind == "handshake":
            connection.push(
                request, pack(Reply(task.party, task.round, "handshake", metrics={FORGET_REQUEST: machine_id}))
            )
            is_requested = True
        else:
            connection.push(
                request,
                pack(Reply(task.party, task.round, task.kind, status="declined", reason="it is to be forgotten")),
            )
    raise PeerUnavailable(
        "the server has not said that it was done" if is_requested else "the server has not asked who we are"
    )


def clear_folder(folder: Path) -> tuple[list[str], list[str]]:
    """Remove what a party has kept in its folder, its keys last; what was removed, and what stays."""
    files = [file for part in ("state", "keys") for file in sorted((folder / part).glob("*"))]
    removed = [file for file in files if file.name not in KEPT_FILES]
    with write_errors(folder):
        for file in removed:
            atomic.remove(file)
    names = [str(file.relative_to(folder)) for file in files]
    removed_names = {str(file.relative_to(folder)) for file in removed}
    return [name for name in names if name in removed_names], [name for name in names if name not in removed_names]
