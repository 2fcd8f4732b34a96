"""Names of methods and wrappers in recipes and on the command line."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..core.algorithm import Algorithm
from ..coresets.proxy_wrapper import CoresetProxies
from ..privacy.dp_wrappers import CentralDP, LocalDP
from ..privacy.secure_aggregation.secure_wrapper import SecureAggregation
from .adaptive_hyper.reinforce import AdaptiveHyper
from .asynchronous import FedAsync, FedBuff
from .byzantine import ByzantineParties
from .decay_schedule import DecaySchedule
from .fed_plus import L2GD, FedAvgPlus, FedCoMedPlus, FedGeoMedPlus, FedPlus, FedPlusFixed, FedPlusV1
from .fedavg_and_baselines import RFA, CoordinateMedian, FedAvg, FedProx, Local
from .fedrl import FedRL
from .method_aliases import canonical_method_name
from .personalized import APFL, Ditto, FedPer, FedRep, pFedMe
from .representation_matching.loss_term_wrappers import EntropyRegularization, RepresentationMatching, WeightDivergence

__all__ = ["ALGORITHMS", "WRAPPERS", "canonical_method_name"]

ALGORITHMS: Mapping[str, Callable[..., Algorithm]] = {
    "local": Local,
    "fedavg": FedAvg,
    "fedprox": FedProx,
    "rfa": RFA,
    "comed": CoordinateMedian,
    "fed+": FedPlus,
    "fedavg+": FedAvgPlus,
    "fedgeomed+": FedGeoMedPlus,
    "fedcomed+": FedCoMedPlus,
    "fed+fixed": FedPlusFixed,
    "fed+v1": FedPlusV1,
    "l2gd": L2GD,
    "ditto": Ditto,
    "apfl": APFL,
    "pfedme": pFedMe,
    "fedper": FedPer,
    "fedrep": FedRep,
    "fedasync": FedAsync,
    "fedbuff": FedBuff,
    "fedrl": FedRL,
}
"""The methods by their canonical names; `canonical_method_name` maps other spellings to these."""

WRAPPERS: Mapping[str, Callable[..., Algorithm]] = {
    "entropy": EntropyRegularization,
    "divergence": WeightDivergence,
    "matching": RepresentationMatching,
    "adaptive": AdaptiveHyper,
    "decay": DecaySchedule,
    "coreset_proxies": CoresetProxies,
    "byzantine": ByzantineParties,
    "central_dp": CentralDP,
    "local_dp": LocalDP,
    "secure": SecureAggregation,
}
"""The wrappers by the names that recipes use: each takes the method as ``base``."""
