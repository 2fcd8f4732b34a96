"""The peers' environments: one venv each in a cache folder, made the first time and used again."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from descant.errors import DescantError
from peer_comparison.contestants import Peer, current_python

CACHE = Path.home() / ".cache" / "descant" / "bench"
INSTALLED_FILE = "descant-bench.json"  # in a venv that was made to its end: what was installed
PIP_TIMEOUT = 1800.0  # seconds for one call of pip


class PeerUnavailableError(DescantError):
    """A contestant that could not be installed, started or finished; the message is the reason in its row."""


def python_for(peer: Peer, folder: Path, install: bool, say: Callable[[str], None]) -> Path:
    """The Python of a contestant's environment, which is made if it is not there."""
    if not peer.installs:
        return current_python()
    place = folder / peer.name.partition("@")[0]
    wanted = [list(call) for call in peer.installs]
    python = place / "bin" / "python"
    if _mark(place) == wanted and python.exists():
        return python
    if not install:
        raise PeerUnavailableError(f"not installed in {place}, and installing was not allowed")
    say(f"{peer.title}: making the environment {place}. It installs {_listed(peer)}")
    log = folder / f"{place.name}.log"
    folder.mkdir(parents=True, exist_ok=True)
    log.write_text("")
    _call([sys.executable, "-m", "venv", "--clear", str(place)], log)
    for call in peer.installs:
        _call([str(python), "-m", "pip", "install", "--disable-pip-version-check", *call], log)
    (place / INSTALLED_FILE).write_text(json.dumps(wanted))
    return python


def python_or_reason(
    peer: Peer, folder: Path, install: bool, say: Callable[[str], None]
) -> Path | PeerUnavailableError:
    """The same, with a failure as a value: the others go on."""
    try:
        return python_for(peer, folder, install, say)
    except PeerUnavailableError as error:
        say(f"{peer.title} is left out: {error}")
        return error


def _listed(peer: Peer) -> str:
    return ", then ".join(" ".join(call) for call in peer.installs) + "."


def _mark(place: Path) -> object:
    try:
        return json.loads((place / INSTALLED_FILE).read_text())
    except (OSError, ValueError):
        return None


def _call(command: list[str], log: Path) -> None:
    """Run to the end, with all output in the log; a failure is one sentence."""
    what = " ".join(command[1:])
    with log.open("a") as out:
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                timeout=PIP_TIMEOUT,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise PeerUnavailableError(f"{what} took longer than {PIP_TIMEOUT:.0f} s; see {log}") from error
        except OSError as error:
            raise PeerUnavailableError(f"{what}: {error}") from error
    if done.returncode:
        raise PeerUnavailableError(f"{last_log_lines(log)} (from {what}; see {log})")


def last_log_lines(log: Path) -> str:
    """The line of a log that most likely says what went wrong."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith("error")]
    return (errors or lines or ["it said nothing"])[-1][:200]
