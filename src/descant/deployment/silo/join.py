"""A silo takes part: it fetches letters, lets its worker answer them, and comes back whenever the line was down."""

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
_MAX_POLL_INTERVAL = 1.0  # seconds between two looks for a letter
_MAX_PAUSE_REPLY_BYTES = 2**14  # bytes of an answer that may say that the party rests
_MAX_RETRY_DELAY = 30.0  # seconds between two tries to join
_SESSION_CONFLICT_TIMEOUT = (
    4 * HEARTBEAT_INTERVAL
)  # seconds: whoever holds a place for longer is not the party from before

_USED_ELSEWHERE = (
    "This invite is in use in another place, which takes part by it now. Stop that one (descant silo leave); if it is "
    "not yours, tell the organiser, who can revoke the invite and make a new one."
)


class SiloConnection(Protocol):
    """A silo's end of a post, such as `spoke.Spoke`."""

    def session(self) -> AbstractContextManager[None]: ...
    def pull(self) -> tuple[Any, MessageBytes] | None: ...
    def push(self, request: Any, payload: bytes) -> None: ...


def check_folder_owner(folder: Path, invite: Invite) -> None:
    """Raise if a silo's folder is of another party, or of another federation, than an invite is for."""
    credentials = CredentialFiles(folder / "keys")
    handshake = read_handshake(folder / "state") or {}
    identities = [handshake] if handshake else []
    with suppress(OSError, ValueError):  # none, or damaged: they are written anew
        identities.append({"party": credentials.party, "federation": credentials.federation})
    for field_name, expected in (("party", invite.party), ("federation", invite.federation)):
        for identity in identities:
            if identity[field_name] != expected:
                raise SettingError(
                    f"{folder} is of the {field_name} {identity[field_name]!r}, and the invite is for {expected!r}. Nothing was changed "
                    f"there. Give another folder: --folder NEW"
                )


def run_silo(
    connection: SiloConnection, worker: SiloWorker, stop: threading.Event, log: Callable[[str], None] = print
) -> bool:
    """Answer letters until it is over, or the training is: whether it is the training. `TurnedAway` if nobody asks.

    A party that has had its rounds for the day is not there until the next.
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
                    log(f"It has had its rounds for today, and comes back in {format_duration(rest)}.")
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
    """Letter by letter; how many seconds the party rests before the next."""
    pause = _MIN_POLL_INTERVAL
    while not stop.is_set():
        received = connection.pull()
        if received is None:
            stop.wait(pause)
            pause = min(_MAX_POLL_INTERVAL, 1.5 * pause)
            continue
        rest = _answer_task(connection, worker, *received)
        received = None
        pause = _MIN_POLL_INTERVAL  # a letter is not kept until the next has come
        if rest:
            return rest
    return 0.0


def _answer_task(connection: SiloConnection, worker: SiloWorker, request: Any, payload: MessageBytes) -> float:
    """One letter; how many seconds the party rests then."""
    reply = worker.answer(payload)
    connection.push(request, reply)
    rest = unpack(reply, Reply).metrics.get(RETRY_AFTER) if len(reply) < _MAX_PAUSE_REPLY_BYTES else None
    return float(rest or 0.0)
