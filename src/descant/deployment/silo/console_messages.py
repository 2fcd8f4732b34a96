"""What a team reads while its party takes part: a line for each thing that was done, with the time of its machine."""

from __future__ import annotations

import time
from collections.abc import Callable

from ...core.messages import CORESET_KEY, Reply
from ...privacy.secure_aggregation.party_masking import SAMPLES_METRIC

_REPEAT_INTERVALS = (
    30.0,
    120.0,
    600.0,
)  # seconds after which it is said again that the server is away; from then on, the last
_METRIC_LABELS = {"loss": "loss", "reward": "reward", "personal": "its own model", "global_model": "the common one"}


def timestamped(text: str) -> str:
    """A line as it is printed: 14:03:59 Joined."""
    return f"{time.strftime('%H:%M:%S')} {text}"


def reply_summary(reply: Reply, seconds: float, trained: str = "samples") -> str:
    """What was done for a letter, in a line.

    >>> done(Report("north", 3, "train", metrics={"samples": 96, "loss": 0.5}), 1.234)
    'Round 3: trained on 96 samples in 1.2 s, loss 0.5000.'
    """
    metrics = reply.metrics
    actions = {
        "train": f"trained on {metrics.get(SAMPLES_METRIC, 'its')} {trained}",
        "evaluate": "evaluated",
        "keys": "sent a key",
    }
    parts = [f"Round {reply.round}: {actions.get(reply.kind, reply.kind)} in {seconds:.1f} s"]
    numbers = {name: float(metrics[key]) for key, name in _METRIC_LABELS.items() if key in metrics}
    parts += [f"{name} {number:.4f}" for name, number in numbers.items() if number == number]  # nan: not known yet
    parts += (
        [f"{metrics[CORESET_KEY]} rows sealed and sent, by which it is stood in for"] if reply.encrypted_coreset else []
    )
    return ", ".join(parts) + "."


class OutageReporter:
    """While the server cannot be reached: each reason is said once, and the last again at ever longer intervals."""

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log = log
        self._logged_reasons = set[str]()
        self._since = 0.0
        self._next_log = 0.0
        self._intervals = list[float]()

    def report_failure(self, reason: str) -> None:
        """It was tried in vain, and will be tried again."""
        reason = reason.rstrip(".")
        now = time.monotonic()
        if not self._logged_reasons:
            self._since = now
            self._intervals = list(_REPEAT_INTERVALS)
        if reason not in self._logged_reasons:
            self._log(f"{reason}. Trying again until it is there.")
        elif now >= self._next_log:
            self._log(f"{reason}. It has been away for {format_duration(now - self._since)}, and is tried again.")
        else:
            return
        self._logged_reasons.add(reason)
        self._next_log = now + self._intervals[0]
        self._intervals = self._intervals[1:] or self._intervals

    def end_outage(self) -> str:
        """It was reached: for how long it was not, in a sentence, or ""."""
        reasons = self._logged_reasons
        self._logged_reasons = set()
        return f" The server was away for {format_duration(time.monotonic() - self._since)}." if reasons else ""


def format_duration(seconds: float) -> str:
    """Seconds as people say them.

    >>> lasting(4), lasting(125), lasting(7500)
    ('4 s', '2 min', '2.1 hours')
    """
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} hours"
