"""The main loop of a silo: fetch tasks, let the worker answer them, reconnect after every outage."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, Protocol

from ...core.messages import Reply
from ...errors import SettingError
from ...serialization.wire import MessageBytes, unpack
from ..flower.flower_connection import HEARTBEAT_INTERVAL, ConnectionRejected, PeerUnavailable, SessionInUse
from ..pki.invite import CredentialFiles, Invite
from .console_messages import OutageReporter, format_duration
from .handshake_reply import read_handshake
from .silo_state import RETRY_AFTER
from .silo_worker import SiloWorker, TrainingFinished

_MIN_POLL_INTERVAL = 0.05
_MAX_POLL_INTERVAL = 1.0  # seconds between two polls for a task
_MAX_PAUSE_REPLY_BYTES = 2**14  # only replies this short can ask for a pause: longer ones carry a model
_MAX_RETRY_DELAY = 30.0  # seconds between two attempts to join
_SESSION_CONFLICT_TIMEOUT = 4 * HEARTBEAT_INTERVAL  # seconds; our own previous session expires sooner

_USED_ELSEWHERE = (
    "This invite is in use in another place, which is connected now. Stop that one (descant silo leave). If it is not "
    "yours, tell the server operator, who can revoke the invite and make a new one."
)


class SiloConnection(Protocol):
    """A silo's end of a transport, such as `FlowerSiloTransport`."""

    def session(self) -> AbstractContextManager[None]: ...
    def pull(self) -> tuple[Any, MessageBytes] | None: ...
    def push(self, request: Any, payload: bytes) -> None: ...


def check_folder_owner(folder: Path, invite: Invite) -> None:
    """Raise if a silo's folder belongs to another party or federation than the invite."""
    credentials = CredentialFiles(folder / "keys")
    handshake = read_handshake(folder / "state") or {}
    identities = [handshake] if handshake else []
    with suppress(OSError, ValueError):  # missing or damaged: they are written again
        identities.append({"party": credentials.party, "federation": credentials.federation})
    for field_name, expected in (("party", invite.party), ("federation", invite.federation)):
        for identity in identities:
            if identity[field_name] != expected:
                raise SettingError(
                    f"{folder} belongs to the {field_name} {identity[field_name]!r}, and the invite is for "
                    f"{expected!r}. Nothing was changed there. Give another folder: --folder NEW"
                )


def run_silo(
    connection: SiloConnection, worker: SiloWorker, stop: threading.Event, log: Callable[[str], None] = print
) -> bool:
    """Answer tasks until `stop` is set (return False) or the training is finished (return True).

    Raise `ConnectionRejected` if the server rejects the party. A party that has used up its rounds for the day
    disconnects until the next day.
    """
    delay = 1.0
    outage = OutageReporter(log)
    in_use_since = math.inf
    while not stop.is_set():
        rest = 0.0
        try:
            with connection.session():
                log(f"Joined.{outage.end_outage()} Waiting for work; Ctrl-C leaves.")
                delay = 1.0
                rest = _answer_tasks(connection, worker, stop)
                if rest:
                    log(f"All rounds of today are done. Reconnecting in {format_duration(rest)}.")
        except PeerUnavailable as why:
            outage.report_failure(str(why))
            in_use_since = min(in_use_since, time.monotonic()) if isinstance(why, SessionInUse) else math.inf
            if time.monotonic() - in_use_since > _SESSION_CONFLICT_TIMEOUT:
                raise ConnectionRejected(_USED_ELSEWHERE) from why
        except TrainingFinished as end:
            log(str(end))
            return True
        stop.wait(rest or delay)
        delay = min(_MAX_RETRY_DELAY, 2 * delay)
    return False


def _answer_tasks(connection: SiloConnection, worker: SiloWorker, stop: threading.Event) -> float:
    """Answer tasks one by one; return the seconds to pause when a daily limit is reached."""
    pause = _MIN_POLL_INTERVAL
    while not stop.is_set():
        received = connection.pull()
        if received is None:
            stop.wait(pause)
            pause = min(_MAX_POLL_INTERVAL, 1.5 * pause)
            continue
        rest = _answer_task(connection, worker, *received)
        received = None  # free the payload before the next one arrives
        pause = _MIN_POLL_INTERVAL
        if rest:
            return rest
    return 0.0


def _answer_task(connection: SiloConnection, worker: SiloWorker, request: Any, payload: MessageBytes) -> float:
    """Answer one task; return the seconds to pause afterwards."""
    reply = worker.answer(payload)
    connection.push(request, reply)
    rest = unpack(reply, Reply).metrics.get(RETRY_AFTER) if len(reply) < _MAX_PAUSE_REPLY_BYTES else None
    return float(rest or 0.0)
