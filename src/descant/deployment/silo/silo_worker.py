"""The process that holds a team's model, data and memory warm, and whoever looks after it.

A team's code may raise, hang, exit or take all memory: then this process ends, the letter is answered by what happened
to it, and a new one takes its place. Start one with
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

from ...core.messages import Report, Task
from ...engines.processes.worker_pool import fate
from ...errors import EngineError, SettingError
from ...rounds.validation import plain
from ...serialization.wire import Letter, pack, unpack
from ..flower.flower_connection import TurnedAway

REASON, ROUNDS = "reason", "rounds"
"""What a goodbye says: why a party cannot take part, or how many rounds the training had, now that it is over."""
_STARTING = 600.0  # seconds that a team's file has to be read
_FIT = b""  # in place of a letter: can the file take part? In place of an answer: it can


class Over(Exception):
    """There is nothing more to do."""


class Worker:
    """One such process, started when the first letter comes and again when it has ended."""

    def __init__(
        self,
        file: Path,
        party: str,
        folder: Path,
        say: Callable[[str], None] = print,
        agreed: str = "",
        vault: str = "",
    ) -> None:
        self._command = [sys.executable, "-m", "descant.deployment.silo.silo_worker"]
        self._party, self._say = party, say
        self._arguments = [str(file), party, str(folder), agreed, vault]
        self._process: subprocess.Popen[bytes] | None = None
        self._line: Connection | None = None

    def check(self) -> None:
        """Raise if the team's file cannot take part, before anybody is told that it wants to."""
        found, why = self._asked(_FIT, _STARTING)
        if found != _FIT:
            self.close()
            raise SettingError(f"{self._arguments[0]} was tried: {why}." if found is None else found.decode())

    def answer(self, letter: Letter) -> bytes:
        """What the process answers, or what became of it; `TurnedAway` or `Over` if nobody asks any more."""
        try:
            task = unpack(letter, Task)
        except EngineError as error:
            return pack(Report(self._party, 0, "hello", "refused", reason=str(error)))
        if task.kind == "goodbye" and ROUNDS in task.settings:
            raise Over(f"The training is over after {plain(str(task.settings[ROUNDS]))} rounds.")
        if task.kind == "goodbye":
            raise TurnedAway(f"This party cannot take part: {plain(str(task.settings.get(REASON)))}")
        why = ""
        for _ in range(2 if task.kind == "hello" else 1):  # whoever dies over its introduction would not be let in
            found, why = self._asked(letter, max(task.deadline, _STARTING if task.kind == "hello" else 0.0))
            if found is not None:
                return found
            self.close()
            self._say(f"Round {task.round}: {why}. A new one is started.")
        return pack(Report(task.party, task.round, task.kind, "error", reason=f"{why}. The party's own log says more."))

    def _asked(self, letter: Letter, seconds: float) -> tuple[bytes | None, str]:
        """What the process says, or why it says nothing."""
        line = self._started()
        try:
            line.send_bytes(letter if isinstance(letter, bytes) else letter.mapped())
            if line.poll(seconds):
                return line.recv_bytes(), ""
        except (EOFError, OSError):
            return None, f"its process {self._fate()}"
        except ValueError as error:  # what a connection says of a message that is longer than it may be
            return None, f"its answer was no answer ({error})"
        return None, f"it has worked for {seconds:g} s, and was ended"

    def _started(self) -> Connection:
        if self._process is not None and self._line is not None and self._process.poll() is None:
            return self._line
        self.close()
        ours, theirs = socket.socketpair()
        arguments = [str(theirs.fileno()), *self._arguments]
        self._process = subprocess.Popen([*self._command, *arguments], pass_fds=[theirs.fileno()], stdout=sys.stderr)
        theirs.close()
        self._line = Connection(ours.detach())
        return self._line

    def _fate(self) -> str:
        if self._process is None:
            return "is gone"
        try:
            return fate(self._process.wait(10))
        except subprocess.TimeoutExpired:
            return "does not answer"

    def close(self) -> None:
        """End the process."""
        if self._line is not None:
            self._line.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._process = self._line = None


def main(line: Connection, file: str, party: str, folder: str, agreed: str, vault: str) -> None:
    """Answer letters until nobody asks any more."""
    from ...storage import atomic
    from ...storage.lock import Lock
    from .console_messages import timed
    from .silo_file import SiloFile
    from .task_handler import Desk

    atomic.make(Path(folder), 0o700)
    lock = Lock(Path(folder) / ".lock", patience=60.0)  # one that is about to end may still write
    own = SiloFile(Path(file), party)
    desk = Desk(own, Path(folder), lambda text: print(timed(text), file=sys.stderr, flush=True), agreed, vault)
    while True:
        try:
            letter = line.recv_bytes()
        except EOFError:
            return lock.release()
        line.send_bytes(desk.answer(letter) if letter != _FIT else desk.fit().encode())


if __name__ == "__main__":
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it never outlives whoever looks after it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever looks after it ends it
    main(Connection(int(sys.argv[1])), *sys.argv[2:7])
