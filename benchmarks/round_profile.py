"""Where the time of a round goes: W1 of `descant bench` (logistic regression, 10 parties, 20 steps of batch 10).

    python benchmarks/round_profile.py [--steps 20]        # some seconds; on one thread

Every stage is timed from outside, and the clock itself costs about a third of a microsecond a call.
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
from torch import nn

from descant import Federation, algorithms, parties
from descant.reporting.table import Table

STAGES = {  # a stage: where it is, and the stage that it is a part of
    "the round": ("descant.federation:Federation.fit", ""),
    "local work": ("descant.engines.in_process:work", "the round"),
    "draws: which samples": ("descant.training.sgd:draw", "local work"),
    "batches: samples copied together": ("descant.training.batches:_gathered", "local work"),
    "forwards": ("descant.training.kernels.traced_kernel:BoundKernel.forward", "local work"),
    "gradient of the loss": ("descant.training.stacked_gradient:Descent._slope", "local work"),
    "backwards": ("descant.training.kernels.traced_kernel:BoundKernel.backward", "local work"),
    "steps of the optimiser": ("descant.training.stacked_optimizer:Moments.step", "local work"),
    "answers": ("descant.rounds.party_side:_answers", "local work"),
    "the gate": ("descant.rounds.validation:Gate.admit", "the round"),
    "reports as a stack": ("descant.rounds.aggregate:models_of", "the round"),
    "the mean": ("descant.aggregation.aggregators:Mean.__call__", "the round"),
}


class StageTimer:
    """Adds up the time of functions that are put behind it."""

    def __init__(self) -> None:
        self.seconds_by_stage: dict[str, float] = dict.fromkeys(STAGES, 0.0)

    def wrap_stage(self, stage: str, address: str) -> None:
        module, _, path = address.partition(":")
        owner: Any = importlib.import_module(module)
        *outer, name = path.split(".")
        for part in outer:
            owner = getattr(owner, part)
        setattr(owner, name, self._timed(stage, getattr(owner, name)))

    def _timed(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            began = time.perf_counter()
            found = function(*arguments, **options)
            if isinstance(found, Iterator):
                found = list(found)
            self.seconds_by_stage[stage] += time.perf_counter() - began
            return found

        return timed


def federation(steps: int) -> Federation:
    """1,000 parties of about 60 random images, 10 a round."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.empty(1000).log_normal_(3.6, 1.0, generator=generator).long().clamp(min=10).tolist()
    data = [(torch.rand(n, 784, generator=generator), torch.randint(10, (n,), generator=generator)) for n in sizes]
    people = parties.from_arrays(data, test=0)
    return Federation(nn.Linear(784, 10), people, algorithms.FedAvg(), lr=0.05, steps=steps, batch=10, participation=10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    torch.set_num_threads(1)
    steps = parser.parse_args().steps
    clock = StageTimer()
    for stage, (address, _) in STAGES.items():
        clock.wrap_stage(stage, address)
    fed = federation(steps)
    fed.fit(20, progress=False)
    rounds: dict[str, list[float]] = {stage: [] for stage in STAGES}
    for _ in range(200):
        clock.seconds_by_stage = dict.fromkeys(STAGES, 0.0)
        fed.fit(1, progress=False)
        for stage, seconds in clock.seconds_by_stage.items():
            rounds[stage].append(1e6 * seconds)
    found = {stage: median(times) for stage, times in rounds.items()}
    for whole in ("local work", "the round"):
        found[f"the rest of {whole}"] = found[whole] - sum(found[s] for s, (_, of) in STAGES.items() if of == whole)
    shown = [{"stage": s, "µs a round": us, "share %": 100 * us / found["the round"]} for s, us in found.items()]
    print(Table(("stage", "µs a round", "share %"), shown, decimals={"µs a round": 0, "share %": 0}))


if __name__ == "__main__":
    main()
