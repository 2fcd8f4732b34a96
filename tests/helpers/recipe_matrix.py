"""Every method as a recipe names it: the cases that run over real silos and on Ray, and reasons for the others.

A new method, wrapper or solver that is missing here fails `laws/test_recipe_matrix_is_complete.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import nn

from descant import Algorithm, DpSgd, Dqn, PolicyGradient, Sgd, Trader
from descant.config import Recipe, read_recipe
from descant.core.interfaces import Solver
from descant.parties import Population
from silo_file_templates import ADAM_TRAINING, AGENT_SILO_FILE, DESK_SILO_FILE, MODEL_AND_METHOD_TABLES, ROWS_SILO_FILE
from toy_problems import (
    cartpole_agents,
    classification_parties,
    generated_desks,
    network,
    policy_network,
    trading_network,
)


@dataclass(frozen=True)
class RecipeCase:
    """A [method] table and its [training] table."""

    method: str
    method_settings: str = ""
    training_table: str = ADAM_TRAINING
    network_address: str = "toy_problems:network"
    silo_file_template: str = ROWS_SILO_FILE

    @property
    def recipe_text(self) -> str:
        tables = MODEL_AND_METHOD_TABLES.format(method=self.method).replace(
            "toy_problems:network", self.network_address
        )
        return tables.replace(ADAM_TRAINING, self.training_table) + self.method_settings + "\n"

    @property
    def recipe(self) -> Recipe:
        return read_recipe(self.recipe_text)

    def algorithm(self) -> Algorithm:
        return self.recipe.algorithm()


DP_SGD_TRAINING = """
solver = "dp_sgd"
lr = 0.1
steps = 3
batch = 4
source = "seed"
"""
DQN_TRAINING = """
solver = "dqn"
steps = 50
learning_starts = 20
batch = 8
epsilon_steps = 60
"""
POLICY_GRADIENT_TRAINING = """
solver = "policy_gradient"
iterations = 2
episodes = 3
gradient_steps = 3
batch = 16
"""
TRADER_TRAINING = """
solver = "trader"
lr = 1e-3
iterations = 6
batch = 8
regenerate_every = 10
synthetic_days = 20
"""
CORESET_PROXY_WRAP = 'wrap = [{wrapper = "coreset_proxies", share = 0.4}]'

# Over silos each of these equals the simulation bit for bit. Methods of the laws have the same names here.
SILO_CASES: dict[str, RecipeCase] = {
    "Local": RecipeCase("local"),
    "FedAvg": RecipeCase("fedavg"),
    "FedProx": RecipeCase("fedprox", "mu = 0.1"),
    "RFA": RecipeCase("rfa"),
    "CoordinateMedian": RecipeCase("comed"),
    "FedAvgPlus": RecipeCase("fedavg+", "alpha = 1.0\nrho = 2.0"),
    "FedGeoMedPlus": RecipeCase("fedgeomed+", "alpha = 1.0\nrho = 0.1"),
    "FedCoMedPlus": RecipeCase("fedcomed+", "alpha = 1.0\nrho = 0.05"),
    "FedPlus, p=∞": RecipeCase("fed+", 'penalty = {is = "NormP", p = inf}\nalpha = 1.0\nrho = 0.1'),
    "FedPlus, over all": RecipeCase("fed+", 'penalty = {is = "Norm2"}\nalpha = 1.0\nrho = 0.1\naggregate_over = "all"'),
    "FedPlus, mixed start": RecipeCase("fed+", 'penalty = {is = "Norm2"}\nalpha = 1.0\nrho = 0.1\ninit_mix = 0.3'),
    "FedPlusFixed": RecipeCase("fed+fixed", "gamma = 0.3\nalpha = 1.0"),
    "FedPlusV1": RecipeCase("fed+v1", 'penalty = {is = "Norm2"}\nalpha = {start = 0.3, factor = 0.9}'),
    "L2GD": RecipeCase("l2gd", "lam = 0.5\np = 0.3"),
    "Ditto": RecipeCase("ditto"),
    "APFL": RecipeCase("apfl"),
    "pFedMe": RecipeCase("pfedme"),
    "FedPer": RecipeCase("fedper"),
    "FedRep": RecipeCase("fedrep"),
    "FedAvg+AH": RecipeCase(
        "fedavg",
        'wrap = [{wrapper = "adaptive", lr = [0.05, 0.1, 0.2], work = [1, 2, 4], '
        'reward = "clients", loss_samples = 4}]',
    ),
    "FedAvg, decaying": RecipeCase("fedavg", 'wrap = [{wrapper = "decay", lr_factor = 0.9, work_factor = 0.7}]'),
    "FedAvg, of all samples": RecipeCase("fedavg", 'normalize = "total"'),
    "matching": RecipeCase("fedgeomed+", 'alpha = 1.0\nrho = 0.1\nwrap = [{wrapper = "matching"}]'),
    "divergence, unsure": RecipeCase(
        "fedavg", 'wrap = [{wrapper = "divergence", coefficient = 0.1}, {wrapper = "entropy", min_entropy = 1.0}]'
    ),
    "stragglers": RecipeCase("fedavg", "stragglers = 0.5"),
    "FedAvg, private": RecipeCase("fedavg", 'wrap = [{wrapper = "central_dp", clip = 0.1, source = "seed"}]'),
    "FedAvgPlus, private": RecipeCase(
        "fedavg+", 'alpha = 1.0\nwrap = [{wrapper = "central_dp", clip = 0.1, source = "seed"}]'
    ),
    "FedProx, private at parties": RecipeCase(
        "fedprox", 'mu = 0.1\nwrap = [{wrapper = "local_dp", clip = 0.1, source = "seed"}]'
    ),
    "FedAvg, secure": RecipeCase("fedavg", 'wrap = [{wrapper = "secure"}]'),
    "FedRep, secure": RecipeCase("fedrep", 'wrap = [{wrapper = "secure"}]'),
    "FedAvg, samples private": RecipeCase("fedavg", training_table=DP_SGD_TRAINING),
    "FedBuff": RecipeCase("fedbuff", "buffer_size = 3"),  # the number of silos, so that no reply is early or late
    "FedRL": RecipeCase("fedrl", "period = 2\nfactor = 2.0"),  # without rewards all weights are equal
    "FedRL, DQN": RecipeCase(
        "fedrl", "period = 40\nfactor = 1.5", DQN_TRAINING, "toy_problems:policy_network", AGENT_SILO_FILE
    ),
    "FedAvgPlus, policy gradient": RecipeCase(
        "fedavg+", "alpha = 1.0", POLICY_GRADIENT_TRAINING, "toy_problems:policy_network", AGENT_SILO_FILE
    ),
    "FedGeoMedPlus, desks": RecipeCase(
        "fedgeomed+", "alpha = 1.0\nrho = 0.1", TRADER_TRAINING, "toy_problems:trading_network", DESK_SILO_FILE
    ),
}
# Silos reject these: see NOT_OVER_SILOS_REASONS.
SIMULATION_ONLY_CASES: dict[str, RecipeCase] = {
    "byzantine": RecipeCase("rfa", 'wrap = [{wrapper = "byzantine", scale = -1.0}]'),
}
# Over silos these depend on the order of arrival, so no simulation equals them.
ARRIVAL_ORDER_CASES: dict[str, RecipeCase] = {
    "FedBuff, two of three": RecipeCase("fedbuff", "buffer_size = 2"),
    "FedAsync": RecipeCase("fedasync"),
}
CORESET_PROXY_CASE = RecipeCase("fedavg", CORESET_PROXY_WRAP)  # over silos it needs a vault and an absent party
ALL_SILO_CASES = {**SILO_CASES, **ARRIVAL_ORDER_CASES, "coreset_proxies": CORESET_PROXY_CASE}

NOT_OVER_SILOS_REASONS = {
    "byzantine": "the server would falsify what real parties send",
}
NOT_IN_RECIPES_REASONS = {
    "FedPlus, by layer": "a penalty for each layer is an object that a recipe cannot express",
    "FedAvg, changes": "the content of a reply follows from the method and is not a setting",
}

# Cases for Ray, by the name of the solver.
SOLVER_CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Population], Solver]] = {
    "sgd": (network, partial(classification_parties, 4), Sgd(lr=0.1, steps=3, batch=4)),
    "dp_sgd": (network, partial(classification_parties, 4), DpSgd(lr=0.1, steps=3, batch=4, source="seed")),
    "dqn": (
        policy_network,
        cartpole_agents,
        Dqn(steps=50, learning_starts=20, batch=8, epsilon_steps=60),
    ),
    "policy_gradient": (
        policy_network,
        cartpole_agents,
        PolicyGradient(iterations=2, episodes=3, gradient_steps=3, batch=16),
    ),
    "trader": (
        trading_network,
        generated_desks,
        Trader(lr=1e-3, iterations=6, batch=8, regenerate_every=10, synthetic_days=20),
    ),
}
