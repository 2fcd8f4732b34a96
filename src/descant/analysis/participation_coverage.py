"""How many parties ever trained: a mean over parties of which some never did says little about training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..federation import Federation


@dataclass(frozen=True)
class Coverage:
    """Who trained, and how often."""

    rounds: dict[str, int]  # by party: in how many rounds its report was accepted

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
    """In how many rounds each party has trained; it survives saving and loading.

    >>> str(Coverage({"a": 3, "b": 0}))
    '1 of 2 parties trained'
    """
    plan = federation.plan_
    return Coverage(dict(zip(plan.population, federation.state.rounds_trained(plan).tolist(), strict=True)))
