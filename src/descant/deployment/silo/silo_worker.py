"""The worker process that holds a silo's model and data, and the supervisor that restarts it.

A silo's code may raise, hang, exit or take all memory. Then this process ends, the reply says what happened to it, and
a new process takes its place. Start one with
``python -m descant.deployment.silo.silo_worker 5 team.py north folder digest vault``.
"""

from __future__ import annotations

import ctypes
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection  # only its bytes are used: nothing is unpickled
from pathlib import Path

from ...core.messages import Reply, Task
from ...engines.processes.worker_pool import describe_exit
from ...errors import EngineError, SettingError
from ...rounds.validation import printable
from ...serialization.wire import MessageBytes, pack, unpack
from ..flower.flower_connection import ConnectionRejected

REASON = "reason"
ROUNDS = "rounds"
"""The settings of a goodbye: why a party cannot take part, or how many rounds the finished training had."""
_START_TIMEOUT = 600.0  # seconds for importing the silo's file and its data
_CHECK_REQUEST = b""  # in place of a task: check the file; in place of a reply: the file is fine


class TrainingFinished(Exception):
    """Raised when the server says that the training is finished."""


class SiloWorker:
    """Supervises one worker process: starts it for the first task and again whenever it has ended."""

    def __init__(
        self,
        file: Path,
        party: str,
        folder: Path,
        log: Callable[[str], None] = print,
        recipe_digest: str = "",
        vault_fingerprint: str = "",
    ) -> None:
        self._command = [sys.executable, "-m", "descant.deployment.silo.silo_worker"]
        self._party = party
        self._log = log
        self._arguments = [str(file), party, str(folder), recipe_digest, vault_fingerprint]
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def check(self) -> None:
        """Raise if the silo's file cannot take part; nothing is sent."""
        reply, reason = self._request(_CHECK_REQUEST, _START_TIMEOUT)
        if reply != _CHECK_REQUEST:
            self.close()
            raise SettingError(f"{self._arguments[0]} was checked: {reason}." if reply is None else reply.decode())

    def answer(self, payload: MessageBytes) -> bytes:
        """Return the reply of the process, or a reply that says how it failed.

        Raise `ConnectionRejected` or `TrainingFinished` on a goodbye.
        """
        try:
            task = unpack(payload, Task)
        except EngineError as error:
            return pack(Reply(self._party, 0, "handshake", status="declined", reason=str(error)))
        if task.kind == "goodbye" and ROUNDS in task.settings:
            raise TrainingFinished(f"The training is finished after {printable(str(task.settings[ROUNDS]))} rounds.")
        if task.kind == "goodbye":
            raise ConnectionRejected(f"This party cannot take part: {printable(str(task.settings.get(REASON)))}")
        reason = ""
        for _ in range(2 if task.kind == "handshake" else 1):  # a second chance: without a handshake the party is out
            reply, reason = self._request(
                payload, max(task.deadline, _START_TIMEOUT if task.kind == "handshake" else 0.0)
            )
            if reply is not None:
                return reply
            self.close()
            self._log(f"Round {task.round}: {reason}. Starting a new one.")
        return pack(
            Reply(task.party, task.round, task.kind, status="error", reason=f"{reason}. The party's own log says more.")
        )

    def _request(self, payload: MessageBytes, timeout: float) -> tuple[bytes | None, str]:
        """Return the reply and "", or None and the reason why there is none."""
        connection = self._start()
        try:
            connection.send_bytes(payload if isinstance(payload, bytes) else payload.memory_map())
            if connection.poll(timeout):
                return connection.recv_bytes(), ""
        except (EOFError, OSError):
            return None, f"its process {self._exit_description()}"
        except ValueError as error:  # raised for a message beyond the connection's size limit
            return None, f"its reply was malformed ({error})"
        return None, f"it was ended after {timeout:g} s without a reply"

    def _start(self) -> Connection:
        if self._process is not None and self._connection is not None and self._process.poll() is None:
            return self._connection
        self.close()
        parent_socket, child_socket = socket.socketpair()
        arguments = [str(child_socket.fileno()), *self._arguments]
        self._process = subprocess.Popen(
            [*self._command, *arguments], pass_fds=[child_socket.fileno()], stdout=sys.stderr
        )
        child_socket.close()
        self._connection = Connection(parent_socket.detach())
        return self._connection

    def _exit_description(self) -> str:
        if self._process is None:
            return "is gone"
        try:
            return describe_exit(self._process.wait(10))
        except subprocess.TimeoutExpired:
            return "does not answer"

    def close(self) -> None:
        """End the worker process."""
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._process = self._connection = None


def main(
    connection: Connection, file: str, party: str, folder: str, recipe_digest: str, vault_fingerprint: str
) -> None:
    """Answer tasks until the supervisor closes the connection."""
    from ...storage import atomic
    from ...storage.lock import FolderLock
    from .console_messages import timestamped
    from .silo_file import SiloFile
    from .task_handler import TaskHandler

    atomic.make_folder(Path(folder), 0o700)
    lock = FolderLock(Path(folder) / ".lock", timeout=60.0)  # a predecessor that is about to end may still write
    silo_file = SiloFile(Path(file), party)
    handler = TaskHandler(
        silo_file,
        Path(folder),
        lambda text: print(timestamped(text), file=sys.stderr, flush=True),
        recipe_digest=recipe_digest,
        vault_fingerprint=vault_fingerprint,
    )
    while True:
        try:
            payload = connection.recv_bytes()
        except EOFError:
            return lock.release()
        connection.send_bytes(handler.answer(payload) if payload != _CHECK_REQUEST else handler.check_file().encode())


if __name__ == "__main__":
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it never outlives its supervisor
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor ends it
    main(Connection(int(sys.argv[1])), *sys.argv[2:7])
