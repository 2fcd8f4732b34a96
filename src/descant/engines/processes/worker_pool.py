"""Worker processes as the `processes` engine sees them: started, spoken to, named when they die, and replaced."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from ...errors import EngineError
from .shared_memory import Shelf

Message = dict[str, Any]
_PATIENCE = 3.0  # seconds of work before workers are started, which takes about as long
_SHARED = "/dev/shm"  # files there are shared memory; elsewhere they are the page cache's, which is nearly as good


class Member:
    """One worker process."""

    def __init__(self, index: int, folder: Path, threads: int, mail: Mailbox) -> None:
        self.index = index
        self.plans: dict[int, Message | None] = {}  # sent to it, and what it said of them
        self.doing: deque[Any] = deque()  # pieces, the one that it works on first
        settings = {"folder": str(folder), "threads": threads, "path": sys.path}
        count = str(threads)
        names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
        self.process = subprocess.Popen(
            [sys.executable, "-c", f"from {__package__}.engine_worker import main; main()", json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **dict.fromkeys(names, count)},
            start_new_session=True,  # an interrupt at the keyboard is for the round, not for its workers
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self._asking: IO[bytes] = self.process.stdin
        self._listener = threading.Thread(target=_listen, args=(self, self.process.stdout, mail), daemon=True)
        self._listener.start()

    def say(self, message: Message) -> None:
        """Send a message; a worker that is dead says so by its silence."""
        with suppress(OSError):
            self._asking.write(json.dumps(message).encode() + b"\n")
            self._asking.flush()

    def end(self) -> None:
        """Stop it at once."""
        with suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL)  # with whatever its own code may have started
        self.process.wait()
        if self._listener is not threading.current_thread():
            self._listener.join(timeout=5)
        with suppress(OSError):  # what it was never told
            self._asking.close()

    def __str__(self) -> str:
        return f"worker {self.index} (process {self.process.pid})"

    def fate(self) -> str:
        """How it ended, in words."""
        return fate(self.process.wait())


def fate(code: int) -> str:
    """How a process with this exit code has ended, in words.

    >>> fate(3), fate(-11), fate(-40)
    ('has exited with 3', 'died of SIGSEGV', 'died of signal 40')
    """
    if code == -signal.SIGKILL:
        return "was killed (SIGKILL; most often because the machine ran out of memory)"
    names = {int(each): each.name for each in signal.Signals}
    return f"died of {names.get(-code, f'signal {-code}')}" if code < 0 else f"has exited with {code}"


class Mailbox:
    """What workers have said, in order. A message is gone only when it was dealt with, whatever interrupts that."""

    def __init__(self) -> None:
        self._letters: deque[tuple[Member, Message | None]] = deque()
        self._came = threading.Event()

    def put(self, member: Member, message: Message | None) -> None:
        """A message; None for a worker that will say no more."""
        self._letters.append((member, message))
        self._came.set()

    def wait(self, timeout: float) -> None:
        """Until there is a message, but not for ever."""
        self._came.wait(timeout)

    def deal(self, take: Callable[[Member, Message | None], None]) -> None:
        """Hand over all messages; one that came half through comes again."""
        self._came.clear()
        while self._letters:
            take(*self._letters[0])
            self._letters.popleft()


def _listen(member: Member, answers: IO[bytes], mail: Mailbox) -> None:
    try:
        with answers:
            for line in answers:
                with suppress(ValueError):  # what was printed before it could be kept apart
                    mail.put(member, json.loads(line))
    finally:
        mail.put(member, None)


class Pool:
    """Some workers, a folder that they share with this process, and what they have said."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.lock = threading.RLock()
        self.mail = Mailbox()
        self._forgotten: deque[int] = deque()
        self.members: list[Member] = []
        self.spent = 0.0  # seconds of work that was done here
        self._starts_that_failed = 0
        self._shelves: dict[str, Shelf] = {}
        place = _SHARED if os.access(_SHARED, os.W_OK) else None
        self.folder = Path(tempfile.mkdtemp(prefix="descant-", dir=place))
        self._end = weakref.finalize(self, _end, self.members, self.folder)

    def grow(self, count: int) -> None:
        """Have at least so many workers; they start while this process goes on."""
        if self.closed:
            raise EngineError("These workers have been closed. Make a new Processes(...).")
        while len(self.members) < count:
            self.members.append(self._started(len(self.members)))

    def worth_it(self) -> bool:
        """Whether work here has taken long enough: starting workers takes as long as many a short run in all."""
        return self.spent >= _PATIENCE and not self.closed

    def _started(self, index: int) -> Member:
        return Member(index, self.folder, self.threads, self.mail)

    def forget(self, number: int) -> None:
        """A plan that nobody will ask about any more. This may be called in the midst of anything: files go at once,
        and the workers are told when something else is said to them."""
        for file in self.folder.glob(f"*-{number}-*"):
            if file.name.startswith(("tasks", "plan")):
                file.unlink(missing_ok=True)
        self._forgotten.append(number)

    def tidy(self) -> None:
        """Tell the workers of plans that were forgotten."""
        while self._forgotten:
            number = self._forgotten.popleft()
            for member in self.members:
                if number in member.plans:
                    del member.plans[number]
                    member.say({"forget": number})

    def shelf(self, file: str) -> Shelf:
        """Where a worker has put its answer."""
        return self._shelves.setdefault(file, Shelf(Path(file)))

    def replace(self, member: Member) -> None:
        """Put a new worker in the place of a dead one; one that never came to work is not tried for ever."""
        self._starts_that_failed = 0 if any(member.plans.values()) else self._starts_that_failed + 1
        for file in [file for file in self._shelves if f"-{member.process.pid}-" in file]:
            self._shelves.pop(file).file.unlink(missing_ok=True)
        if self._starts_that_failed > len(self.members) + 1:
            fate = member.fate()
            self.close()
            raise EngineError(f"Workers do not start: {member} {fate}. What it printed is on standard error.")
        member.end()
        self.members[member.index] = self._started(member.index)

    @property
    def closed(self) -> bool:
        return not self._end.alive

    def close(self) -> None:
        """End all workers and remove their folder."""
        self._end()


def _end(members: list[Member], folder: Path) -> None:
    for member in members:
        member.end()
    members.clear()
    shutil.rmtree(folder, ignore_errors=True)
