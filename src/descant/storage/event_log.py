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

_SEAL = ',"seal":"'
_TAKEN = {"n", "at", "seal"}
_SEALED = len(_SEAL) + 32 + len('"}')


def plain(value: Any) -> Any:
    """The same, however deep, without nan and infinities, which JSON does not have.

    >>> plain({"a": [1.0, float("nan")], "b": {"c": float("-inf")}})
    {'a': [1.0, None], 'b': {'c': None}}
    """
    if isinstance(value, Mapping):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True)
class Line:
    """A line with its number, and the bytes that the log takes up to its end."""

    number: int
    seal: str
    end: int
    data: bytes = b""


START = Line(0, "", 0)


@dataclass(frozen=True)
class Lines:
    """What a log holds: its events with their seals, the bytes up to their end, and those of a torn line behind it."""

    events: tuple[dict[str, Any], ...]
    seals: tuple[str, ...]
    last: Line
    torn: int


class Log:
    """Events are kept here until :meth:`flush` puts them on the disk.

    Each step takes effect by one assignment: an interrupt between any two of them is made good by the next flush.
    """

    def __init__(self, file: Path, written: Line = START) -> None:
        self._file = file
        self.written = written  # the last line that is on the disk
        self._waiting: list[Line] = []

    def add(self, event: str, **fields: Any) -> None:
        """One more event; its number and its time come before what it says."""
        taken = sorted(fields.keys() & _TAKEN)
        if taken:
            raise SettingError(f"The event {event!r:.40} has a field {taken[0]!r}, which the log fills in. Rename it.")
        last = self._waiting[-1] if self._waiting else self.written
        at = datetime.now(UTC).isoformat("T", "milliseconds")
        try:
            text = json.dumps({"n": last.number + 1, "at": at, "event": event, **plain(fields)}, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise SettingError(
                f"The event {event!r:.40} cannot be written as JSON: {error}. "
                "Give text, numbers, or lists and mappings of them, such as float(x) of a tensor."
            ) from error
        seal = _sealed(last.seal, text)
        data = f'{text[:-1]}{_SEAL}{seal}"}}\n'.encode()
        self._waiting.append(Line(last.number + 1, seal, last.end + len(data), data))

    def flush(self) -> None:
        """All events are on the disk; if that fails they wait for the next time."""
        lines = [line for line in self._waiting if line.number > self.written.number]
        data = b"".join(line.data for line in lines)
        if self.written.number == 0:
            atomic.replace(self._file, data, f"{self._file.name}.new")
        elif data:
            atomic.append(self._file, data, self.written.end)
        if lines:
            self.written = lines[-1]
        self._waiting = []


_RUN = "Restore the file from a copy; the snapshots in models/ can still be read by Federation.load."


def read(file: Path, after: Line = START, advice: str = _RUN) -> Lines:
    """The events of a log behind a line that was read before, each checked; only the last line may be torn."""
    with file.open("rb") as stream:
        stream.seek(after.end)
        data = stream.read()
    events: list[dict[str, Any]] = []
    seals: list[str] = []
    last = after
    lines = data.split(b"\n")
    for index, line in enumerate(lines, 1):
        if index == len(lines) and not line:
            break
        number = after.number + index
        event, seal = _opened(line, last.seal)
        if event is None or event.get("n") != number or index == len(lines):
            if any(lines[index:]):
                raise StateError(
                    f"Line {number} of {file} is damaged: it does not have the seal it was written with. {advice}"
                )
            break
        events.append(event)
        seals.append(seal)
        last = Line(number, seal, last.end + len(line) + 1)
    if last == START:
        raise StateError(f"Line 1 of {file} is damaged or missing. {advice}")
    return Lines(tuple(events), tuple(seals), last, torn=after.end + len(data) - last.end)


def first(file: Path) -> dict[str, Any]:
    """The event of a log's first line; nothing if it is damaged or missing, which :func:`read` names."""
    try:
        with file.open("rb") as stream:
            return _opened(stream.readline().removesuffix(b"\n"), "")[0] or {}
    except OSError:
        return {}


def _sealed(before: str, text: str) -> str:
    return blake2b((before + text).encode(), digest_size=16).hexdigest()


def _opened(line: bytes, before: str) -> tuple[dict[str, Any] | None, str]:
    """The event in a line and its seal, or none if the line is not as it was written."""
    try:
        text = line.decode()
        event = json.loads(text)
        seal = event.pop("seal")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None, ""
    return (event, seal) if seal == _sealed(before, text[:-_SEALED] + "}") else (None, "")
