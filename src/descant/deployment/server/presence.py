"""Presence of parties, recorded while the server runs, so that `descant server status` can read it at any time."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from ...engines.remote import ServerTransport, UndeliveredError
from ...serialization.wire import MessageBytes
from ...storage import atomic
from ..pki.roster import Roster, RosterEntry
from .training_session import read_notified

_PRESENCE_FILE = "presence.json"
_WRITE_INTERVAL = 10.0  # seconds after which the file is rewritten for the times alone
_CONNECTED = "connected"
_DISCONNECTED = "disconnected"
_LEFT = "left"
_FINISHED = "finished"  # it was notified of the end of the training and has its models


@dataclass(frozen=True)
class PresenceRecord:
    """The last known presence of a party."""

    presence: str
    last_seen: str  # UTC


class PresenceRecorder:
    """A transport that records the presence of parties in a folder; a failed write is ignored."""

    def __init__(self, transport: ServerTransport, folder: Path) -> None:
        self._transport = transport
        self._folder = folder
        self._last_written = -math.inf
        self._records = {
            name: PresenceRecord(_absence_state(one), one.last_seen) for name, one in read_presence(folder).items()
        }
        self._write()

    def connected_parties(self) -> Mapping[str, str]:
        """Return the connected parties, and record them."""
        sessions = self._transport.connected_parties()
        departed = self._transport.departed_parties()
        before = self._records
        now = datetime.now(UTC).isoformat("T", "seconds")
        absent = {
            name: PresenceRecord(_LEFT if name in departed else _absence_state(one), one.last_seen)
            for name, one in before.items()
        }
        self._records = {**absent, **{name: PresenceRecord(_CONNECTED, now) for name in sessions}}
        if (
            _presence_states(before) != _presence_states(self._records)
            or time.monotonic() > self._last_written + _WRITE_INTERVAL
        ):
            self._write()
        return sessions

    def _write(self) -> None:
        self._last_written = time.monotonic()
        text = json.dumps({name: asdict(one) for name, one in self._records.items()}).encode()
        with suppress(OSError):
            atomic.replace(self._folder / _PRESENCE_FILE, text, f".{_PRESENCE_FILE}", mode=atomic.PRIVATE_MODE)

    def departed_parties(self) -> Collection[str]:
        return self._transport.departed_parties()

    def send(self, party: str, payload: MessageBytes, ttl: float) -> str:
        return self._transport.send(party, payload, ttl)

    def fetch_replies(self, message_ids: Collection[str], max_bytes: int) -> dict[str, MessageBytes | UndeliveredError]:
        return self._transport.fetch_replies(message_ids, max_bytes)

    def discard(self, message_ids: Collection[str]) -> None:
        self._transport.discard(message_ids)


def _absence_state(record: PresenceRecord) -> str:
    """Return the state of a party that is not connected: one that has left stays "left" until it reconnects."""
    return record.presence if record.presence == _LEFT else _DISCONNECTED


def _presence_states(records: Mapping[str, PresenceRecord]) -> dict[str, str]:
    return {name: one.presence for name, one in records.items()}


def read_presence(folder: Path) -> dict[str, PresenceRecord]:
    """Read the presence of all parties ever seen; empty if the file cannot be read."""
    with suppress(OSError, ValueError, TypeError, AttributeError):
        return {name: PresenceRecord(**one) for name, one in json.loads((folder / _PRESENCE_FILE).read_text()).items()}
    return {}


def connected_in(folder: Path) -> set[str]:
    """Return the parties that were connected at the last record."""
    return {name for name, one in read_presence(folder).items() if one.presence == _CONNECTED}


def party_statuses(roster: Roster, is_running: bool) -> dict[str, dict[str, str | None]]:
    """Return each party's presence, now or when the server last ran, and when it was last seen."""
    records = read_presence(roster.run_folder)
    notified = read_notified(roster.run_folder)
    return {
        one.name: _party_status(one, records.get(one.name), is_running, is_finished=one.name in notified)
        for one in roster.parties()
    }


def _party_status(
    entry: RosterEntry, record: PresenceRecord | None, running: bool, is_finished: bool
) -> dict[str, str | None]:
    if entry.state != "joined":  # it has never joined by this invite, or was revoked
        return {"presence": entry.state, "last_seen": record.last_seen if record and entry.state == "revoked" else None}
    record = record or PresenceRecord(_DISCONNECTED, entry.since)
    presence = f"was {_CONNECTED}" if record.presence == _CONNECTED and not running else record.presence
    return {"presence": _FINISHED if is_finished else presence, "last_seen": record.last_seen}
