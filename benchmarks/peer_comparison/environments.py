"""The peers' environments: one venv each in a cache folder, created once and reused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from descant.errors import DescantError
from peer_comparison.contestants import Peer, current_python

CACHE = Path.home() / ".cache" / "descant" / "bench"
INSTALLED_FILE = "descant-bench.json"  # marks a complete venv: the packages that were installed
PIP_TIMEOUT = 1800.0  # seconds for one call of pip


class PeerUnavailableError(DescantError):
    """A contestant failed to install, start or finish; the message is the reason in its row."""


def python_for(peer: Peer, folder: Path, install: bool, log: Callable[[str], None]) -> Path:
    """Return the Python of a contestant's environment; create the environment if it is missing."""
    if not peer.installs:
        return current_python()
    place = folder / peer.name.partition("@")[0]
    wanted = [list(call) for call in peer.installs]
    python = place / "bin" / "python"
    if _installed_packages(place) == wanted and python.exists():
        return python
    if not install:
        raise PeerUnavailableError(f"not installed in {place}, and installing was not allowed")
    log(f"{peer.title}: creating the environment {place}. It installs {_package_list(peer)}")
    log_file = folder / f"{place.name}.log"
    folder.mkdir(parents=True, exist_ok=True)
    log_file.write_text("")
    _call([sys.executable, "-m", "venv", "--clear", str(place)], log_file)
    for call in peer.installs:
        _call([str(python), "-m", "pip", "install", "--disable-pip-version-check", *call], log_file)
    (place / INSTALLED_FILE).write_text(json.dumps(wanted))
    return python


def python_or_reason(
    peer: Peer, folder: Path, install: bool, log: Callable[[str], None]
) -> Path | PeerUnavailableError:
    """Return the Python, or the failure as a value so that the other contestants continue."""
    try:
        return python_for(peer, folder, install, log)
    except PeerUnavailableError as error:
        log(f"{peer.title} is left out: {error}")
        return error


def _package_list(peer: Peer) -> str:
    return ", then ".join(" ".join(call) for call in peer.installs) + "."


def _installed_packages(place: Path) -> object:
    try:
        return json.loads((place / INSTALLED_FILE).read_text())
    except (OSError, ValueError):
        return None


def _call(command: list[str], log_file: Path) -> None:
    """Run a command with its output in the log; raise one sentence on failure."""
    text = " ".join(command[1:])
    with log_file.open("a") as out:
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
            raise PeerUnavailableError(f"{text} took longer than {PIP_TIMEOUT:.0f} s; see {log_file}") from error
        except OSError as error:
            raise PeerUnavailableError(f"{text}: {error}") from error
    if done.returncode:
        raise PeerUnavailableError(f"{last_log_line(log_file)} (from {text}; see {log_file})")


def last_log_line(log_file: Path) -> str:
    """Return the line of a log that most likely names the error."""
    lines = [line.strip() for line in log_file.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith("error")]
    return (errors or lines or ["its log is empty"])[-1][:200]
