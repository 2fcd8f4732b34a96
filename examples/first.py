"""A whole experiment on one screen: ten parties with different handwriting data, each with a personal model."""

from torch import nn

from descant import Federation, Sgd, algorithms, compare, parties


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


population = parties.digits(count=10, split="dirichlet", alpha=0.5, seed=0)
solver = Sgd(lr=0.1, steps=20, batch=10)

fed = Federation(net, population, algorithms.FedAvgPlus(), solver=solver, seed=0)
for round in fed.rounds(10):
    print(round.index, f"{round.scores.personal.mean:.3f}", f"{round.scores.global_model.mean:.3f}")
print(fed.table())

study = compare([algorithms.FedAvg(), algorithms.FedAvgPlus()], net, population, rounds=10, solver=solver)
print(study.table())
