"""One process at a time on a folder. The system holds the lock for its owner: a process that died blocks nobody."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from ..errors import StateError
from .atomic import opened

_PAUSE = 0.02  # seconds between two tries
_HELD: set[int] = set()

if sys.platform != "win32":
    import fcntl

    def _take(descriptor: int, alone: bool) -> bool:
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _let_go() -> None:
        while _HELD:
            os.close(_HELD.pop())

    os.register_at_fork(after_in_child=_let_go)  # or a child that outlives its parent would hold the parent's lock

else:

    def _take(descriptor: int, alone: bool) -> bool:
        return True  # Windows has no such lock: there the user sees to it


class Lock:
    """Held from its making to :meth:`release`, or to the end of the process, however it ends.

    Its patience is how many seconds it waits for another holder; a reader that looks whether a run is alive is one for
    a moment. `then` says what can be done about one that stays.
    """

    def __init__(
        self, file: Path, patience: float = 0.2, then: str = "Wait until it has ended, or give another folder."
    ) -> None:
        self._descriptor = opened(file, os.O_RDWR | os.O_CREAT)
        until = time.monotonic() + patience
        while not _take(self._descriptor, alone=True):
            if time.monotonic() >= until:
                os.close(self._descriptor)
                raise StateError(f"{file.parent} is in use by {_owner(file)}. {then}")
            time.sleep(_PAUSE)
        _HELD.add(self._descriptor)
        about = {"pid": os.getpid(), "host": socket.gethostname(), "since": datetime.now(UTC).isoformat("T", "seconds")}
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, json.dumps(about).encode(), 0)

    def release(self) -> None:
        if self._descriptor in _HELD:
            _HELD.discard(self._descriptor)
            os.close(self._descriptor)


def holder(file: Path) -> str:
    """Who holds the lock now: "process 12 on north since …", or "" if nobody does."""
    try:
        descriptor = os.open(file, os.O_RDONLY)
    except OSError:
        return ""
    try:
        return "" if _take(descriptor, alone=False) else _owner(file)
    finally:
        os.close(descriptor)


def _owner(file: Path) -> str:
    try:
        about = json.loads(file.read_text(encoding="utf-8"))
        return f"process {about['pid']} on {about['host']} since {about['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
