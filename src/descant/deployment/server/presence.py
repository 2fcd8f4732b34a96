"""Who is there: noted while the server runs, for `descant server status`, which may ask when it does not."""

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
_WRITE_INTERVAL = 10.0  # seconds after which it is written though nothing has changed but the time
_CONNECTED = "connected"
_DISCONNECTED = "disconnected"
_LEFT = "left"
_FINISHED = "finished"  # it was told that the training is over, and has its models


@dataclass(frozen=True)
class PresenceRecord:
    """A party, as it was last seen."""

    presence: str
    last_seen: str  # when it was last there, in UTC


class PresenceRecorder:
    """A post that notes in a folder who is there; a note that cannot be written ends nothing."""

    def __init__(self, transport: ServerTransport, folder: Path) -> None:
        self._transport = transport
        self._folder = folder
        self._last_written = -math.inf
        self._records = {
            name: PresenceRecord(_absence_state(one), one.last_seen) for name, one in read_presence(folder).items()
        }
        self._write()

    def connected_parties(self) -> Mapping[str, str]:
        """Who can be reached now."""
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
            atomic.replace(self._folder / _PRESENCE_FILE, text, f".{_PRESENCE_FILE}", atomic.PRIVATE_MODE)

    def departed_parties(self) -> Collection[str]:
        return self._transport.departed_parties()

    def send(self, party: str, payload: MessageBytes, ttl: float) -> str:
        return self._transport.send(party, payload, ttl)

    def fetch_replies(self, message_ids: Collection[str], max_bytes: int) -> dict[str, MessageBytes | UndeliveredError]:
        return self._transport.fetch_replies(message_ids, max_bytes)

    def discard(self, message_ids: Collection[str]) -> None:
        self._transport.discard(message_ids)


def _absence_state(record: PresenceRecord) -> str:
    """What a party is when it is not there: who has left has, until it comes again."""
    return record.presence if record.presence == _LEFT else _DISCONNECTED


def _presence_states(records: Mapping[str, PresenceRecord]) -> dict[str, str]:
    return {name: one.presence for name, one in records.items()}


def read_presence(folder: Path) -> dict[str, PresenceRecord]:
    """Who was ever there, as a server's folder for runs has it; nobody where it cannot be read."""
    with suppress(OSError, ValueError, TypeError, AttributeError):
        return {name: PresenceRecord(**one) for name, one in json.loads((folder / _PRESENCE_FILE).read_text()).items()}
    return {}


def connected_in(folder: Path) -> set[str]:
    """Who of them was there when that was last noted."""
    return {name for name, one in read_presence(folder).items() if one.presence == _CONNECTED}


def party_statuses(roster: Roster, is_running: bool) -> dict[str, dict[str, str | None]]:
    """Each party of a roster: where it is now, if the server runs, or was last; and when it was last heard of."""
    records = read_presence(roster.run_folder)
    notified = read_notified(roster.run_folder)
    return {
        one.name: _party_status(one, records.get(one.name), is_running, is_finished=one.name in notified)
        for one in roster.parties()
    }


def _party_status(
    entry: RosterEntry, record: PresenceRecord | None, running: bool, is_finished: bool
) -> dict[str, str | None]:
    if entry.state != "joined":  # by this invite it has never come, or comes no more
        return {"presence": entry.state, "last_seen": record.last_seen if record and entry.state == "revoked" else None}
    record = record or PresenceRecord(_DISCONNECTED, entry.since)
    presence = f"was {_CONNECTED}" if record.presence == _CONNECTED and not running else record.presence
    return {"presence": _FINISHED if is_finished else presence, "last_seen": record.last_seen}
