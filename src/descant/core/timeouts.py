"""Timeouts of a server that waits for silos. Light to import: the settings are also command-line options."""

from __future__ import annotations

from dataclasses import dataclass

from .settings import setting


@dataclass(frozen=True)
class WaitLimits:
    """Timeouts and quorum of the rounds of a server."""

    deadline: float = setting(600.0, "Seconds after which a round continues with a quorum.", above=0)
    quorum: int | None = setting(
        None,
        "Replies with which a round ends at its deadline, and parties connected before a later round. "
        "Without it: all replies, and min_parties.",
        least=1,
    )
    min_parties: int = setting(
        1, "Parties connected before the first round; without a quorum, before every round.", least=1
    )
    timeout: float = setting(24 * 3600.0, "Seconds after which a reply is given up, with or without a quorum.", above=0)
    grace: float = setting(
        60.0, "Seconds in which absent parties may fetch their models after the last round.", least=0
    )
