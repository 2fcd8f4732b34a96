"""Instruments: what a table does not show. Each is one call on a federation, costs little, and changes nothing."""

from .collapse import biggest_jump, lasting_fall
from .coverage import Coverage, coverage
from .findings import Finding, findings_of, of_the_data, pull_a_round
from .games import Shapley, shapley
from .leaving import preview
from .membership import Membership, Roc, membership
from .pictures import draw, spikes
from .traded import Traded, traded
from .universes import Universes, universes
from .walk import Walk, walk

__all__ = [
    "Coverage",
    "Finding",
    "Membership",
    "Roc",
    "Shapley",
    "Traded",
    "Universes",
    "Walk",
    "biggest_jump",
    "coverage",
    "draw",
    "findings_of",
    "lasting_fall",
    "membership",
    "of_the_data",
    "preview",
    "pull_a_round",
    "shapley",
    "spikes",
    "traded",
    "universes",
    "walk",
]
