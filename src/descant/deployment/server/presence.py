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

from ...engines.remote import Lost, Post
from ...serialization.wire import Letter
from ...storage import atomic
from ..pki.roster import Entry, Roster
from .training_session import parted_in

_SEEN = "attendance.json"
_EVERY = 10.0  # seconds after which it is written though nothing has changed but the time
_THERE, _AWAY, _LEFT = "there", "away", "left"
_DONE = "done"  # it was told that the training is over, and has its models


@dataclass(frozen=True)
class Seen:
    """A party, as it was last seen."""

    now: str
    heard: str  # when it was last there, in UTC


class Noting:
    """A post that notes in a folder who is there; a note that cannot be written ends nothing."""

    def __init__(self, post: Post, folder: Path) -> None:
        self._post, self._folder, self._noted = post, folder, -math.inf
        self._seen = {name: Seen(_left_or_away(one), one.heard) for name, one in seen_in(folder).items()}
        self._note()

    def here(self) -> Mapping[str, str]:
        """Who can be reached now."""
        found, left, before = self._post.here(), self._post.left(), self._seen
        at = datetime.now(UTC).isoformat("T", "seconds")
        gone = {name: Seen(_LEFT if name in left else _left_or_away(one), one.heard) for name, one in before.items()}
        self._seen = {**gone, **{name: Seen(_THERE, at) for name in found}}
        if _states(before) != _states(self._seen) or time.monotonic() > self._noted + _EVERY:
            self._note()
        return found

    def _note(self) -> None:
        self._noted = time.monotonic()
        text = json.dumps({name: asdict(one) for name, one in self._seen.items()}).encode()
        with suppress(OSError):
            atomic.replace(self._folder / _SEEN, text, f".{_SEEN}", atomic.PRIVATE)

    def left(self) -> Collection[str]:
        return self._post.left()

    def send(self, party: str, letter: Letter, seconds: float) -> str:
        return self._post.send(party, letter, seconds)

    def fetch(self, numbers: Collection[str], most: int) -> dict[str, Letter | Lost]:
        return self._post.fetch(numbers, most)

    def drop(self, numbers: Collection[str]) -> None:
        self._post.drop(numbers)


def _left_or_away(one: Seen) -> str:
    """What a party is when it is not there: who has left has, until it comes again."""
    return one.now if one.now == _LEFT else _AWAY


def _states(seen: Mapping[str, Seen]) -> dict[str, str]:
    return {name: one.now for name, one in seen.items()}


def seen_in(folder: Path) -> dict[str, Seen]:
    """Who was ever there, as a server's folder for runs has it; nobody where it cannot be read."""
    with suppress(OSError, ValueError, TypeError, AttributeError):
        return {name: Seen(**one) for name, one in json.loads((folder / _SEEN).read_text()).items()}
    return {}


def there_in(folder: Path) -> set[str]:
    """Who of them was there when that was last noted."""
    return {name for name, one in seen_in(folder).items() if one.now == _THERE}


def whereabouts(roster: Roster, running: bool) -> dict[str, dict[str, str | None]]:
    """Each party of a roster: where it is now, if the server runs, or was last; and when it was last heard of."""
    seen, parted = seen_in(roster.run), parted_in(roster.run)
    return {one.name: _of(one, seen.get(one.name), running, one.name in parted) for one in roster.parties()}


def _of(entry: Entry, one: Seen | None, running: bool, is_done: bool) -> dict[str, str | None]:
    if entry.state != "joined":  # by this invite it has never come, or comes no more
        return {"now": entry.state, "heard": one.heard if one and entry.state == "revoked" else None}
    one = one or Seen(_AWAY, entry.since)
    now = f"was {_THERE}" if one.now == _THERE and not running else one.now
    return {"now": _DONE if is_done else now, "heard": one.heard}
