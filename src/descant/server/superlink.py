"""Flower's SuperLink as a child process: on loopback, with TLS, in memory, and with nothing that it could run."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..engines.flower import QUIET, require
from ..errors import EngineError

_STARTING = 120.0  # seconds
HOST = "127.0.0.1"


@dataclass(frozen=True)
class Papers:
    """The files by which the SuperLink shows who it is, and by which it knows its driver."""

    ca: Path
    certificate: Path
    key: Path
    secret: Path  # random bytes that only the driver reads: nobody else can take over a run


@contextmanager
def superlink(papers: Papers, port: int, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A SuperLink that answers, for as long as the block runs."""
    require()
    check_free(HOST, port)
    program = shutil.which("flower-superlink", path=f"{Path(sys.executable).parent}{os.pathsep}{os.defpath}")
    if program is None:
        raise EngineError('There is no flower-superlink beside this Python. pip install "descant[flower]".')
    told = {
        "--host": HOST,
        "--port": port,
        "--ssl-ca-certfile": papers.ca,
        "--ssl-certfile": papers.certificate,
        "--ssl-keyfile": papers.key,
        "--isolation": "process",
        "--superexec-auth-secret-file": papers.secret,
    }
    flags = ["--enable-supernode-auth", "--disable-runtime-dependency-installation"]
    command = [program, *(str(part) for pair in told.items() for part in pair), *flags]
    environment = {**os.environ, **QUIET, "FLWR_HOME": str(log.parent / "flwr")}
    with log.open("ab") as written:
        process = subprocess.Popen(
            command, stdout=written, stderr=written, stdin=subprocess.DEVNULL, env=environment, preexec_fn=ends_with_us
        )
    try:
        _wait(process, port, log)
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def ends_with_us() -> None:
    """In a child, before its program runs: the system ends it when this process ends, even by SIGKILL (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def check_free(host: str, port: int) -> None:
    """Raise if somebody listens there already."""
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind((host, port))
        except OSError as error:
            raise EngineError(f"Port {port} of {host} is in use: {error.strerror}. Give another one.") from error


def _wait(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    end = time.monotonic() + _STARTING
    while time.monotonic() < end:
        if process.poll() is not None:
            last = log.read_text(errors="replace").strip().splitlines()[-3:]
            raise EngineError(f"The SuperLink has ended with {process.returncode}: {' '.join(last)}. See {log}.")
        with socket.socket() as tried:
            tried.settimeout(1)
            if tried.connect_ex((HOST, port)) == 0:
                return
        time.sleep(0.1)
    raise EngineError(f"The SuperLink has not answered for {_STARTING:.0f} s. See {log}.")
