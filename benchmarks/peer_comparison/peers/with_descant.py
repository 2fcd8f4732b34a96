"""Descant in one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from descant import Federation, algorithms
from descant.core.algorithm import Algorithm

from .contestant_process import parse_workload, serve
from .descant_factories import make_population, model
from .models import weights_of
from .work import Array, SharedWorkload


class DescantContestant:
    """A federation in one process."""

    def __init__(self, shared: SharedWorkload, **settings: Any) -> None:
        torch.set_num_threads(shared.threads)
        work = shared.work
        methods: Mapping[str, Callable[[], Algorithm]]
        methods = {"FedAvg": algorithms.FedAvg, "FedGeoMed+": partial(algorithms.FedGeoMedPlus, work.alpha, work.rho)}
        self.federation = Federation(
            partial(model, str(shared.folder)),
            partial(make_population, str(shared.folder)),
            methods[work.method](),
            lr=work.lr,
            steps=work.steps,
            batch=work.batch,
            participation=work.participants,
            seed=work.seed,
            **settings,
        )

    def rounds(self, n: int) -> None:
        for _ in self.federation.rounds(n):
            pass

    def weights(self) -> dict[str, Array]:
        return weights_of(self.federation.global_model_)


if __name__ == "__main__":
    shared = parse_workload()
    serve(lambda: DescantContestant(shared))
