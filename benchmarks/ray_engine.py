"""What the engine on Ray costs beside the one in this process, and what a hundred thousand parties cost it.

W2 of `descant bench` (MLP 784-200-200-10, 100 parties, 10 a round, 20 steps of batch 32), one worker with one thread,
by turns; then 10,000 and 100,000 parties with a small model, 1,000 a round, two workers, each in a process of its own,
and the memory of this process, of the workers and of Ray's own; then W2's model with Adam, all 100 parties a round, one
step each, so that what they remember (1.6 MB each) is most of what there is to carry. In an environment that has Ray:

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
    """Seconds a round, by turns."""
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
            engine=made,
        )
        for name, made in (("in this process", InProcess), ("on Ray", ray))
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
        print(f"{name:<16}{1000 * median(each):8.1f} ms a round")
    equal = len({fed.hash() for fed in federations.values()}) == 1
    print(f"Ray costs {100 * (ratio - 1):.0f} % more (the median of {rounds} turns). The models are equal: {equal}")
    ray.close()


def measure_many_parties(count: int) -> None:
    """Rounds of 1,000 of them, and the memory that processes have to themselves, as it was at its most."""
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
    memory_text = ", ".join(f"{whose} {size / 2**20:,.0f} MB" for whose, size in peak_memory.items())
    print(f"{count:,} parties, 1,000 a round: {1000 * seconds:.0f} ms a round; {memory_text}")


def measure_party_state(rounds: int) -> None:
    """Rounds of parties that remember more than they do."""
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
        f"100 parties that remember 1.6 MB each: {1000 * median(times):.0f} ms a round; "
        f"{held_bytes / 2**20:.0f} MB of it with the driver, {unique_memory()['driver'] / 2**20:,.0f} MB in all"
    )


def unique_memory() -> Counter[str]:
    """What nobody else has a part in, by whose it is."""
    me = psutil.Process(os.getpid())
    found = Counter[str]()
    for process in (me, *me.children(recursive=True)):
        name = " ".join(process.cmdline())
        owner = "driver" if process == me else "two workers" if "ray::Hand" in name else "Ray itself"
        found[owner] += process.memory_full_info().uss
    return found


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
    for count in given.parties:  # what one has held is not counted to the next
        subprocess.run([sys.executable, __file__, "--rounds", "0", "--parties", str(count)], check=True)


if __name__ == "__main__":
    main()
