"""Coverage: the number of parties that ever trained. A mean over untrained parties says little about training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..federation import Federation


@dataclass(frozen=True)
class Coverage:
    """The number of rounds in which each party trained."""

    rounds: dict[str, int]  # by party: number of rounds with an accepted update

    @property
    def untrained(self) -> tuple[str, ...]:
        """The parties that never trained."""
        return tuple(party for party, count in self.rounds.items() if not count)

    @property
    def trained_count(self) -> int:
        return len(self.rounds) - len(self.untrained)

    def __str__(self) -> str:
        return f"{self.trained_count} of {len(self.rounds)} parties trained"


def coverage(federation: Federation) -> Coverage:
    """Return in how many rounds each party has trained; the counts survive saving and loading.

    >>> str(Coverage({"a": 3, "b": 0}))
    '1 of 2 parties trained'
    """
    plan = federation.plan_
    return Coverage(dict(zip(plan.population, federation.state.rounds_trained(plan).tolist(), strict=True)))
