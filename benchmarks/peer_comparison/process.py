"""One contestant's process: asked one thing at a time, with its processor time and memory taken from outside."""

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
from peer_comparison.environments import PeerUnavailableError, last_log_lines

SAMPLE_SECONDS = 0.5  # seconds between two looks at the memory


class PeerProcess:
    """A contestant that is alive; use it in a `with`, so that nothing of it outlives the bench."""

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
                start_new_session=True,  # Ctrl-C is for the bench, which then ends it in good order
            )
        self._root = psutil.Process(self._process.pid)
        self._seen: set[Any] = set()  # all its processes ever, as some may outlive their parents
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        for line in self._process.stdout or ():
            with suppress(ValueError):  # a line of some library that was not meant for us
                found = json.loads(line)
                if isinstance(found, dict):
                    self._messages.put(found)
        self._messages.put(None)

    def read_answer(self, timeout: float) -> dict[str, Any]:
        """Its next answer."""
        try:
            answer = self._messages.get(timeout=timeout)
        except queue.Empty:
            raise PeerUnavailableError(f"no answer within {timeout:.0f} s; see {self.log}") from None
        if answer is None:
            code = self._process.wait()
            raise PeerUnavailableError(f"ended with status {code}: {last_log_lines(self.log)}")
        if "error" in answer:
            raise PeerUnavailableError(str(answer["error"]))
        return answer

    def send_command(self, command: str, timeout: float) -> dict[str, Any]:
        """Give a command and wait for its answer."""
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(command + "\n")
            self._process.stdin.flush()
        except OSError:
            pass  # it has died: its last words tell more than a broken pipe
        return self.read_answer(timeout)

    def processor_seconds(self) -> float:
        """What it and all its children, also those that have ended, have used."""
        total = 0.0
        for process in self.processes():
            with suppress(psutil.Error):
                times = process.cpu_times()
                total += times.user + times.system + times.children_user + times.children_system
        return total

    def sample_memory(self) -> None:
        """Take its memory now: pages that processes share are counted once."""
        total = 0
        for process in self.processes():
            with suppress(psutil.Error):
                total += getattr(process.memory_full_info(), "pss", 0) or process.memory_info().rss
        self.peak = max(self.peak, total)

    @contextmanager
    def sampling_memory(self) -> Iterator[None]:
        """Look at the memory again and again while the block runs."""
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
        """Stand still, with all its processes: a peer's idle ones poll, and would take from those who are measured."""
        for process in self.processes():
            with suppress(psutil.Error):
                process.suspend()

    def resume(self) -> None:
        """Go on after a rest."""
        for process in self.processes():
            with suppress(psutil.Error):
                process.resume()

    def processes(self) -> list[Any]:
        """It and all its children."""
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
        """Ask it to stop, and end whatever of it is still there after so many seconds."""
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
