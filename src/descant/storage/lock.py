"""An exclusive lock on a folder. The operating system releases it when its process dies."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from ..errors import StateError
from .atomic import open_no_follow

_RETRY_INTERVAL = 0.02  # seconds between two tries
_HELD_DESCRIPTORS: set[int] = set()

if sys.platform != "win32":
    import fcntl

    def _try_lock(descriptor: int, exclusive: bool) -> bool:
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _close_inherited() -> None:
        while _HELD_DESCRIPTORS:
            os.close(_HELD_DESCRIPTORS.pop())

    # Without this, a child that outlives its parent would keep the parent's lock.
    os.register_at_fork(after_in_child=_close_inherited)

else:

    def _try_lock(descriptor: int, exclusive: bool) -> bool:
        return True  # Windows has no flock: the user must start one process only


class FolderLock:
    """A lock held from its creation until :meth:`release` or the end of the process.

    `timeout` is how many seconds it waits for another holder: a reader that checks whether a run is alive holds the
    lock for a moment. `advice` ends the error message when the other holder stays.
    """

    def __init__(
        self, file: Path, timeout: float = 0.2, advice: str = "Wait until it has ended, or give another folder."
    ) -> None:
        self._descriptor = open_no_follow(file, os.O_RDWR | os.O_CREAT)
        deadline = time.monotonic() + timeout
        while not _try_lock(self._descriptor, exclusive=True):
            if time.monotonic() >= deadline:
                os.close(self._descriptor)
                raise StateError(f"{file.parent} is in use by {_describe_owner(file)}. {advice}")
            time.sleep(_RETRY_INTERVAL)
        _HELD_DESCRIPTORS.add(self._descriptor)
        owner_info = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "since": datetime.now(UTC).isoformat("T", "seconds"),
        }
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, json.dumps(owner_info).encode(), 0)

    def release(self) -> None:
        if self._descriptor in _HELD_DESCRIPTORS:
            _HELD_DESCRIPTORS.discard(self._descriptor)
            os.close(self._descriptor)


def lock_holder(file: Path) -> str:
    """Return a description of the lock's holder ("process 12 on north since …"), or "" if it is free."""
    try:
        descriptor = os.open(file, os.O_RDONLY)
    except OSError:
        return ""
    try:
        return "" if _try_lock(descriptor, exclusive=False) else _describe_owner(file)
    finally:
        os.close(descriptor)


def _describe_owner(file: Path) -> str:
    try:
        owner_info = json.loads(file.read_text(encoding="utf-8"))
        return f"process {owner_info['pid']} on {owner_info['host']} since {owner_info['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
