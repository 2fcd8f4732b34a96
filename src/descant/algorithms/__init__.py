"""Federated methods: FedAvg is the base, and a method is what it changes. Each can be called with no arguments."""

from typing import TYPE_CHECKING

from ..core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from ..coresets.proxy_wrapper import CoresetProxies
    from ..privacy.dp_wrappers import CentralDP, LocalDP, PoissonSampling
    from ..privacy.secure_aggregation.secure_wrapper import SecureAggregation
    from .adaptive_hyper.reinforce import AdaptiveHyper
    from .asynchronous import FedAsync, FedBuff, Hinge, Polynomial
    from .byzantine import ByzantineParties
    from .decay_schedule import DecaySchedule
    from .fed_plus import L2GD, FedAvgPlus, FedCoMedPlus, FedGeoMedPlus, FedPlus, FedPlusFixed, FedPlusV1
    from .fedavg_and_baselines import RFA, CoordinateMedian, FedAvg, FedProx, Local
    from .fedrl import FedRL, Period
    from .method_names import ALGORITHMS, WRAPPERS
    from .participation import (
        Dropouts,
        FirstParties,
        PeriodicParticipation,
        PresenceSpan,
        RandomAvailability,
        Sample,
        Stragglers,
        Timetable,
    )
    from .personalized import APFL, Ditto, FedPer, FedRep, pFedMe
    from .representation_matching.loss_term_wrappers import (
        EntropyRegularization,
        RepresentationMatching,
        WeightDivergence,
    )
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            ".method_names": ("ALGORITHMS", "WRAPPERS"),
            "..coresets.proxy_wrapper": ("CoresetProxies",),
            "..privacy.dp_wrappers": ("CentralDP", "PoissonSampling", "LocalDP"),
            "..privacy.secure_aggregation.secure_wrapper": ("SecureAggregation",),
            ".adaptive_hyper.reinforce": ("AdaptiveHyper",),
            ".asynchronous": ("FedAsync", "FedBuff", "Hinge", "Polynomial"),
            ".byzantine": ("ByzantineParties",),
            ".decay_schedule": ("DecaySchedule",),
            ".fed_plus": (
                "L2GD",
                "FedAvgPlus",
                "FedCoMedPlus",
                "FedGeoMedPlus",
                "FedPlus",
                "FedPlusFixed",
                "FedPlusV1",
            ),
            ".fedavg_and_baselines": ("RFA", "CoordinateMedian", "FedAvg", "FedProx", "Local"),
            ".fedrl": ("FedRL", "Period"),
            ".participation": (
                "FirstParties",
                "RandomAvailability",
                "Dropouts",
                "PeriodicParticipation",
                "Sample",
                "PresenceSpan",
                "Stragglers",
                "Timetable",
            ),
            ".personalized": ("APFL", "Ditto", "FedPer", "FedRep", "pFedMe"),
            ".representation_matching.loss_term_wrappers": (
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
    "FirstParties",
    "CentralDP",
    "PoissonSampling",
    "RandomAvailability",
    "CoordinateMedian",
    "DecaySchedule",
    "Ditto",
    "Dropouts",
    "EntropyRegularization",
    "PeriodicParticipation",
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
    "ByzantineParties",
    "L2GD",
    "Local",
    "LocalDP",
    "Period",
    "Polynomial",
    "RFA",
    "RepresentationMatching",
    "Sample",
    "SecureAggregation",
    "PresenceSpan",
    "CoresetProxies",
    "Stragglers",
    "Timetable",
    "WRAPPERS",
    "WeightDivergence",
    "pFedMe",
]
