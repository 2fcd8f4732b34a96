"""Time of a round in each execution mode, by model size and number of parties.

`STACK_BYTES` and `MAX_VECTORIZED_PARAMETERS` in `descant/training/stacked_descent.py` come from this table. Run it
on a quiet machine:

    python benchmarks/execution_modes.py            # a minute or two; --threads 2 for two threads
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

import torch
from torch import nn

from descant import Federation, algorithms, parties
from descant.reporting.table import Table

WIDTHS = (0, 16, 64, 128, 256, 512)  # hidden units of 784-h-10; 0 is the logistic regression
COUNTS = (2, 10, 50)
OTHER_MODES = ("single", "vectorized", "looped")


def make_population(count: int) -> parties.Population:
    """Return parties with 60 random images each."""
    generator = torch.Generator().manual_seed(0)
    data = [
        (torch.rand(60, 784, generator=generator), torch.randint(10, (60,), generator=generator)) for _ in range(count)
    ]
    return parties.from_arrays(data, test=0)


def net(width: int) -> nn.Module:
    """Return the network 784-width-10, or a linear model if the width is 0."""
    if not width:
        return nn.Linear(784, 10)
    return nn.Sequential(nn.Linear(784, width), nn.ReLU(), nn.Linear(width, 10))


def best_round_seconds(width: int, count: int, execution_mode: str, rounds: int = 3) -> float:
    """Return the best time of a round of 20 steps of batch 10."""
    fed = Federation(net(width), make_population(count), algorithms.FedAvg(), lr=0.1, steps=20, batch=10)
    fed.state = replace(fed.state, execution_mode=execution_mode)
    fed.fit(1, progress=False)
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        fed.fit(1, progress=False)
        times.append(time.perf_counter() - began)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    torch.set_num_threads(parser.parse_args().threads)
    rows = []
    for width in WIDTHS:
        for count in COUNTS:
            stacked, *others = (best_round_seconds(width, count, mode) for mode in ("stacked", *OTHER_MODES))
            rows.append(
                {
                    "model": f"784-{width}-10" if width else "784-10",
                    "parameters": sum(p.numel() for p in net(width).parameters()),
                    "parties": count,
                    "stacked ms": 1e3 * stacked,
                    **{f"{mode} ×": seconds / stacked for mode, seconds in zip(OTHER_MODES, others, strict=True)},
                }
            )
    print(Table(tuple(rows[0]), rows, "× is the time relative to stacked.", decimals={"stacked ms": 1}))


if __name__ == "__main__":
    main()
