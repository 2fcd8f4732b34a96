"""Flower's SuperLink as a child process: on loopback, with TLS, in memory, and with nothing that it could run."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ...errors import EngineError
from ..child_process import Child
from .flower_connection import QUIET, require

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
def superlink(papers: Papers, port: int, folder: Path) -> Iterator[Child]:
    """A SuperLink that answers, for as long as the block runs."""
    require()
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
    log = folder / "superlink.log"
    with Child(command, log, folder, {**os.environ, **QUIET, "FLWR_HOME": str(folder / "flwr")}) as child:
        _wait(child, port, log)
        yield child


def _wait(child: Child, port: int, log: Path) -> None:
    end = time.monotonic() + _STARTING
    while time.monotonic() < end:
        if not child.alive:
            last = log.read_text(errors="replace").strip().splitlines()[-3:]
            raise EngineError(f"The SuperLink has ended with {child.end()}: {' '.join(last)}. See {log}.")
        with socket.socket() as tried:
            tried.settimeout(1)
            if tried.connect_ex((HOST, port)) == 0:
                return
        time.sleep(0.1)
    raise EngineError(f"The SuperLink has not answered for {_STARTING:.0f} s. See {log}.")
