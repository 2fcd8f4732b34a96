"""Federated methods: FedAvg is the base, and a method is what it changes. Each can be called with no arguments."""

from collections.abc import Callable, Mapping

from ..core import Algorithm
from .baselines import RFA, CoordinateMedian, FedAvg, FedProx, Local
from .fed_plus import L2GD, FedAvgPlus, FedCoMedPlus, FedGeoMedPlus, FedPlus, FedPlusFixed, FedPlusV1
from .fedrl import FedRL, Period
from .personal import APFL, Ditto, FedPer, FedRep, pFedMe
from .pieces import Among, Sample, Stragglers

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
    "fedrl": FedRL,
}
"""The methods by the names that recipes and the command line use."""

__all__ = [
    "ALGORITHMS",
    "APFL",
    "Among",
    "CoordinateMedian",
    "Ditto",
    "FedAvg",
    "FedAvgPlus",
    "FedCoMedPlus",
    "FedGeoMedPlus",
    "FedPer",
    "FedPlus",
    "FedPlusFixed",
    "FedPlusV1",
    "FedProx",
    "FedRL",
    "FedRep",
    "L2GD",
    "Local",
    "Period",
    "RFA",
    "Sample",
    "Stragglers",
    "pFedMe",
]
