"""Cost of the Ray engine compared with the in-process engine, and with 100,000 parties.

Three measurements, in an environment that has Ray. First, W2 of `scripts/bench` (MLP 784-200-200-10, 100 parties, 10
per round, 20 steps of batch 32), one worker with one thread, in turns. Second, W2's model with Adam, all 100 parties
per round, one step each, so that party state (1.6 MB each) dominates the transfers. Third, 10,000 and 100,000 parties
with a small model, 1,000 per round, two workers, each in a new process, with the memory of the driver, the workers and
Ray itself:

    python benchmarks/ray_engine.py [--rounds 20] [--parties 10000 100000]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections import Counter
from functools import partial
from statistics import median

import psutil
import torch
from torch import nn

from descant import Federation, Sgd, algorithms, parties
from descant.engines import InProcess, Ray
from descant.parties import Population


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10))


def make_population(count: int, samples: int, inputs: int) -> Population:
    generator = torch.Generator().manual_seed(0)
    shape = (count, samples)
    x = torch.randn(*shape, inputs, generator=generator)
    y = torch.randint(10, shape, generator=generator)
    return parties.from_arrays(list(zip(x, y, strict=True)), test=0)


def compare_engines(rounds: int) -> None:
    """Measure seconds per round of both engines in turns."""
    torch.set_num_threads(1)
    ray = Ray(workers=1)
    federations = {
        name: Federation(
            mlp,
            partial(make_population, 100, 600, 784),
            algorithms.FedAvg(),
            participation=10,
            lr=0.05,
            steps=20,
            batch=32,
            engine=engine,
        )
        for name, engine in (("in this process", InProcess), ("on Ray", ray))
    }
    times: dict[str, list[float]] = {name: [] for name in federations}
    for turn in range(rounds + 2):
        for name, fed in federations.items():
            began = time.perf_counter()
            fed.fit(1, progress=False)
            if turn > 1:
                times[name].append(time.perf_counter() - began)
    ratio = median(a / b for a, b in zip(times["on Ray"], times["in this process"], strict=True))
    for name, each in times.items():
        print(f"{name:<16}{1000 * median(each):8.1f} ms per round")
    equal = len({fed.hash() for fed in federations.values()}) == 1
    print(f"Ray costs {100 * (ratio - 1):.0f} % more (the median of {rounds} turns). The models are equal: {equal}")
    ray.close()


def measure_many_parties(count: int) -> None:
    """Measure rounds of 1,000 parties, and the peak private memory of the processes."""
    fed = Federation(
        partial(nn.Linear, 10, 10), partial(make_population, count, 10, 10), algorithms.FedAvgPlus(),
        participation=1000, solver=Sgd(lr=0.05, steps=5, batch=5, optimizer="Adam"), engine=Ray(workers=2),
    )  # fmt: skip
    fed.fit(1, progress=False)
    peak_memory = Counter[str]()
    seconds = 0.0
    for _ in range(4):
        began = time.perf_counter()
        fed.fit(5, progress=False)
        seconds += (time.perf_counter() - began) / 20
        peak_memory |= unique_memory()
    memory_text = ", ".join(f"{owner} {size / 2**20:,.0f} MB" for owner, size in peak_memory.items())
    print(f"{count:,} parties, 1,000 per round: {1000 * seconds:.0f} ms per round; {memory_text}")


def measure_party_state(rounds: int) -> None:
    """Measure rounds of parties with large party state and little work."""
    torch.set_num_threads(1)
    fed = Federation(
        mlp, partial(make_population, 100, 32, 784), algorithms.FedAvg(),
        solver=Sgd(lr=0.05, steps=1, batch=32, optimizer="Adam"), engine=Ray(workers=2),
    )  # fmt: skip
    fed.fit(2, progress=False)
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        fed.fit(1, progress=False)
        times.append(time.perf_counter() - began)
    held_bytes = fed.engine_.party_states.held_bytes  # type: ignore[attr-defined]
    print(
        f"100 parties with 1.6 MB of party state each: {1000 * median(times):.0f} ms per round; "
        f"{held_bytes / 2**20:.0f} MB of it in the driver, {unique_memory()['driver'] / 2**20:,.0f} MB in all"
    )


def unique_memory() -> Counter[str]:
    """Return the private memory by owner: driver, workers, Ray."""
    driver = psutil.Process(os.getpid())
    memory = Counter[str]()
    for process in (driver, *driver.children(recursive=True)):
        name = " ".join(process.cmdline())
        owner = "driver" if process == driver else "two workers" if "ray::RayWorker" in name else "Ray itself"
        memory[owner] += process.memory_full_info().uss
    return memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--parties", type=int, nargs="+", default=[10_000, 100_000])
    given = parser.parse_args()
    if given.rounds:
        compare_engines(given.rounds)
        measure_party_state(given.rounds)
    if len(given.parties) == 1:
        measure_many_parties(given.parties[0])
        return
    for count in given.parties:  # new processes, so that memory of one does not count for the next
        subprocess.run([sys.executable, __file__, "--rounds", "0", "--parties", str(count)], check=True)


if __name__ == "__main__":
    main()
