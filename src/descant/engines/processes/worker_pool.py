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
from .shared_memory import SharedTensorFile

Message = dict[str, Any]
_START_AFTER = 3.0  # seconds of work before workers are started, which takes about as long
_SHARED_MEMORY_FOLDER = (
    "/dev/shm"  # files there are shared memory; elsewhere they are the page cache's, which is nearly as good
)


class WorkerProcess:
    """One worker process."""

    def __init__(self, index: int, folder: Path, threads: int, inbox: MessageQueue) -> None:
        self.index = index
        self.plans: dict[int, Message | None] = {}  # sent to it, and what it said of them
        self.assigned: deque[Any] = deque()  # pieces, the one that it works on first
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
        self._stdin: IO[bytes] = self.process.stdin
        self._listener = threading.Thread(target=_read_messages, args=(self, self.process.stdout, inbox), daemon=True)
        self._listener.start()

    def send(self, message: Message) -> None:
        """Send a message; a worker that is dead says so by its silence."""
        with suppress(OSError):
            self._stdin.write(json.dumps(message).encode() + b"\n")
            self._stdin.flush()

    def stop(self) -> None:
        """Stop it at once."""
        with suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL)  # with whatever its own code may have started
        self.process.wait()
        if self._listener is not threading.current_thread():
            self._listener.join(timeout=5)
        with suppress(OSError):  # what it was never told
            self._stdin.close()

    def __str__(self) -> str:
        return f"worker {self.index} (process {self.process.pid})"

    def exit_description(self) -> str:
        """How it ended, in words."""
        return describe_exit(self.process.wait())


def describe_exit(code: int) -> str:
    """How a process with this exit code has ended, in words.

    >>> fate(3), fate(-11), fate(-40)
    ('has exited with 3', 'died of SIGSEGV', 'died of signal 40')
    """
    if code == -signal.SIGKILL:
        return "was killed (SIGKILL; most often because the machine ran out of memory)"
    names = {int(each): each.name for each in signal.Signals}
    return f"died of {names.get(-code, f'signal {-code}')}" if code < 0 else f"has exited with {code}"


class MessageQueue:
    """What workers have said, in order. A message is gone only when it was dealt with, whatever interrupts that."""

    def __init__(self) -> None:
        self._messages: deque[tuple[WorkerProcess, Message | None]] = deque()
        self._arrived = threading.Event()

    def put(self, worker: WorkerProcess, message: Message | None) -> None:
        """A message; None for a worker that will say no more."""
        self._messages.append((worker, message))
        self._arrived.set()

    def wait(self, timeout: float) -> None:
        """Until there is a message, but not for ever."""
        self._arrived.wait(timeout)

    def process_all(self, handle: Callable[[WorkerProcess, Message | None], None]) -> None:
        """Hand over all messages; one that came half through comes again."""
        self._arrived.clear()
        while self._messages:
            handle(*self._messages[0])
            self._messages.popleft()


def _read_messages(worker: WorkerProcess, answers: IO[bytes], inbox: MessageQueue) -> None:
    try:
        with answers:
            for line in answers:
                with suppress(ValueError):  # what was printed before it could be kept apart
                    inbox.put(worker, json.loads(line))
    finally:
        inbox.put(worker, None)


class WorkerPool:
    """Some workers, a folder that they share with this process, and what they have said."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.lock = threading.RLock()
        self.inbox = MessageQueue()
        self._dropped_plans: deque[int] = deque()
        self.workers: list[WorkerProcess] = []
        self.local_seconds = 0.0  # seconds of work that was done here
        self._failed_starts = 0
        self._buffers: dict[str, SharedTensorFile] = {}
        parent = _SHARED_MEMORY_FOLDER if os.access(_SHARED_MEMORY_FOLDER, os.W_OK) else None
        self.folder = Path(tempfile.mkdtemp(prefix="descant-", dir=parent))
        self._finalizer = weakref.finalize(self, _stop_workers, self.workers, self.folder)

    def ensure_workers(self, count: int) -> None:
        """Have at least so many workers; they start while this process goes on."""
        if self.closed:
            raise EngineError("These workers have been closed. Make a new Processes(...).")
        while len(self.workers) < count:
            self.workers.append(self._start_worker(len(self.workers)))

    def should_start(self) -> bool:
        """Whether work here has taken long enough: starting workers takes as long as many a short run in all."""
        return self.local_seconds >= _START_AFTER and not self.closed

    def _start_worker(self, index: int) -> WorkerProcess:
        return WorkerProcess(index, self.folder, self.threads, inbox=self.inbox)

    def drop_plan(self, plan_id: int) -> None:
        """A plan that nobody will ask about any more. This may be called in the midst of anything: files go at once,
        and the workers are told when something else is said to them."""
        for file in self.folder.glob(f"*-{plan_id}-*"):
            if file.name.startswith(("tasks", "plan")):
                file.unlink(missing_ok=True)
        self._dropped_plans.append(plan_id)

    def send_dropped_plans(self) -> None:
        """Tell the workers of plans that were forgotten."""
        while self._dropped_plans:
            number = self._dropped_plans.popleft()
            for member in self.workers:
                if number in member.plans:
                    del member.plans[number]
                    member.send({"forget": number})

    def buffer(self, file: str) -> SharedTensorFile:
        """Where a worker has put its answer."""
        return self._buffers.setdefault(file, SharedTensorFile(Path(file)))

    def replace(self, worker: WorkerProcess) -> None:
        """Put a new worker in the place of a dead one; one that never came to work is not tried for ever."""
        self._failed_starts = 0 if any(worker.plans.values()) else self._failed_starts + 1
        for file in [file for file in self._buffers if f"-{worker.process.pid}-" in file]:
            self._buffers.pop(file).file.unlink(missing_ok=True)
        if self._failed_starts > len(self.workers) + 1:
            fate = worker.exit_description()
            self.close()
            raise EngineError(f"Workers do not start: {worker} {fate}. What it printed is on standard error.")
        worker.stop()
        self.workers[worker.index] = self._start_worker(worker.index)

    @property
    def closed(self) -> bool:
        return not self._finalizer.alive

    def close(self) -> None:
        """End all workers and remove their folder."""
        self._finalizer()


def _stop_workers(workers: list[WorkerProcess], folder: Path) -> None:
    for member in workers:
        member.stop()
    workers.clear()
    shutil.rmtree(folder, ignore_errors=True)
