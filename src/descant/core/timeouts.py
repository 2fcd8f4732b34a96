"""How long a server waits for parties on machines of their own. Light to import: its settings are options, too."""

from __future__ import annotations

from dataclasses import dataclass

from .settings import setting


@dataclass(frozen=True)
class WaitLimits:
    """How long a round waits, and for whom."""

    deadline: float = setting(600.0, "Seconds after which a round goes on with a quorum.", above=0)
    quorum: int | None = setting(
        None,
        "Answers that a round needs to go on without the others, and parties that must be there for one to begin once "
        "the training has begun. Without it: all answers, and as many parties as gather says.",
        least=1,
    )
    min_parties: int = setting(
        1, "Parties that must be there before the first round; without a quorum, before every round.", least=1
    )
    timeout: float = setting(24 * 3600.0, "Seconds after which an answer is given up, quorum or not.", above=0)
    grace: float = setting(
        60.0, "Seconds in which parties that are away when all rounds are done may come for their models.", least=0
    )
