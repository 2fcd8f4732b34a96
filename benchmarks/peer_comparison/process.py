"""A contestant's process: one command at a time, processor time and memory measured from outside."""

from __future__ import annotations

import json
import queue
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped,unused-ignore]

from peer_comparison.contestants import Peer
from peer_comparison.environments import PeerUnavailableError, last_log_line

SAMPLE_SECONDS = 0.5  # seconds between two memory samples


class PeerProcess:
    """A running contestant; use it in a `with` block, so that no process outlives the bench."""

    def __init__(self, peer: Peer, python: Path, folder: Path, log: Path) -> None:
        self.peer = peer
        self.log = log
        self.peak = 0
        self._messages: queue.Queue[dict[str, Any] | None] = queue.Queue()
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                peer.command(python, folder),
                env=peer.environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=folder,
                text=True,
                start_new_session=True,  # Ctrl-C reaches the bench only, which then stops the contestant
            )
        self._root = psutil.Process(self._process.pid)
        self._seen: set[Any] = set()  # all its processes so far, because some may outlive their parents
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        for line in self._process.stdout or ():
            with suppress(ValueError):  # a line that a library printed
                message = json.loads(line)
                if isinstance(message, dict):
                    self._messages.put(message)
        self._messages.put(None)

    def read_answer(self, timeout: float) -> dict[str, Any]:
        """Return its next answer; raise after the timeout, its end or an error."""
        try:
            answer = self._messages.get(timeout=timeout)
        except queue.Empty:
            raise PeerUnavailableError(f"no answer within {timeout:.0f} s; see {self.log}") from None
        if answer is None:
            code = self._process.wait()
            raise PeerUnavailableError(f"ended with status {code}: {last_log_line(self.log)}")
        if "error" in answer:
            raise PeerUnavailableError(str(answer["error"]))
        return answer

    def send_command(self, command: str, timeout: float) -> dict[str, Any]:
        """Send a command and return its answer."""
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(command + "\n")
            self._process.stdin.flush()
        except OSError:
            pass  # it has died: its log says more than a broken pipe
        return self.read_answer(timeout)

    def processor_seconds(self) -> float:
        """Return the processor time of the process and all its children, ended ones included."""
        total = 0.0
        for process in self.processes():
            with suppress(psutil.Error):
                times = process.cpu_times()
                total += times.user + times.system + times.children_user + times.children_system
        return total

    def sample_memory(self) -> None:
        """Update the peak memory; pages shared by processes count once."""
        total = 0
        for process in self.processes():
            with suppress(psutil.Error):
                total += getattr(process.memory_full_info(), "pss", 0) or process.memory_info().rss
        self.peak = max(self.peak, total)

    @contextmanager
    def sampling_memory(self) -> Iterator[None]:
        """Sample the memory periodically while the block runs."""
        over = threading.Event()

        def watch() -> None:
            while not over.wait(SAMPLE_SECONDS):
                self.sample_memory()

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            self.sample_memory()

    def suspend(self) -> None:
        """Suspend all its processes: idle ones poll and would slow down the contestant being measured."""
        for process in self.processes():
            with suppress(psutil.Error):
                process.suspend()

    def resume(self) -> None:
        """Resume all its processes."""
        for process in self.processes():
            with suppress(psutil.Error):
                process.resume()

    def processes(self) -> list[Any]:
        """Return the process and all its children."""
        try:
            found = [self._root, *self._root.children(recursive=True)]
        except psutil.Error:
            return []
        self._seen.update(found)
        return found

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        self.stop(0.0 if error else 5.0)

    def stop(self, timeout: float) -> None:
        """Ask it to stop, and kill the processes that are left after the timeout."""
        self.resume()
        with suppress(OSError, ValueError):
            if self._process.stdin is not None:
                self._process.stdin.write("stop\n")
                self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)
        self.processes()
        for process in self._seen:
            with suppress(psutil.Error):
                process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(5.0)
        psutil.wait_procs(self._seen - {self._root}, timeout=5.0)
        self._listener.join(5.0)
        if self._process.stdout is not None and not self._listener.is_alive():
            self._process.stdout.close()
