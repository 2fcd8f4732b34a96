"""Cost of recording per round: W1 of `scripts/bench` with FedGeoMed+, with and without a run folder, in turns.

python benchmarks/recording_cost.py [--rounds 600]        # half a minute, on one thread
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import mean

import numpy as np
import torch
from torch import nn

from descant import Federation, algorithms, parties
from descant.tracking import Run

ROUNDS_PER_TURN = 100  # rounds


def make_population() -> parties.Population:
    """Return 1,000 parties of different sizes."""
    rng = np.random.default_rng(0)
    sizes = np.maximum(10, rng.lognormal(3.6, 1.0, 1000).astype(int))
    data = [(rng.random((n, 784), dtype=np.float32), rng.integers(0, 10, n)) for n in sizes]
    return parties.from_arrays(data, test=0)


def federation(population: parties.Population) -> Federation:
    """Return a federation with personal models; a snapshot holds those of all parties that ever trained."""
    settings = {"lr": 0.05, "steps": 20, "batch": 10, "participation": 10}
    return Federation(lambda: nn.Linear(784, 10), population, algorithms.FedGeoMedPlus(), **settings)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=600)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    population = make_population()
    plain = federation(population).fit(5, progress=False)
    recorded = federation(population)
    times: dict[str, list[float]] = {"plain": [], "recorded": []}
    with tempfile.TemporaryDirectory() as temporary_folder, Run.start(Path(temporary_folder) / "run", recorded) as run:
        round_iterator = run.rounds(rounds)
        for _ in range(rounds // ROUNDS_PER_TURN):
            began = time.perf_counter()
            for _ in range(ROUNDS_PER_TURN):
                next(round_iterator)
            between = time.perf_counter()
            plain.fit(ROUNDS_PER_TURN, progress=False)
            times["recorded"].append(between - began)
            times["plain"].append(time.perf_counter() - between)
    with_run, without = (1e3 * mean(times[name]) / ROUNDS_PER_TURN for name in ("recorded", "plain"))
    print(f"{without:.2f} ms per round; recorded {with_run:.2f} ms: {with_run - without:.2f} ms more")


if __name__ == "__main__":
    main()
