"""A federation in worker processes, with exactly the same numbers as in one process."""

from functools import partial

from torch import nn

from descant import Federation, algorithms, parties
from descant.engines import Processes


def net(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))


def main() -> None:
    # Each worker builds model and parties itself, so pass functions that make them, never the objects.
    model, population = partial(net, 64), partial(parties.digits, count=10, seed=0)
    settings = {"lr": 0.1, "steps": 20, "batch": 10, "seed": 0}
    in_workers = Federation(model, population, algorithms.FedGeoMedPlus(), engine=Processes(workers=2), **settings)
    in_process = Federation(model, population, algorithms.FedGeoMedPlus(), **settings)
    print(in_workers.fit(10).hash() == in_process.fit(10).hash())


if __name__ == "__main__":  # workers import this file, too, and must not run main
    main()
