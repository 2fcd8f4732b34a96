"""The worker processes of the `processes` engine: start them, talk to them, and replace those that die."""

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
_START_AFTER = 3.0  # seconds of local work before workers start; the start takes about as long
_SHARED_MEMORY_FOLDER = "/dev/shm"  # elsewhere, files are in the page cache, which is nearly as fast


class WorkerProcess:
    """One worker process."""

    def __init__(self, index: int, folder: Path, threads: int, inbox: MessageQueue) -> None:
        self.index = index
        self.plans: dict[int, Message | None] = {}  # by plan id: its reply, None until it has come
        self.assigned: deque[Any] = deque()  # pieces; it works on the first
        settings = {"folder": str(folder), "threads": threads, "path": sys.path}
        count = str(threads)
        names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
        self.process = subprocess.Popen(
            [sys.executable, "-c", f"from {__package__}.engine_worker import main; main()", json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **dict.fromkeys(names, count)},
            start_new_session=True,  # Ctrl-C must interrupt the round and not its workers
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self._stdin: IO[bytes] = self.process.stdin
        self._listener = threading.Thread(target=_read_messages, args=(self, self.process.stdout, inbox), daemon=True)
        self._listener.start()

    def send(self, message: Message) -> None:
        """Send a message; the death of a worker is noticed by the end of its output."""
        with suppress(OSError):
            self._stdin.write(json.dumps(message).encode() + b"\n")
            self._stdin.flush()

    def stop(self) -> None:
        """Kill the worker."""
        with suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL)  # with the processes that user code may have started
        self.process.wait()
        if self._listener is not threading.current_thread():
            self._listener.join(timeout=5)
        with suppress(OSError):  # closing flushes unsent messages into a broken pipe
            self._stdin.close()

    def __str__(self) -> str:
        return f"worker {self.index} (process {self.process.pid})"

    def exit_description(self) -> str:
        """Wait for the end of the process and describe it."""
        return describe_exit(self.process.wait())


def describe_exit(code: int) -> str:
    """Describe how a process with this exit code has ended.

    >>> describe_exit(3), describe_exit(-11), describe_exit(-40)
    ('has exited with 3', 'died of SIGSEGV', 'died of signal 40')
    """
    if code == -signal.SIGKILL:
        return "was killed (SIGKILL; most often because the machine ran out of memory)"
    names = {int(each): each.name for each in signal.Signals}
    return f"died of {names.get(-code, f'signal {-code}')}" if code < 0 else f"has exited with {code}"


class MessageQueue:
    """The workers' messages in order; one is removed only after it was handled, even if that is interrupted."""

    def __init__(self) -> None:
        self._messages: deque[tuple[WorkerProcess, Message | None]] = deque()
        self._arrived = threading.Event()

    def put(self, worker: WorkerProcess, message: Message | None) -> None:
        """Add a message; None means that the worker's output has ended."""
        self._messages.append((worker, message))
        self._arrived.set()

    def wait(self, timeout: float) -> None:
        """Wait until there is a message, or until the timeout."""
        self._arrived.wait(timeout)

    def process_all(self, handle: Callable[[WorkerProcess, Message | None], None]) -> None:
        """Handle all messages; one whose handling was interrupted comes again."""
        self._arrived.clear()
        while self._messages:
            handle(*self._messages[0])
            self._messages.popleft()


def _read_messages(worker: WorkerProcess, stdout: IO[bytes], inbox: MessageQueue) -> None:
    try:
        with stdout:
            for line in stdout:
                with suppress(ValueError):  # output printed while the worker started
                    inbox.put(worker, json.loads(line))
    finally:
        inbox.put(worker, None)


class WorkerPool:
    """Worker processes, the folder that they share with this process, and their messages."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.lock = threading.RLock()
        self.inbox = MessageQueue()
        self._dropped_plans: deque[int] = deque()
        self.workers: list[WorkerProcess] = []
        self.local_seconds = 0.0  # seconds of work done in this process
        self._failed_starts = 0
        self._buffers: dict[str, SharedTensorFile] = {}
        parent = _SHARED_MEMORY_FOLDER if os.access(_SHARED_MEMORY_FOLDER, os.W_OK) else None
        self.folder = Path(tempfile.mkdtemp(prefix="descant-", dir=parent))
        self._finalizer = weakref.finalize(self, _stop_workers, self.workers, self.folder)

    def ensure_workers(self, count: int) -> None:
        """Start workers in the background until there are at least `count`."""
        if self.closed:
            raise EngineError("These workers have been closed. Make a new Processes(...).")
        while len(self.workers) < count:
            self.workers.append(self._start_worker(len(self.workers)))

    def should_start(self) -> bool:
        """Return whether local work has taken long enough to be worth the start of workers."""
        return self.local_seconds >= _START_AFTER and not self.closed

    def _start_worker(self, index: int) -> WorkerProcess:
        return WorkerProcess(index, self.folder, self.threads, inbox=self.inbox)

    def drop_plan(self, plan_id: int) -> None:
        """Delete the files of a plan that is no longer used; the workers hear of it before their next message.

        A finalizer calls this, at any point of the program.
        """
        for file in self.folder.glob(f"*-{plan_id}-*"):
            if file.name.startswith(("tasks", "plan")):
                file.unlink(missing_ok=True)
        self._dropped_plans.append(plan_id)

    def send_dropped_plans(self) -> None:
        """Tell the workers which plans were dropped."""
        while self._dropped_plans:
            plan_id = self._dropped_plans.popleft()
            for worker in self.workers:
                if plan_id in worker.plans:
                    del worker.plans[plan_id]
                    worker.send({"forget": plan_id})

    def buffer(self, file: str) -> SharedTensorFile:
        """Return the shared-memory file that a worker has written."""
        return self._buffers.setdefault(file, SharedTensorFile(Path(file)))

    def replace(self, worker: WorkerProcess) -> None:
        """Replace a dead worker; give up after repeated failures to start."""
        self._failed_starts = 0 if any(worker.plans.values()) else self._failed_starts + 1
        for file in [file for file in self._buffers if f"-{worker.process.pid}-" in file]:
            self._buffers.pop(file).file.unlink(missing_ok=True)
        if self._failed_starts > len(self.workers) + 1:
            description = worker.exit_description()
            self.close()
            raise EngineError(f"Workers do not start: {worker} {description}. Its output is on standard error.")
        worker.stop()
        self.workers[worker.index] = self._start_worker(worker.index)

    @property
    def closed(self) -> bool:
        return not self._finalizer.alive

    def close(self) -> None:
        """Stop all workers and remove their folder."""
        self._finalizer()


def _stop_workers(workers: list[WorkerProcess], folder: Path) -> None:
    for worker in workers:
        worker.stop()
    workers.clear()
    shutil.rmtree(folder, ignore_errors=True)
