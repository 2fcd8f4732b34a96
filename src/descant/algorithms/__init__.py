"""Federated methods: FedAvg is the base, and a method is what it changes. Each can be called with no arguments."""

from .baselines import RFA, CoordinateMedian, FedAvg, FedProx, Local
from .fed_plus import L2GD, FedAvgPlus, FedCoMedPlus, FedGeoMedPlus, FedPlus, FedPlusFixed, FedPlusV1
from .personal import APFL, Ditto, FedPer, FedRep, pFedMe
from .pieces import Sample, Stragglers

__all__ = [
    "APFL",
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
    "FedRep",
    "L2GD",
    "Local",
    "RFA",
    "Sample",
    "Stragglers",
    "pFedMe",
]
