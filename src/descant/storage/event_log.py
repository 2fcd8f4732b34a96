"""An append-only log: a line of JSON an event, numbered, each sealed with a digest of itself and of all before it.

A last line that was torn by a kill is told from a line that was damaged later: the first is cut off, the second named.
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
_HASH_FIELD_LENGTH = len(_HASH_FIELD) + 32 + len('"}')


def replace_non_finite(value: Any) -> Any:
    """The same, however deep, without nan and infinities, which JSON does not have.

    >>> plain({"a": [1.0, float("nan")], "b": {"c": float("-inf")}})
    {'a': [1.0, None], 'b': {'c': None}}
    """
    if isinstance(value, Mapping):
        return {key: replace_non_finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [replace_non_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True)
class LogLine:
    """A line with its number, and the bytes that the log takes up to its end."""

    number: int
    chain_hash: str
    end: int
    data: bytes = b""


LOG_START = LogLine(0, "", 0)


@dataclass(frozen=True)
class LogContent:
    """What a log holds: its events with their seals, the bytes up to their end, and those of a torn line behind it."""

    events: tuple[dict[str, Any], ...]
    chain_hashes: tuple[str, ...]
    last: LogLine
    torn_bytes: int


class EventLog:
    """Events are kept here until :meth:`flush` puts them on the disk.

    Each step takes effect by one assignment: an interrupt between any two of them is made good by the next flush.
    """

    def __init__(self, file: Path, last_written: LogLine = LOG_START) -> None:
        self._file = file
        self.last_written = last_written  # the last line that is on the disk
        self._pending: list[LogLine] = []

    def add(self, event: str, **fields: Any) -> None:
        """One more event; its number and its time come before what it says."""
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
        """All events are on the disk; if that fails they wait for the next time."""
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
    """The events of a log behind a line that was read before, each checked; only the last line may be torn."""
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
                    f"Line {number} of {file} is damaged: it does not have the seal it was written with. {advice}"
                )
            break
        events.append(event)
        chain_hashes.append(chain_hash)
        last = LogLine(number, chain_hash, last.end + len(line) + 1)
    if last == LOG_START:
        raise StateError(f"Line 1 of {file} is damaged or missing. {advice}")
    return LogContent(tuple(events), tuple(chain_hashes), last, torn_bytes=after.end + len(data) - last.end)


def first_event(file: Path) -> dict[str, Any]:
    """The event of a log's first line; nothing if it is damaged or missing, which :func:`read` names."""
    try:
        with file.open("rb") as stream:
            return _parse_line(stream.readline().removesuffix(b"\n"), "")[0] or {}
    except OSError:
        return {}


def _chain_hash(previous_hash: str, text: str) -> str:
    return blake2b((previous_hash + text).encode(), digest_size=16).hexdigest()


def _parse_line(line: bytes, previous_hash: str) -> tuple[dict[str, Any] | None, str]:
    """The event in a line and its seal, or none if the line is not as it was written."""
    try:
        text = line.decode()
        event = json.loads(text)
        chain_hash = event.pop("chain_hash")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None, ""
    return (
        (event, chain_hash)
        if chain_hash == _chain_hash(previous_hash, text[:-_HASH_FIELD_LENGTH] + "}")
        else (None, "")
    )
