"""A process that ends with the one that started it, however that one ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

_POLL_INTERVAL = 0.02  # seconds between two looks
# Linux sends the signal when the thread that started the process is gone: the third line is for one that was too quick.
_DIE_WITH_PARENT_CODE = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() == int(sys.argv[1]): os.execv(sys.argv[2], sys.argv[2:])
"""


class ChildProcess:
    """A process with all that it starts, in a session of its own, so that Ctrl-C is for us; use it in a `with`.

    On Linux it gets SIGTERM when the thread that has started it is gone, even by SIGKILL: so start it from one that
    lasts. Elsewhere, and where its program has rights of its own (setuid, file capabilities), it outlives a SIGKILL.
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
        """Whether it still runs. On Linux its number stays taken until :meth:`end`: no other gets its signals."""
        if self._ended or sys.platform != "linux":
            return self._process.poll() is None
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def send_signal(self, signal_number: int) -> None:
        """Send it a signal."""
        if self.is_alive:
            os.kill(self.pid, signal_number)

    def terminate(self, timeout: float = 5.0) -> int:
        """Ask it to end, wait so many seconds, then end it and whatever it has started; it gives the exit status."""
        if not self._ended:
            self.send_signal(signal.SIGTERM)
            stop_at = time.monotonic() + timeout
            while self.is_alive and time.monotonic() < stop_at:
                time.sleep(_POLL_INTERVAL)
            with suppress(ProcessLookupError, PermissionError):  # macOS says the latter of processes that have ended
                os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()
            self._ended = True
        return self._process.returncode

    def __enter__(self) -> ChildProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.terminate()
