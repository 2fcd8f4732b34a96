"""Profile of a round: W1 of `scripts/bench` (logistic regression, 10 parties, 20 steps of batch 10).

    python benchmarks/round_profile.py [--steps 20]        # a few seconds, on one thread

Every stage is timed from outside; the timer itself costs about a third of a microsecond per call.
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

STAGES = {  # stage: address of its function, and the stage that contains it
    "the round": ("descant.federation:Federation.fit", ""),
    "local training": ("descant.engines.in_process:perform_tasks", "the round"),
    "draws of samples": ("descant.training.sgd:draw_batches", "local training"),
    "copies of samples to batches": ("descant.training.batches:_gather", "local training"),
    "forward passes": ("descant.training.kernels.traced_kernel:BoundKernel.forward", "local training"),
    "gradient of the loss": ("descant.training.stacked_gradient:StackGradient._loss_gradient", "local training"),
    "backward passes": ("descant.training.kernels.traced_kernel:BoundKernel.backward", "local training"),
    "optimizer steps": ("descant.training.stacked_optimizer:StackedOptimizer.step", "local training"),
    "replies": ("descant.rounds.party_side:_make_replies", "local training"),
    "validation of updates": ("descant.rounds.validation:UpdateValidator.validate", "the round"),
    "stacking the models": ("descant.rounds.aggregate:stack_models", "the round"),
    "the mean": ("descant.aggregation.aggregators:Mean.__call__", "the round"),
}


class StageTimer:
    """Adds up the time spent in wrapped functions."""

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
            result = function(*arguments, **options)
            if isinstance(result, Iterator):
                result = list(result)
            self.seconds_by_stage[stage] += time.perf_counter() - began
            return result

        return timed


def federation(steps: int) -> Federation:
    """Return a federation of 1,000 parties with about 60 random images, 10 per round."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.empty(1000).log_normal_(3.6, 1.0, generator=generator).long().clamp(min=10).tolist()
    data = [(torch.rand(n, 784, generator=generator), torch.randint(10, (n,), generator=generator)) for n in sizes]
    population = parties.from_arrays(data, test=0)
    settings = {"lr": 0.05, "steps": steps, "batch": 10, "participation": 10}
    return Federation(nn.Linear(784, 10), population, algorithms.FedAvg(), **settings)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    torch.set_num_threads(1)
    steps = parser.parse_args().steps
    timer = StageTimer()
    for stage, (address, _) in STAGES.items():
        timer.wrap_stage(stage, address)
    fed = federation(steps)
    fed.fit(20, progress=False)
    rounds: dict[str, list[float]] = {stage: [] for stage in STAGES}
    for _ in range(200):
        timer.seconds_by_stage = dict.fromkeys(STAGES, 0.0)
        fed.fit(1, progress=False)
        for stage, seconds in timer.seconds_by_stage.items():
            rounds[stage].append(1e6 * seconds)
    medians = {stage: median(times) for stage, times in rounds.items()}
    for whole in ("local training", "the round"):
        parts = [stage for stage, (_, parent) in STAGES.items() if parent == whole]
        medians[f"the rest of {whole}"] = medians[whole] - sum(medians[stage] for stage in parts)
    total = medians["the round"]
    rows = [{"stage": stage, "µs per round": us, "share %": 100 * us / total} for stage, us in medians.items()]
    print(Table(("stage", "µs per round", "share %"), rows, decimals={"µs per round": 0, "share %": 0}))


if __name__ == "__main__":
    main()
