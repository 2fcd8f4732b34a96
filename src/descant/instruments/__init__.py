"""Instruments: what a table does not show. Each is one call on a federation, costs little, and changes nothing."""

from .collapse import biggest_jump, lasting_fall
from .coverage import Coverage, coverage
from .findings import Finding, findings_of, of_the_data, pull_a_round
from .leaving import preview
from .pictures import draw, spikes
from .walk import Walk, walk

__all__ = [
    "Coverage",
    "Finding",
    "Walk",
    "biggest_jump",
    "coverage",
    "draw",
    "findings_of",
    "lasting_fall",
    "of_the_data",
    "preview",
    "pull_a_round",
    "spikes",
    "walk",
]
