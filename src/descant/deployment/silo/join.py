"""A silo takes part: it fetches letters, lets its worker answer them, and comes back whenever the line was down."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, Protocol

from ...core.messages import Report
from ...errors import SettingError
from ...serialization.wire import Letter, unpack
from ..flower.flower_connection import HEARTBEAT, Away, Held, TurnedAway
from ..pki.invite import Invite, Unpacked
from .console_messages import Absence, lasting
from .handshake_reply import held_in
from .silo_state import RESTS
from .silo_worker import Over, Worker

_SHORTEST, _LONGEST = 0.05, 1.0  # seconds between two looks for a letter
_SHORT = 2**14  # bytes of an answer that may say that the party rests
_LATEST = 30.0  # seconds between two tries to join
_HELD = 4 * HEARTBEAT  # seconds: whoever holds a place for longer is not the party from before

_ELSEWHERE = (
    "This invite is in use in another place, which takes part by it now. Stop that one (descant silo leave); if it is "
    "not yours, tell the organiser, who can revoke the invite and make a new one."
)


class Line(Protocol):
    """A silo's end of a post, such as `spoke.Spoke`."""

    def joined(self) -> AbstractContextManager[None]: ...
    def pull(self) -> tuple[Any, Letter] | None: ...
    def push(self, to: Any, answer: bytes) -> None: ...


def check_whose(folder: Path, invite: Invite) -> None:
    """Raise if a silo's folder is of another party, or of another federation, than an invite is for."""
    keys, said = Unpacked(folder / "keys"), held_in(folder / "state") or {}
    known = [said] if said else []
    with suppress(OSError, ValueError):  # none, or damaged: they are written anew
        known.append({"party": keys.party, "federation": keys.federation})
    for what, asked in (("party", invite.party), ("federation", invite.federation)):
        for one in known:
            if one[what] != asked:
                raise SettingError(
                    f"{folder} is of the {what} {one[what]!r}, and the invite is for {asked!r}. Nothing was changed "
                    f"there. Give another folder: --folder NEW"
                )


def take_part(line: Line, worker: Worker, over: threading.Event, say: Callable[[str], None] = print) -> bool:
    """Answer letters until it is over, or the training is: whether it is the training. `TurnedAway` if nobody asks.

    A party that has had its rounds for the day is not there until the next.
    """
    pause, absence, held = 1.0, Absence(say), math.inf
    while not over.is_set():
        rest = 0.0
        try:
            with line.joined():
                say(f"Joined.{absence.ends()} Waiting for work; Ctrl-C leaves.")
                pause = 1.0
                rest = _answer(line, worker, over)
                if rest:
                    say(f"It has had its rounds for today, and comes back in {lasting(rest)}.")
        except Away as why:
            absence.goes_on(str(why))
            held = min(held, time.monotonic()) if isinstance(why, Held) else math.inf
            if time.monotonic() - held > _HELD:
                raise TurnedAway(_ELSEWHERE) from why
        except Over as end:
            say(str(end))
            return True
        over.wait(rest or pause)
        pause = min(_LATEST, 2 * pause)
    return False


def _answer(line: Line, worker: Worker, over: threading.Event) -> float:
    """Letter by letter; how many seconds the party rests before the next."""
    pause = _SHORTEST
    while not over.is_set():
        got = line.pull()
        if got is None:
            over.wait(pause)
            pause = min(_LONGEST, 1.5 * pause)
            continue
        rest = _answered(line, worker, *got)
        got, pause = None, _SHORTEST  # a letter is not kept until the next has come
        if rest:
            return rest
    return 0.0


def _answered(line: Line, worker: Worker, to: Any, letter: Letter) -> float:
    """One letter; how many seconds the party rests then."""
    answer = worker.answer(letter)
    line.push(to, answer)
    rest = unpack(answer, Report).metrics.get(RESTS) if len(answer) < _SHORT else None
    return float(rest or 0.0)
