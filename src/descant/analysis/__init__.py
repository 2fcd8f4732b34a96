"""Instruments: what a table does not show. Each is one call on a federation, costs little, and changes nothing."""

from ..coresets.preview import preview
from .asset_universes import Universes, universes
from .collapse import biggest_jump, lasting_fall
from .coverage import Coverage, coverage
from .desk_results import Traded, traded
from .federation_plots import draw, spikes
from .findings import Finding, findings_of, of_the_data, pull_a_round
from .interpolation import Walk, walk
from .membership_inference import Membership, Roc, membership
from .shapley import Shapley, shapley

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
