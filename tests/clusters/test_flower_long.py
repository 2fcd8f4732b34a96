"""Every method that a recipe can name over a real federation, and every kind of process killed again and again.

`bash scripts/engines --long` runs this, and keeps what came of it in docs/engines.json.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from test_flower import ROUNDS, Lab, lab, simulated  # noqa: F401

from problems import METHODS

WAYS: dict[str, tuple[str, str]] = {  # the methods of the laws, as a recipe names them
    "Local": ("local", ""),
    "FedAvg": ("fedavg", ""),
    "FedProx": ("fedprox", "mu = 0.1"),
    "RFA": ("rfa", ""),
    "CoordinateMedian": ("comed", ""),
    "FedAvgPlus": ("fedavg+", "alpha = 1.0\nrho = 2.0"),
    "FedGeoMedPlus": ("fedgeomed+", "alpha = 1.0\nrho = 0.1"),
    "FedCoMedPlus": ("fedcomed+", "alpha = 1.0\nrho = 0.05"),
    "FedPlus, p=∞": ("fed+", 'penalty = {is = "NormP", p = inf}\nalpha = 1.0\nrho = 0.1'),
    "FedPlus, over all": ("fed+", 'penalty = {is = "Norm2"}\nalpha = 1.0\nrho = 0.1\nover = "all"'),
    "FedPlus, mixed start": ("fed+", 'penalty = {is = "Norm2"}\nalpha = 1.0\nrho = 0.1\ninit_mix = 0.3'),
    "FedPlusFixed": ("fed+fixed", "gamma = 0.3\nalpha = 1.0"),
    "FedPlusV1": ("fed+v1", 'penalty = {is = "Norm2"}\nalpha = {start = 0.3, factor = 0.9}'),
    "L2GD": ("l2gd", "lam = 0.5\np = 0.3"),
    "Ditto": ("ditto", ""),
    "APFL": ("apfl", ""),
    "pFedMe": ("pfedme", ""),
    "FedPer": ("fedper", ""),
    "FedRep": ("fedrep", ""),
    "FedAvg+AH": (
        "fedavg",
        'wrap = [{by = "adaptive", lr = [0.05, 0.1, 0.2], work = [1, 2, 4], reward = "clients", measure = 4}]',
    ),
    "FedAvg, decaying": ("fedavg", 'wrap = [{by = "decay", lr = 0.9, work = 0.7}]'),
    "FedAvg, of all samples": ("fedavg", 'normalise = "total"'),
    "matching": ("fedgeomed+", 'alpha = 1.0\nrho = 0.1\nwrap = [{by = "matching"}]'),
    "divergence, unsure": ("fedavg", 'wrap = [{by = "divergence", coefficient = 0.1}, {by = "entropy", least = 1.0}]'),
    "stragglers": ("fedavg", "stragglers = 0.5"),
}
NOT_BY_RECIPE = {"FedPlus, by layer", "FedAvg, changes"}  # a recipe has no words for them


def test_no_method_is_forgotten() -> None:
    assert WAYS.keys() | NOT_BY_RECIPE == METHODS.keys()


@pytest.mark.parametrize("name", WAYS)
def test_every_method_deployed_is_the_simulation(lab: Callable[..., Lab], tmp_path: Path, name: str) -> None:  # noqa: F811
    one = lab(*WAYS[name])
    one.begin()
    assert torch.equal(one.done(), simulated(tmp_path))


def superlink(one: Lab) -> None:
    one.child("server", "flower-superlink").kill()


def silo(one: Lab) -> None:
    one.kill("south")
    one.join("south")


def driver(one: Lab) -> None:
    one.kill("server")
    time.sleep(1)
    one.serve()


@pytest.mark.parametrize("kill", [superlink, silo, driver])
def test_a_kill_in_every_round_changes_nothing(
    lab: Callable[..., Lab],  # noqa: F811
    tmp_path: Path,
    kill: Callable[[Lab], None],
) -> None:
    one = lab("fedgeomed+")
    one.begin()
    for round in range(1, ROUNDS):
        one.reached(round)
        kill(one)
    assert torch.equal(one.done(), simulated(tmp_path))
