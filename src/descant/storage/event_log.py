"""An append-only log with one numbered JSON event per line, chained by hashes.

Each line carries a hash of itself and of all lines before it. A last line that a kill cut short is removed. A line that
was damaged later is an error that names it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import blake2b
from pathlib import Path
from typing import Any

from ..errors import SettingError, StateError
from . import atomic

_HASH_FIELD = ',"chain_hash":"'
_RESERVED_FIELDS = {"n", "at", "chain_hash"}
_EARLIER_HASH_FIELD = b',"seal":"'  # of an earlier version of Descant
_HASH_FIELD_LENGTH = len(_HASH_FIELD) + 32 + len('"}')


def replace_non_finite(value: Any) -> Any:
    """Return the value with None in place of nan and infinities, at any depth: JSON has no such numbers.

    >>> replace_non_finite({"a": [1.0, float("nan")], "b": {"c": float("-inf")}})
    {'a': [1.0, None], 'b': {'c': None}}
    """
    if isinstance(value, Mapping):
        return {key: replace_non_finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [replace_non_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True)
class LogLine:
    """A line of the log: its number, its chain hash, and the size of the log up to its end."""

    number: int
    chain_hash: str
    end: int
    data: bytes = b""


LOG_START = LogLine(0, "", 0)


@dataclass(frozen=True)
class LogContent:
    """The content of a log: events with their chain hashes, the last whole line, and the bytes of a torn line."""

    events: tuple[dict[str, Any], ...]
    chain_hashes: tuple[str, ...]
    last: LogLine
    torn_bytes: int


class EventLog:
    """Writer of an event log; events wait in memory until :meth:`flush` writes them to disk.

    Each step takes effect by one assignment, so the next flush repairs an interrupt between any two of them.
    """

    def __init__(self, file: Path, last_written: LogLine = LOG_START) -> None:
        self._file = file
        self.last_written = last_written  # the last line that is on the disk
        self._pending: list[LogLine] = []

    def add(self, event: str, **fields: Any) -> None:
        """Add an event; the log fills in its number and its time."""
        reserved = sorted(fields.keys() & _RESERVED_FIELDS)
        if reserved:
            raise SettingError(
                f"The event {event!r:.40} has a field {reserved[0]!r}, which the log fills in. Rename it."
            )
        last = self._pending[-1] if self._pending else self.last_written
        at = datetime.now(UTC).isoformat("T", "milliseconds")
        try:
            text = json.dumps(
                {"n": last.number + 1, "at": at, "event": event, **replace_non_finite(fields)}, allow_nan=False
            )
        except (TypeError, ValueError, RecursionError) as error:
            raise SettingError(
                f"The event {event!r:.40} cannot be written as JSON: {error}. "
                "Give text, numbers, or lists and mappings of them, such as float(x) of a tensor."
            ) from error
        chain_hash = _chain_hash(last.chain_hash, text)
        data = f'{text[:-1]}{_HASH_FIELD}{chain_hash}"}}\n'.encode()
        self._pending.append(LogLine(last.number + 1, chain_hash, last.end + len(data), data=data))

    def flush(self) -> None:
        """Write all pending events to disk; if that fails, the next flush writes them."""
        lines = [line for line in self._pending if line.number > self.last_written.number]
        data = b"".join(line.data for line in lines)
        if self.last_written.number == 0:
            atomic.replace(self._file, data, f"{self._file.name}.new")
        elif data:
            atomic.append(self._file, data, self.last_written.end)
        if lines:
            self.last_written = lines[-1]
        self._pending = []


_RUN_ADVICE = "Restore the file from a copy; the snapshots in models/ can still be read by Federation.load."


def read_log(file: Path, after: LogLine = LOG_START, advice: str = _RUN_ADVICE) -> LogContent:
    """Read and check the events after a line that was read before; only the last line may be torn."""
    with file.open("rb") as stream:
        stream.seek(after.end)
        data = stream.read()
    events: list[dict[str, Any]] = []
    chain_hashes: list[str] = []
    last = after
    lines = data.split(b"\n")
    for index, line in enumerate(lines, 1):
        if index == len(lines) and not line:
            break
        number = after.number + index
        event, chain_hash = _parse_line(line, last.chain_hash)
        if event is None or event.get("n") != number or index == len(lines):
            if any(lines[index:]):
                raise StateError(
                    f"Line {number} of {file} is damaged: its chain hash is not the one it was written with. {advice}"
                )
            break
        events.append(event)
        chain_hashes.append(chain_hash)
        last = LogLine(number, chain_hash, last.end + len(line) + 1)
    if last == LOG_START and _EARLIER_HASH_FIELD in lines[0]:
        raise StateError(earlier_version_message(file))
    if last == LOG_START:
        raise StateError(f"Line 1 of {file} is damaged or missing. {advice}")
    return LogContent(tuple(events), tuple(chain_hashes), last, torn_bytes=after.end + len(data) - last.end)


def earlier_version_message(file: Path) -> str:
    """Return the sentence for a file that an earlier version of Descant wrote."""
    return (
        f"{file} was written by an earlier version of Descant, which this version cannot read. "
        "Use the version that wrote it, or start again in a new folder."
    )


def first_event(file: Path) -> dict[str, Any]:
    """Return the event in the first line of a log; empty if it is damaged or missing (see :func:`read_log`)."""
    try:
        with file.open("rb") as stream:
            return _parse_line(stream.readline().removesuffix(b"\n"), "")[0] or {}
    except OSError:
        return {}


def _chain_hash(previous_hash: str, text: str) -> str:
    return blake2b((previous_hash + text).encode(), digest_size=16).hexdigest()


def _parse_line(line: bytes, previous_hash: str) -> tuple[dict[str, Any] | None, str]:
    """Return the event and the chain hash of a line, or None and "" if the line is damaged."""
    try:
        text = line.decode()
        event = json.loads(text)
        chain_hash = event.pop("chain_hash")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None, ""
    if chain_hash != _chain_hash(previous_hash, text[:-_HASH_FIELD_LENGTH] + "}"):
        return None, ""
    return event, chain_hash
