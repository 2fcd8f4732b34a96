"""A child process that ends with its parent, however the parent ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

_POLL_INTERVAL = 0.02  # seconds between two polls
# Linux sends the signal when the parent thread is gone. The check of getppid covers a parent that ended before prctl.
_DIE_WITH_PARENT_CODE = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() == int(sys.argv[1]): os.execv(sys.argv[2], sys.argv[2:])
"""


class ChildProcess:
    """A process in a session of its own, so that Ctrl-C reaches only the parent; a context manager.

    On Linux it gets SIGTERM when the thread that started it ends, even if the parent is killed by SIGKILL. So start it
    from a thread that lasts. On other systems, and if the program has setuid or file capabilities, it survives a
    SIGKILL of the parent.
    """

    def __init__(
        self, command: Sequence[str], log: Path, folder: Path | None = None, env: Mapping[str, str] | None = None
    ) -> None:
        launcher = (
            [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT_CODE, str(os.getpid())]
            if sys.platform == "linux"
            else []
        )
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                [*launcher, *command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                cwd=folder,
                env=None if env is None else dict(env),
                start_new_session=True,
            )
        self._ended = False

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Return True while it runs. On Linux its pid stays reserved until `terminate`, so signals cannot go astray."""
        if self._ended or sys.platform != "linux":
            return self._process.poll() is None
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def send_signal(self, signal_number: int) -> None:
        if self.is_alive:
            os.kill(self.pid, signal_number)

    def terminate(self, timeout: float = 5.0) -> int:
        """Send SIGTERM, wait up to `timeout` seconds, kill the whole session, and return the exit status."""
        if not self._ended:
            self.send_signal(signal.SIGTERM)
            stop_at = time.monotonic() + timeout
            while self.is_alive and time.monotonic() < stop_at:
                time.sleep(_POLL_INTERVAL)
            with suppress(ProcessLookupError, PermissionError):  # macOS raises PermissionError for ended processes
                os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()
            self._ended = True
        return self._process.returncode

    def __enter__(self) -> ChildProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.terminate()
