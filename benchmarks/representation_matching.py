"""Cost of representation matching: the paper's table 4, 30 steps of 64 samples, as a ratio to FedAvg.

Each ratio of times comes with the ratio of floating-point operations (forward and backward passes, the frozen model,
the matching layers), and the paper's own ratio, measured on a GPU. Methods take turns, one round each; a ratio is the
median over the turns.

    python benchmarks/representation_matching.py --only MNIST               # or CIFAR10, or KWS

Large networks take long; this is the shortest run for one of them:

    python benchmarks/representation_matching.py --only KWS --parties 2 --methods FA+RM --turns 2
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from math import nan
from statistics import median

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from descant import Algorithm, Federation, Sgd, algorithms, parties
from descant.reporting.table import Table

STEPS = 30
BATCH = 64
VALIDATION = 500  # samples of the server, as in papers/representation_matching; the paper: a very small subset


def mlp() -> nn.Module:
    """MNIST: 784-100-100-10."""
    return nn.Sequential(nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 10))


def cifar() -> nn.Module:
    """CIFAR10: 5 x 5 convolutions of 32 and 64 channels, each pooled, and 1024-10."""
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(4096, 1024), nn.ReLU(), nn.Linear(1024, 10)),
    )


def kws() -> nn.Module:
    """Keyword spotting: four 3 x 3 convolutions of 64 channels, pooled after each pair, and 1024-10."""
    layers = list[nn.Module]()
    depth = 1
    for _ in range(2):
        layers += [nn.Conv2d(depth, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU()]
        layers = [*layers, nn.MaxPool2d(2)]
        depth = 64
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4096, 1024), nn.ReLU(), nn.Linear(1024, 10))


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {  # network and shape of a sample
    "MNIST": (mlp, (784,)),
    "CIFAR10": (cifar, (3, 32, 32)),
    "KWS": (kws, (1, 32, 32)),
}
PAPER = {  # table 4: seconds for 30 steps
    "MNIST": {"FA": 0.39, "FA+WD": 0.41, "FA+RM": 0.42, "FA+AH": 0.39, "FA+RM+AH": 0.43},
    "CIFAR10": {"FA": 0.50, "FA+WD": 0.54, "FA+RM": 0.66, "FA+AH": 0.51, "FA+RM+AH": 0.67},
    "KWS": {"FA": 1.83, "FA+WD": 1.96, "FA+RM": 2.01, "FA+AH": 1.85, "FA+RM+AH": 2.03},
}


def benchmark_methods() -> dict[str, Algorithm]:
    """Return the paper's five methods, rewarded by the server's loss (§3.3), and one rewarded by the clients."""
    average = algorithms.FedAvg()
    matched = algorithms.RepresentationMatching()
    grid = {"lr": (0.0099, 0.01), "work": None}  # nearly equal rounds, so that only the tuning itself is added
    return {
        "FA": average,
        "FA+WD": algorithms.WeightDivergence(),
        "FA+RM": matched,
        "FA+AH": algorithms.AdaptiveHyper(average, **grid),
        "FA+AH, clients": algorithms.AdaptiveHyper(average, **grid, reward="clients"),
        "FA+RM+AH": algorithms.AdaptiveHyper(matched, **grid),
    }


def federation(net: str, count: int, algorithm: Algorithm) -> Federation:
    """Return parties with random samples for 30 steps; adaptive methods also get a validation set."""
    make, shape = NETS[net]
    generator = torch.Generator().manual_seed(0)
    sizes = [VALIDATION, *[STEPS * BATCH] * count]
    validation, *data = [(torch.randn(n, *shape, generator=generator), torch.randint(10, (n,))) for n in sizes]
    needs_validation = algorithm.tune is not algorithms.FedAvg().tune and not algorithm.loss_samples
    population = parties.from_arrays(data, test=0, validation=validation if needs_validation else None)
    return Federation(make, population, algorithm, solver=Sgd(lr=0.01, steps=STEPS, batch=BATCH))


def count_flops(net: str, count: int, algorithm: Algorithm) -> float:
    """Count the floating-point operations of a first round: 30 steps of every party, and what is done only once."""
    fed = federation(net, count, algorithm)
    fed.state = replace(fed.state, execution_mode="looped")
    with FlopCounterMode(display=False) as counter:
        fed.fit(1, progress=False)
    return float(counter.get_total_flops())


def measure(net: str, count: int, turns: int, method_names: list[str]) -> list[dict[str, object]]:
    """Return one row per method, always including FA."""
    methods_by_name = {
        name: algorithm
        for name, algorithm in benchmark_methods().items()
        if name == "FA" or not method_names or name in method_names
    }
    feds = {name: federation(net, count, algorithm) for name, algorithm in methods_by_name.items()}
    times: dict[str, list[float]] = {name: [] for name in feds}
    for turn in range(turns + 1):
        for name, fed in feds.items():
            began = time.process_time()  # of one thread, unaffected by other processes
            fed.fit(1, progress=False)
            if turn:  # the first one warms up
                times[name].append(time.process_time() - began)
    flops = {name: count_flops(net, count, algorithm) for name, algorithm in methods_by_name.items()}
    rows: list[dict[str, object]] = []
    for name, fed in feds.items():
        ratio = median(mine / base for mine, base in zip(times[name], times["FA"], strict=True))
        counted = flops[name] / flops["FA"]
        rows.append(
            {
                "net": net,
                "method": name,
                "execution mode": fed.state.execution_mode,
                "seconds": median(times[name]) / len(fed.population),
                "× FA": ratio,
                "arithmetic ×": counted,
                "time / arithmetic": ratio / counted,
                "paper s": PAPER[net].get(name, nan),
                "paper ×": PAPER[net].get(name, nan) / PAPER[net]["FA"],
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--only", choices=list(NETS))
    parser.add_argument(
        "--parties", type=int, default=10, help="10 as in the paper; 2 is enough for the ratio of matching"
    )
    parser.add_argument(
        "--methods", nargs="+", default=[], choices=list(benchmark_methods()), metavar="NAME", help="in addition to FA"
    )
    given = parser.parse_args()
    torch.set_num_threads(1)
    for net in [given.only] if given.only else NETS:
        rows = measure(net, given.parties, given.turns, given.methods)
        print(f"{Table(tuple(rows[0]), rows)}\n", flush=True)
    print("seconds: 30 steps of 64 samples of one party. × FA is a ratio of times.")


if __name__ == "__main__":
    main()
