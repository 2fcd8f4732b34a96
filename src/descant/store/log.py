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

from ..errors import StateError
from . import disk

_SEAL = ',"seal":"'
_SEALED = len(_SEAL) + 32 + len('"}')


def plain(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """The same without nan and infinities, which JSON does not have."""
    return {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in numbers.items()}


@dataclass(frozen=True)
class Lines:
    """What a log holds: its events, the bytes that they take, and the bytes of a torn last line behind them."""

    events: tuple[dict[str, Any], ...]
    size: int
    seal: str
    torn: int


class Log:
    """Events are kept here until :meth:`flush` puts them on the disk."""

    def __init__(self, file: Path, held: Lines | None = None) -> None:
        self._file = file
        self._count, self._seal = (len(held.events), held.seal) if held else (0, "")
        self._waiting: list[str] = []

    def add(self, event: str, **fields: Any) -> None:
        """One more event; its number and its time come before what it says."""
        self._count += 1
        at = datetime.now(UTC).isoformat("T", "milliseconds")
        text = json.dumps({"n": self._count, "at": at, "event": event, **plain(fields)}, allow_nan=False)
        self._seal = _sealed(self._seal, text)
        self._waiting.append(f'{text[:-1]}{_SEAL}{self._seal}"}}\n')

    def flush(self) -> None:
        """All events are on the disk; if that fails they wait for the next time."""
        data = "".join(self._waiting).encode()
        if not self._file.exists():
            disk.replace(self._file, data, f"{self._file.name}.new")
        elif data:
            disk.append(self._file, data)
        self._waiting = []


def read(file: Path) -> Lines:
    """The events of a log, each checked; only the last line may be torn."""
    data = file.read_bytes()
    events: list[dict[str, Any]] = []
    size, seal = 0, ""
    lines = data.split(b"\n")
    for number, line in enumerate(lines, 1):
        if number == len(lines) and not line:
            break
        event, found = _opened(line, seal)
        if event is None or event.get("n") != number or number == len(lines):
            if any(lines[number:]):
                raise StateError(
                    f"Line {number} of {file} is damaged: it does not have the seal it was written with. "
                    "Restore the file from a copy; the snapshots in models/ can still be read by Federation.load."
                )
            break
        events.append(event)
        size, seal = size + len(line) + 1, found
    if not events:
        raise StateError(f"{file} is empty. Restore it from a copy.")
    return Lines(tuple(events), size, seal, torn=len(data) - size)


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
