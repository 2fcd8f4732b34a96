"""What a team reads while its party takes part: a line for each thing that was done, with the time of its machine."""

from __future__ import annotations

import time
from collections.abc import Callable

from ...core.messages import ASKED, Report
from ...privacy.secure_aggregation.party_masking import SAMPLES

_AGAIN = (30.0, 120.0, 600.0)  # seconds after which it is said again that the server is away; from then on, the last
_NUMBERS = {"loss": "loss", "reward": "reward", "own": "its own model", "center": "the common one"}


def timed(text: str) -> str:
    """A line as it is printed: 14:03:59 Joined."""
    return f"{time.strftime('%H:%M:%S')} {text}"


def done(report: Report, seconds: float, trained: str = "samples") -> str:
    """What was done for a letter, in a line.

    >>> done(Report("north", 3, "train", metrics={"samples": 96, "loss": 0.5}), 1.234)
    'Round 3: trained on 96 samples in 1.2 s, loss 0.5000.'
    """
    found = report.metrics
    what = {"train": f"trained on {found.get(SAMPLES, 'its')} {trained}", "evaluate": "judged", "keys": "sent a key"}
    told = [f"Round {report.round}: {what.get(report.kind, report.kind)} in {seconds:.1f} s"]
    numbers = {name: float(found[key]) for key, name in _NUMBERS.items() if key in found}
    told += [f"{name} {number:.4f}" for name, number in numbers.items() if number == number]  # nan: not known yet
    told += [f"{found[ASKED]} rows sealed and sent, by which it is stood in for"] if report.sealed else []
    return ", ".join(told) + "."


class Absence:
    """While the server cannot be reached: each reason is said once, and the last again at ever longer intervals."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say, self._told = say, set[str]()
        self._since, self._again, self._pauses = 0.0, 0.0, list[float]()

    def goes_on(self, why: str) -> None:
        """It was tried in vain, and will be tried again."""
        why, now = why.rstrip("."), time.monotonic()
        if not self._told:
            self._since, self._pauses = now, list(_AGAIN)
        if why not in self._told:
            self._say(f"{why}. Trying again until it is there.")
        elif now >= self._again:
            self._say(f"{why}. It has been away for {lasting(now - self._since)}, and is tried again.")
        else:
            return
        self._told.add(why)
        self._again = now + self._pauses[0]
        self._pauses = self._pauses[1:] or self._pauses

    def ends(self) -> str:
        """It was reached: for how long it was not, in a sentence, or ""."""
        told, self._told = self._told, set()
        return f" The server was away for {lasting(time.monotonic() - self._since)}." if told else ""


def lasting(seconds: float) -> str:
    """Seconds as people say them.

    >>> lasting(4), lasting(125), lasting(7500)
    ('4 s', '2 min', '2.1 hours')
    """
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} hours"
