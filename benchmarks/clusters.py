"""What the engine on Ray costs beside the one in this process, and what a hundred thousand parties cost it.

W2 of `descant bench` (MLP 784-200-200-10, 100 parties, 10 a round, 20 steps of batch 32), one worker with one thread,
by turns; then 100,000 parties with a small model, 1,000 a round, and the memory of all processes. In an environment
that has Ray:

    python benchmarks/clusters.py [--rounds 20] [--parties 100000]
"""

from __future__ import annotations

import argparse
import os
import time
from functools import partial
from statistics import median

import psutil
import torch
from torch import nn

from descant import Federation, algorithms, parties
from descant.engines import InProcess, Ray
from descant.parties import People


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10))


def people(count: int, samples: int, inputs: int) -> People:
    generator = torch.Generator().manual_seed(0)
    shape = (count, samples)
    x, y = torch.randn(*shape, inputs, generator=generator), torch.randint(10, shape, generator=generator)
    return parties.from_arrays(list(zip(x, y, strict=True)), test=0)


def beside(rounds: int) -> None:
    """Seconds a round, by turns."""
    torch.set_num_threads(1)
    ray = Ray(workers=1)
    feds = {
        name: Federation(
            mlp,
            partial(people, 100, 600, 784),
            algorithms.FedAvg(),
            attend=10,
            lr=0.05,
            steps=20,
            batch=32,
            engine=made,
        )
        for name, made in (("in this process", InProcess), ("on Ray", ray))
    }
    times: dict[str, list[float]] = {name: [] for name in feds}
    for turn in range(rounds + 2):
        for name, fed in feds.items():
            began = time.perf_counter()
            fed.fit(1, progress=False)
            if turn > 1:
                times[name].append(time.perf_counter() - began)
    ratio = median(a / b for a, b in zip(times["on Ray"], times["in this process"], strict=True))
    for name, each in times.items():
        print(f"{name:<16}{1000 * median(each):8.1f} ms a round")
    alike = len({fed.hash() for fed in feds.values()}) == 1
    print(f"Ray costs {100 * (ratio - 1):.0f} % more (the median of {rounds} turns). The models are equal: {alike}")
    ray.close()


def many(count: int) -> None:
    """Rounds of 1,000 of them, and the memory that all processes have to themselves."""
    fed = Federation(
        partial(nn.Linear, 10, 10), partial(people, count, 10, 10), algorithms.FedAvgPlus(),
        attend=1000, lr=0.05, steps=5, batch=5, engine=Ray(workers=2),
    )  # fmt: skip
    fed.fit(1, progress=False)
    began = time.perf_counter()
    fed.fit(20, progress=False)
    seconds = (time.perf_counter() - began) / 20
    memory = _memory() / 2**20
    print(f"{count:,} parties, 1,000 a round: {1000 * seconds:.0f} ms a round, {memory:,.0f} MB in all processes")


def _memory() -> int:
    me = psutil.Process(os.getpid())
    return sum(process.memory_full_info().uss for process in (me, *me.children(recursive=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--parties", type=int, default=100_000)
    given = parser.parse_args()
    beside(given.rounds)
    many(given.parties)


if __name__ == "__main__":
    main()
