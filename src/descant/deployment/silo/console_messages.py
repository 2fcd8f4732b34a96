"""Log lines of a silo: one timestamped line for each task done and each outage."""

from __future__ import annotations

import time
from collections.abc import Callable

from ...core.messages import CORESET_KEY, Reply
from ...privacy.secure_aggregation.party_masking import SAMPLES_METRIC

_REPEAT_INTERVALS = (30.0, 120.0, 600.0)  # seconds between two reports of one outage; the last interval repeats
_METRIC_LABELS = {"loss": "loss", "reward": "reward", "personal": "personal model", "global_model": "global model"}


def timestamped(text: str) -> str:
    """Return a log line with the local time in front, such as "14:03:59 Joined."."""
    return f"{time.strftime('%H:%M:%S')} {text}"


def reply_summary(reply: Reply, seconds: float, trained: str = "samples") -> str:
    """Return one line that says what was done for a task.

    >>> reply_summary(Reply("north", 3, "train", metrics={"samples": 96, "loss": 0.5}), 1.234)
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
    parts += [f"{name} {number:.4f}" for name, number in numbers.items() if number == number]  # skip nan: not known yet
    if reply.encrypted_coreset:
        parts.append(f"{metrics[CORESET_KEY]} rows encrypted and sent as a coreset")
    return ", ".join(parts) + "."


class OutageReporter:
    """Log why the server cannot be reached: each reason once, the last one again at growing intervals."""

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log = log
        self._logged_reasons = set[str]()
        self._since = 0.0
        self._next_log = 0.0
        self._intervals = list[float]()

    def report_failure(self, reason: str) -> None:
        """Log a failed attempt to connect, unless the same reason was logged a moment ago."""
        reason = reason.rstrip(".")
        now = time.monotonic()
        if not self._logged_reasons:
            self._since = now
            self._intervals = list(_REPEAT_INTERVALS)
        if reason not in self._logged_reasons:
            self._log(f"{reason}. Retrying until it is back.")
        elif now >= self._next_log:
            self._log(f"{reason}. Away for {format_duration(now - self._since)}; still retrying.")
        else:
            return
        self._logged_reasons.add(reason)
        self._next_log = now + self._intervals[0]
        self._intervals = self._intervals[1:] or self._intervals

    def end_outage(self) -> str:
        """Return a sentence with the length of the outage that has just ended, or "" if there was none."""
        reasons = self._logged_reasons
        self._logged_reasons = set()
        return f" The server was away for {format_duration(time.monotonic() - self._since)}." if reasons else ""


def format_duration(seconds: float) -> str:
    """Return seconds in a readable unit.

    >>> format_duration(4), format_duration(125), format_duration(7500)
    ('4 s', '2 min', '2.1 hours')
    """
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} hours"
