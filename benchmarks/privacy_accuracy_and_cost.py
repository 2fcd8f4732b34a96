"""Accuracy by ε on the bundled digits, and the cost of a private round.

    python benchmarks/privacy_accuracy_and_cost.py

A linear model, 30 rounds, 3 seeds. Noise comes from the seed, so the numbers are reproducible. A few minutes.
"""

from __future__ import annotations

from statistics import mean, stdev

from torch import nn

from descant import DpSgd, Federation, Sgd, algorithms, parties
from descant.core.algorithm import Algorithm
from descant.core.interfaces import Solver

ROUNDS = 30
SEEDS = 3
PLAIN_SGD = Sgd(lr=0.1, steps=10, batch=10)
LARGER_BATCH_SGD = Sgd(lr=0.5, steps=10, batch=20)


def model() -> nn.Module:
    return nn.Linear(64, 10)


def make_federation(method: Algorithm, solver: Solver, count: int, seed: int = 0) -> Federation:
    population = parties.digits(count=count, split="dirichlet", alpha=1.0, seed=seed)
    return Federation(model, population, method, solver=solver, seed=seed)


def table_row(method: Algorithm, solver: Solver, count: int, noise: str = "–") -> str:
    """Return a table row: the global model's mean accuracy over test sets, and the largest ε of the seeds."""
    feds = [make_federation(method, solver, count, seed).fit(ROUNDS, progress=False) for seed in range(SEEDS)]
    accuracies = [fed.scores().global_model.mean for fed in feds]
    spent = [fed.history_[-1]["epsilon"] for fed in feds if "epsilon" in fed.history_[-1]]
    spent_text = f"{max(spent):.3g}" if spent else "–"
    name = f"{method.name}, {type(solver).__name__}"
    return f"| {name} | {count} | {noise} | {spent_text} | {mean(accuracies):.3f} ± {stdev(accuracies):.3f} |"


def print_costs() -> None:
    """Print the time of the best round of each method, measured in turns on a shared machine."""
    feds = {
        "FedAvg, 100 parties": make_federation(algorithms.FedAvg(weights="uniform"), PLAIN_SGD, 100),
        "CentralDP": make_federation(algorithms.CentralDP(), PLAIN_SGD, 100),
        "LocalDP": make_federation(algorithms.LocalDP(), PLAIN_SGD, 100),
        "FedAvg, 10 parties": make_federation(algorithms.FedAvg(), LARGER_BATCH_SGD, 10),
        "SecureAggregation": make_federation(algorithms.SecureAggregation(), LARGER_BATCH_SGD, 10),
        "DpSgd": make_federation(algorithms.FedAvg(), DpSgd(lr=0.5, steps=10, batch=20), 10),
    }
    for _ in range(20):
        for fed in feds.values():
            fed.fit(3, progress=False)
    for name, fed in feds.items():
        print(f"{name}: {1000 * min(entry['seconds'] for entry in fed.history_):.1f} ms per round")


def main() -> None:
    print("| method | parties | noise z | ε | accuracy |\n| --- | ---: | ---: | ---: | ---: |")
    print(table_row(algorithms.FedAvg(weights="uniform"), PLAIN_SGD, 100))
    for z in (1.0, 2.0, 4.0, 8.0, 16.0):
        method = algorithms.CentralDP(clip=0.3, noise=z, delta=1e-3, source="seed")
        print(table_row(method, PLAIN_SGD, 100, f"{z:g}"))
    for z in (1.0, 4.0):
        method = algorithms.LocalDP(clip=0.3, noise=z, delta=1e-3, source="seed")
        print(table_row(method, PLAIN_SGD, 100, f"{z:g}"))
    print(table_row(algorithms.FedAvg(), LARGER_BATCH_SGD, 10))
    for z in (1.0, 2.0, 4.0):
        solver = DpSgd(lr=0.5, steps=10, batch=20, clip=1.0, noise=z, delta=1e-4, source="seed")
        print(table_row(algorithms.FedAvg(), solver, 10, f"{z:g}"))
    print()
    print_costs()


if __name__ == "__main__":
    main()
