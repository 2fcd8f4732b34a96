"""Measurements of one federation: scores, findings, collapse, interpolation, attacks. None of them changes the run.

Border to :mod:`descant.studies`: a function here looks at one federation, or at plain numbers, and trains nothing that
stays. Whatever trains several federations and compares them (methods, seeds, coalitions) belongs to ``studies``, which
imports ``analysis`` and is never imported by it.
"""

from typing import TYPE_CHECKING

from ..core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from ..coresets.row_preview import coreset_preview
    from .asset_universes import AssetUniverses, compare_universes
    from .collapse import biggest_jump, lasting_drop
    from .desk_results import BacktestResults, backtest_federation
    from .federation_plots import draw_federation_plot, spikes
    from .findings import Finding, data_note_sentence, federation_findings, proximal_share_per_round
    from .interpolation import Interpolation, interpolate
    from .membership_inference import MembershipAttack, RocCurve, attack_membership
    from .participation_coverage import Coverage, coverage
    from .shapley_values import ShapleyResult, shapley
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "..coresets.row_preview": ("coreset_preview",),
            ".asset_universes": ("AssetUniverses", "compare_universes"),
            ".collapse": ("biggest_jump", "lasting_drop"),
            ".participation_coverage": ("Coverage", "coverage"),
            ".desk_results": ("BacktestResults", "backtest_federation"),
            ".federation_plots": ("draw_federation_plot", "spikes"),
            ".findings": ("Finding", "federation_findings", "data_note_sentence", "proximal_share_per_round"),
            ".interpolation": ("Interpolation", "interpolate"),
            ".membership_inference": ("MembershipAttack", "RocCurve", "attack_membership"),
            ".shapley_values": ("ShapleyResult", "shapley"),
        },
    )

__all__ = [
    "Coverage",
    "Finding",
    "MembershipAttack",
    "RocCurve",
    "ShapleyResult",
    "BacktestResults",
    "AssetUniverses",
    "Interpolation",
    "biggest_jump",
    "coverage",
    "draw_federation_plot",
    "federation_findings",
    "lasting_drop",
    "attack_membership",
    "data_note_sentence",
    "coreset_preview",
    "proximal_share_per_round",
    "shapley",
    "spikes",
    "backtest_federation",
    "compare_universes",
    "interpolate",
]
