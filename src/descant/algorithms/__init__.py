"""Federated methods: FedAvg is the base, and a method is what it changes. Each can be called with no arguments."""

from typing import TYPE_CHECKING

from ..core.lazy_imports import lazy_exports

if TYPE_CHECKING:
    from ..coresets.proxy_wrapper import StandIns
    from ..privacy.dp_wrappers import CentralPrivacy, Chance, LocalPrivacy
    from ..privacy.secure_aggregation.secure_wrapper import SecureAggregation
    from .adaptive_hyper.reinforce import AdaptiveHyper
    from .asynchronous import FedAsync, FedBuff, Hinge, Polynomial
    from .byzantine import Hostile
    from .decay_schedule import Decaying
    from .fed_plus import L2GD, FedAvgPlus, FedCoMedPlus, FedGeoMedPlus, FedPlus, FedPlusFixed, FedPlusV1
    from .fedavg import RFA, CoordinateMedian, FedAvg, FedProx, Local
    from .fedrl import FedRL, Period
    from .method_names import ALGORITHMS, WRAPPERS
    from .participation import Among, Comes, Drops, Every, Sample, Span, Stragglers, Timetable
    from .personalized import APFL, Ditto, FedPer, FedRep, pFedMe
    from .representation_matching.matching_wrappers import (
        EntropyRegularization,
        RepresentationMatching,
        WeightDivergence,
    )
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            ".method_names": ("ALGORITHMS", "WRAPPERS"),
            "..coresets.proxy_wrapper": ("StandIns",),
            "..privacy.dp_wrappers": ("CentralPrivacy", "Chance", "LocalPrivacy"),
            "..privacy.secure_aggregation.secure_wrapper": ("SecureAggregation",),
            ".adaptive_hyper.reinforce": ("AdaptiveHyper",),
            ".asynchronous": ("FedAsync", "FedBuff", "Hinge", "Polynomial"),
            ".byzantine": ("Hostile",),
            ".decay_schedule": ("Decaying",),
            ".fed_plus": (
                "L2GD",
                "FedAvgPlus",
                "FedCoMedPlus",
                "FedGeoMedPlus",
                "FedPlus",
                "FedPlusFixed",
                "FedPlusV1",
            ),
            ".fedavg": ("RFA", "CoordinateMedian", "FedAvg", "FedProx", "Local"),
            ".fedrl": ("FedRL", "Period"),
            ".participation": ("Among", "Comes", "Drops", "Every", "Sample", "Span", "Stragglers", "Timetable"),
            ".personalized": ("APFL", "Ditto", "FedPer", "FedRep", "pFedMe"),
            ".representation_matching.matching_wrappers": (
                "EntropyRegularization",
                "RepresentationMatching",
                "WeightDivergence",
            ),
        },
    )

__all__ = [
    "ALGORITHMS",
    "APFL",
    "AdaptiveHyper",
    "Among",
    "CentralPrivacy",
    "Chance",
    "Comes",
    "CoordinateMedian",
    "Decaying",
    "Ditto",
    "Drops",
    "EntropyRegularization",
    "Every",
    "FedAsync",
    "FedAvg",
    "FedAvgPlus",
    "FedBuff",
    "FedCoMedPlus",
    "FedGeoMedPlus",
    "FedPer",
    "FedPlus",
    "FedPlusFixed",
    "FedPlusV1",
    "FedProx",
    "FedRL",
    "FedRep",
    "Hinge",
    "Hostile",
    "L2GD",
    "Local",
    "LocalPrivacy",
    "Period",
    "Polynomial",
    "RFA",
    "RepresentationMatching",
    "Sample",
    "SecureAggregation",
    "Span",
    "StandIns",
    "Stragglers",
    "Timetable",
    "WRAPPERS",
    "WeightDivergence",
    "pFedMe",
]
