"""The demo: real digits, ten parties that differ, six methods. Torch is imported only when it runs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..core.settings import check_settings, setting

if TYPE_CHECKING:
    from torch import nn

    from ..core.algorithm import Algorithm
    from ..studies.study import Study

DESCRIPTION = {
    "data": "the 1797 handwritten digits that come with scikit-learn, over 10 parties; each digit is split in "
    "shares drawn from a Dirichlet(0.5), so every party has its own mix; a fifth of its samples is its test set",
    "model": "a network of 64-32-10 units for each party",
    "work": "20 steps of plain SGD a round (learning rate 0.1, batches of 10), the same draws for every method",
    "chosen": "Fed+ with α=1.0, where the paper has 0.01 (nearly local training in so few rounds); FedGeoMedPlus with "
    "ρ=0.5, about the distance of a model from the global model, where the paper has 10 (so large that the median here "
    "would be the mean)",
    "note": "α and ρ were chosen after trying a few values on these same parties: an illustration, not a benchmark",
}


@dataclass(frozen=True)
class DemoSettings:
    """The length of the demo."""

    rounds: int = setting(30, "Rounds of training.", least=1)
    seeds: int = setting(3, "Number of repetitions, each with other initial models and draws.", least=1)


def run_demo(settings: DemoSettings = DemoSettings(), progress: bool = False) -> Study:  # noqa: B008  a frozen value
    """Compare the majority class, Local, FedAvg, RFA, FedAvgPlus and FedGeoMedPlus on digits.

    >>> run_demo(DemoSettings(rounds=1, seeds=1)).methods
    ('Local', 'FedAvg', 'RFA', 'FedAvgPlus', 'FedGeoMedPlus')
    """
    check_settings(settings, "demo")
    from .. import parties
    from ..studies.study import compare
    from ..training import Sgd

    population = parties.digits(count=10, split="dirichlet", alpha=0.5, seed=0)
    solver = Sgd(lr=0.1, steps=20, batch=10)
    study = compare(
        demo_methods(),
        demo_network,
        population,
        rounds=settings.rounds,
        seeds=settings.seeds,
        progress=progress,
        solver=solver,
    )
    return replace(study, settings={**DESCRIPTION, **study.settings})


def demo_methods() -> list[Algorithm]:
    """Return the methods to compare; the majority class is in every table."""
    from ..algorithms import RFA, FedAvg, FedAvgPlus, FedGeoMedPlus, Local

    return [Local(), FedAvg(), RFA(), FedAvgPlus(alpha=1.0), FedGeoMedPlus(alpha=1.0, rho=0.5)]


def demo_network() -> nn.Module:
    """Return the model of every party."""
    from torch import nn

    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
