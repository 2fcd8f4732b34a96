"""Instruments: what a table does not show. Each is one call on a federation, costs little, and changes nothing."""

from typing import TYPE_CHECKING

from ..core.lazy_imports import lazy_exports

if TYPE_CHECKING:
    from ..coresets.preview import preview
    from .asset_universes import Universes, universes
    from .collapse import biggest_jump, lasting_fall
    from .desk_results import Traded, traded
    from .federation_plots import draw, spikes
    from .findings import Finding, findings_of, of_the_data, pull_a_round
    from .interpolation import Walk, walk
    from .membership_inference import Membership, Roc, membership
    from .participation_coverage import Coverage, coverage
    from .shapley_values import Shapley, shapley
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "..coresets.preview": ("preview",),
            ".asset_universes": ("Universes", "universes"),
            ".collapse": ("biggest_jump", "lasting_fall"),
            ".participation_coverage": ("Coverage", "coverage"),
            ".desk_results": ("Traded", "traded"),
            ".federation_plots": ("draw", "spikes"),
            ".findings": ("Finding", "findings_of", "of_the_data", "pull_a_round"),
            ".interpolation": ("Walk", "walk"),
            ".membership_inference": ("Membership", "Roc", "membership"),
            ".shapley_values": ("Shapley", "shapley"),
        },
    )

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
