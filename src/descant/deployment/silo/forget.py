"""`descant silo forget`: the server destroys what it holds of a party's rows, and the party what it has kept.

What has left stays counted here, for ever: else a party that is forgotten and joins again could lose more of its rows
than its policy lets go.
"""

from __future__ import annotations

import time
from pathlib import Path

from ...core.messages import Report, Task
from ...rounds.validation import plain
from ...serialization.wire import pack, unpack
from ...storage import atomic, clear_errors
from ..flower.flower_connection import Away, TurnedAway
from .handshake_reply import MACHINE
from .join import Line
from .outgoing_fields import FORGET
from .silo_state import DAYS, LEFT
from .silo_worker import REASON, ROUNDS

FORGOTTEN = "forgotten"
"""The setting of a goodbye that says that it is done; its reason says what was done."""
KEPT = (MACHINE, LEFT, DAYS)
"""What stays of a party's folder: by it the invite is known to be used in one place, and the policy holds."""
_PAUSE = 0.5  # seconds between two tries, or two looks for a letter


def be_forgotten(line: Line, machine: str, federation: str, seconds: float) -> str:
    """Ask the server to forget this party; what it says that it has done, or an error if it has not within so long."""
    end, why = time.monotonic() + seconds, "there was no time"
    while time.monotonic() < end:
        try:
            with line.joined():
                return _asked(line, machine, federation, end)
        except Away as error:
            why = str(error)
        time.sleep(min(_PAUSE, max(0.0, end - time.monotonic())))
    raise Away(f"It has not answered within {seconds:g} s: {why}")


def _asked(line: Line, machine: str, federation: str, end: float) -> str:
    """Whoever is asked who it is says that it wishes to be forgotten; other letters to it are given up by that."""
    wished = False
    while time.monotonic() < end:
        got = line.pull()
        if got is None:
            time.sleep(_PAUSE / 5)
            continue
        to, letter = got
        task = unpack(letter, Task)
        if task.kind == "goodbye":
            told = plain(str(task.settings.get(REASON, "")))
            if FORGOTTEN in task.settings:
                return told
            if wished or ROUNDS in task.settings:  # else it is of a time before
                raise TurnedAway(told or "The training is over")
        elif task.kind == "hello" and task.settings.get("federation") != federation:
            other = task.settings.get("federation")
            raise TurnedAway(f"The folder is of the federation {federation!r}, and the server of {other!r:.80}")
        elif task.kind == "hello":
            line.push(to, pack(Report(task.party, task.round, "hello", metrics={FORGET: machine})))
            wished = True
        else:
            line.push(to, pack(Report(task.party, task.round, task.kind, "refused", reason="it is to be forgotten")))
    raise Away("the server has not said that it was done" if wished else "the server has not asked who we are")


def clear(folder: Path) -> tuple[list[str], list[str]]:
    """Remove what a party has kept in its folder, its keys last; what was removed, and what stays."""
    files = [file for part in ("state", "keys") for file in sorted((folder / part).glob("*"))]
    removed = [file for file in files if file.name not in KEPT]
    with clear_errors(folder):
        for file in removed:
            atomic.remove(file)
    names = [str(file.relative_to(folder)) for file in files]
    gone = {str(file.relative_to(folder)) for file in removed}
    return [name for name in names if name in gone], [name for name in names if name not in gone]
