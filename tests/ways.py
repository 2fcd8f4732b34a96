"""Every method as a recipe names it: what runs over real silos and on Ray, and what does not, with the reason.

A method, a wrapper or a solver that is new and not here fails `test_ways.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import nn

from descant import Algorithm, Dqn, PolicyGradient, PrivateSgd, Sgd, Trader
from descant.config import Recipe, read
from descant.core.interfaces import Solver
from descant.parties import People
from problems import actor, agents, classes, dealer, desks, network
from teams import ACTING, LEARNING, TEAM, TRADING, WORK


@dataclass(frozen=True)
class Way:
    """A [method] and its [work]."""

    method: str
    more: str = ""
    work: str = WORK
    net: str = "problems:network"
    team: str = TEAM

    @property
    def text(self) -> str:
        """As it stands in a recipe."""
        learning = LEARNING.format(method=self.method).replace("problems:network", self.net)
        return learning.replace(WORK, self.work) + self.more + "\n"

    @property
    def recipe(self) -> Recipe:
        return read(self.text)

    def algorithm(self) -> Algorithm:
        return self.recipe.algorithm()


HIDING = """
solver = "private_sgd"
lr = 0.1
steps = 3
batch = 4
source = "seed"
"""
VALUING = """
solver = "dqn"
steps = 50
begin = 20
batch = 8
explore_steps = 60
"""
PLAYING = """
solver = "policy_gradient"
iterations = 2
episodes = 3
updates = 3
batch = 16
"""
DEALING = """
solver = "trader"
lr = 1e-3
iterations = 6
batch = 8
renew = 10
year = 20
"""
SEALING = 'wrap = [{by = "stand-ins", share = 0.4}]'

WAYS: dict[str, Way] = {  # over silos each is the simulation, bit for bit; the methods of the laws have their names
    "Local": Way("local"),
    "FedAvg": Way("fedavg"),
    "FedProx": Way("fedprox", "mu = 0.1"),
    "RFA": Way("rfa"),
    "CoordinateMedian": Way("comed"),
    "FedAvgPlus": Way("fedavg+", "alpha = 1.0\nrho = 2.0"),
    "FedGeoMedPlus": Way("fedgeomed+", "alpha = 1.0\nrho = 0.1"),
    "FedCoMedPlus": Way("fedcomed+", "alpha = 1.0\nrho = 0.05"),
    "FedPlus, p=∞": Way("fed+", 'penalty = {is = "NormP", p = inf}\nalpha = 1.0\nrho = 0.1'),
    "FedPlus, over all": Way("fed+", 'penalty = {is = "Norm2"}\nalpha = 1.0\nrho = 0.1\nover = "all"'),
    "FedPlus, mixed start": Way("fed+", 'penalty = {is = "Norm2"}\nalpha = 1.0\nrho = 0.1\ninit_mix = 0.3'),
    "FedPlusFixed": Way("fed+fixed", "gamma = 0.3\nalpha = 1.0"),
    "FedPlusV1": Way("fed+v1", 'penalty = {is = "Norm2"}\nalpha = {start = 0.3, factor = 0.9}'),
    "L2GD": Way("l2gd", "lam = 0.5\np = 0.3"),
    "Ditto": Way("ditto"),
    "APFL": Way("apfl"),
    "pFedMe": Way("pfedme"),
    "FedPer": Way("fedper"),
    "FedRep": Way("fedrep"),
    "FedAvg+AH": Way(
        "fedavg",
        'wrap = [{by = "adaptive", lr = [0.05, 0.1, 0.2], work = [1, 2, 4], reward = "clients", measure = 4}]',
    ),
    "FedAvg, decaying": Way("fedavg", 'wrap = [{by = "decay", lr = 0.9, work = 0.7}]'),
    "FedAvg, of all samples": Way("fedavg", 'normalise = "total"'),
    "matching": Way("fedgeomed+", 'alpha = 1.0\nrho = 0.1\nwrap = [{by = "matching"}]'),
    "divergence, unsure": Way(
        "fedavg", 'wrap = [{by = "divergence", coefficient = 0.1}, {by = "entropy", least = 1.0}]'
    ),
    "stragglers": Way("fedavg", "stragglers = 0.5"),
    "FedAvg, private": Way("fedavg", 'wrap = [{by = "central_privacy", clip = 0.1, source = "seed"}]'),
    "FedAvgPlus, private": Way(
        "fedavg+", 'alpha = 1.0\nwrap = [{by = "central_privacy", clip = 0.1, source = "seed"}]'
    ),
    "FedProx, private at parties": Way(
        "fedprox", 'mu = 0.1\nwrap = [{by = "local_privacy", clip = 0.1, source = "seed"}]'
    ),
    "FedAvg, secure": Way("fedavg", 'wrap = [{by = "secure"}]'),
    "FedRep, secure": Way("fedrep", 'wrap = [{by = "secure"}]'),
    "FedAvg, samples private": Way("fedavg", work=HIDING),
    "FedBuff": Way("fedbuff", "buffer = 3"),  # so many as there are silos: nobody is early or late
    "FedRL": Way("fedrl", "period = 2\nfactor = 2.0"),  # without rewards all count alike
    "FedRL, DQN": Way("fedrl", "period = 40\nfactor = 1.5", VALUING, "problems:actor", ACTING),
    "FedAvgPlus, policy gradient": Way("fedavg+", "alpha = 1.0", PLAYING, "problems:actor", ACTING),
    "FedGeoMedPlus, desks": Way("fedgeomed+", "alpha = 1.0\nrho = 0.1", DEALING, "problems:dealer", TRADING),
}
SIMULATED: dict[str, Way] = {  # over silos these are refused: see NOT_OVER_SILOS
    "hostile": Way("rfa", 'wrap = [{by = "hostile", scale = -1.0}]'),
}
UNORDERED: dict[str, Way] = {  # over silos these go on with whoever is first: there is nothing to compare them with
    "FedBuff, two of three": Way("fedbuff", "buffer = 2"),
    "FedAsync": Way("fedasync"),
}
STOOD_IN = Way("fedavg", SEALING)  # over silos with a vault, and with somebody away
EVERY_WAY = {**WAYS, **UNORDERED, "stand-ins": STOOD_IN}

NOT_OVER_SILOS = {
    "hostile": "the server would falsify what real parties send",
}
NOT_BY_RECIPE = {
    "FedPlus, by layer": "a penalty of its own for each layer is an object, for which recipes have no word",
    "FedAvg, changes": "what a party reports follows from the method, and is no setting",
}


SOLVED: dict[str, tuple[Callable[[], nn.Module], Callable[[], People], Solver]] = {  # on Ray, by the solver's name
    "sgd": (network, partial(classes, 4), Sgd(lr=0.1, steps=3, batch=4)),
    "private_sgd": (network, partial(classes, 4), PrivateSgd(lr=0.1, steps=3, batch=4, source="seed")),
    "dqn": (
        actor,
        agents,
        Dqn(steps=50, begin=20, batch=8, explore_steps=60),
    ),
    "policy_gradient": (
        actor,
        agents,
        PolicyGradient(iterations=2, episodes=3, updates=3, batch=16),
    ),
    "trader": (
        dealer,
        desks,
        Trader(lr=1e-3, iterations=6, batch=8, renew=10, year=20),
    ),
}
