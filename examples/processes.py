"""All cores at work: the same federation in worker processes, with the same numbers as in one."""

from functools import partial

from torch import nn

from descant import Federation, algorithms, parties
from descant.engines import Processes


def net(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))


def main() -> None:
    # A worker makes model and parties for itself, so they are given as what makes them, never as objects.
    model, people = partial(net, 64), partial(parties.digits, count=10, seed=0)
    settings = {"lr": 0.1, "steps": 20, "batch": 10, "seed": 0}
    there = Federation(model, people, algorithms.FedGeoMedPlus(), engine=Processes(workers=2), **settings)
    here = Federation(model, people, algorithms.FedGeoMedPlus(), **settings)
    print(there.fit(10).hash() == here.fit(10).hash())


if __name__ == "__main__":  # a worker reads this file, too, and must not run it
    main()
