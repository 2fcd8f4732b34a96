"""Flower's SuperLink as a child process: on loopback, with TLS, in memory, without code to run."""

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
from ..child_process import ChildProcess
from .flower_connection import FLOWER_ENVIRONMENT, require_flower

_START_TIMEOUT = 120.0  # seconds
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class SuperLinkCredentials:
    """The TLS files of the SuperLink, and the secret by which it recognizes its driver."""

    authority: Path
    certificate: Path
    key: Path
    secret: Path  # random bytes that only the driver can read: no other process can take over a run


@contextmanager
def run_superlink(credentials: SuperLinkCredentials, port: int, folder: Path) -> Iterator[ChildProcess]:
    """Run a SuperLink while the block runs; yield once it accepts connections."""
    require_flower()
    program = shutil.which("flower-superlink", path=f"{Path(sys.executable).parent}{os.pathsep}{os.defpath}")
    if program is None:
        raise EngineError('There is no flower-superlink beside this Python. pip install "descant[flower]".')
    options = {
        "--host": LOOPBACK,
        "--port": port,
        "--ssl-ca-certfile": credentials.authority,
        "--ssl-certfile": credentials.certificate,
        "--ssl-keyfile": credentials.key,
        "--isolation": "process",
        "--superexec-auth-secret-file": credentials.secret,
    }
    flags = ["--enable-supernode-auth", "--disable-runtime-dependency-installation"]
    command = [program, *(str(part) for pair in options.items() for part in pair), *flags]
    log = folder / "superlink.log"
    with ChildProcess(
        command, log, folder, env={**os.environ, **FLOWER_ENVIRONMENT, "FLWR_HOME": str(folder / "flwr")}
    ) as child:
        _wait_until_listening(child, port, log)
        yield child


def _wait_until_listening(child: ChildProcess, port: int, log: Path) -> None:
    stop_at = time.monotonic() + _START_TIMEOUT
    while time.monotonic() < stop_at:
        if not child.is_alive:
            last_lines = log.read_text(errors="replace").strip().splitlines()[-3:]
            raise EngineError(f"The SuperLink exited with {child.terminate()}: {' '.join(last_lines)}. See {log}.")
        with socket.socket() as probe:
            probe.settimeout(1)
            if probe.connect_ex((LOOPBACK, port)) == 0:
                return
        time.sleep(0.1)
    raise EngineError(f"The SuperLink has not answered within {_START_TIMEOUT:.0f} s. See {log}.")
