"""A plain torch loop as a researcher writes it: one module loads the weights of each party in turn."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils import parameters_to_vector

from .contestant_process import parse_workload, serve
from .models import build, load, weights_of
from .work import Array, SharedWorkload


class PlainLoop:
    """FedAvg or FedGeoMed+, as the workload says."""

    def __init__(self, shared: SharedWorkload) -> None:
        torch.set_num_threads(shared.threads)
        self.shared = shared
        self.work = shared.work
        self.rng = np.random.default_rng(self.work.seed)
        x = torch.from_numpy(shared.x)
        y = torch.from_numpy(shared.y)
        self.parties = [(x[cut], y[cut]) for cut in shared.cuts()]
        self.model = load(build(self.work.model), shared.initial())
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.SGD(self.parameters, lr=self.work.lr)
        self.global_model = self.initial = parameters_to_vector(self.parameters).detach().clone()
        self.personal_models: dict[int, Tensor] = {}

    def rounds(self, n: int) -> None:
        for _ in range(n):
            participants = self.rng.choice(len(self.parties), self.work.participants, replace=False)
            if self.work.method == "FedAvg":
                self.federated_average(participants)
            else:
                self.fed_plus(participants)

    def federated_average(self, participants: Array) -> None:
        total = torch.zeros_like(self.global_model)
        samples = 0
        for party in participants:
            self.set(self.global_model)
            self.train(party)
            n = len(self.parties[party][1])
            total.add_(parameters_to_vector(self.parameters).detach(), alpha=n)
            samples += n
        self.global_model = total / samples

    def fed_plus(self, participants: Array) -> None:
        for party in participants:
            personal = self.personal_models.get(party, self.initial)
            self.set(personal)
            away = personal - self.global_model
            shrink_factor = max(0.0, 1 - self.work.rho / max(float(away.norm()), 1e-12))
            self.train(party, anchor_row=self.global_model + shrink_factor * away)
            self.personal_models[party] = parameters_to_vector(self.parameters).detach()
        self.global_model = geometric_median(
            torch.stack([self.personal_models[party] for party in participants]), self.work.rho
        )

    def train(self, party: int, anchor_row: Tensor | None = None) -> None:
        x, y = self.parties[party]
        theta = 1 / (1 + self.work.alpha * self.work.lr)
        anchors = [] if anchor_row is None else self.split(anchor_row)
        for index in torch.from_numpy(self.shared.batches(len(y), self.rng)):
            self.optimizer.zero_grad()
            functional.cross_entropy(self.model(x[index]), y[index]).backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            with torch.no_grad():
                for parameter, anchor in zip(self.parameters, anchors, strict=False):
                    parameter.lerp_(anchor, 1 - theta)

    def split(self, flat: Tensor) -> list[Tensor]:
        parts = torch.split(flat, [parameter.numel() for parameter in self.parameters])
        return [part.view_as(parameter) for part, parameter in zip(parts, self.parameters, strict=True)]

    def set(self, flat: Tensor) -> None:
        with torch.no_grad():
            for parameter, values in zip(self.parameters, self.split(flat), strict=True):
                parameter.copy_(values)

    def weights(self) -> dict[str, Array]:
        self.set(self.global_model)
        return weights_of(self.model)


def geometric_median(models: Tensor, rho: float) -> Tensor:
    """Return the geometric median by Weiszfeld's iterations, smoothed by rho."""
    point = models.mean(0)
    for _ in range(100):
        inverse_distances = 1 / (models - point).norm(dim=1).clamp(min=rho)
        after = (inverse_distances / inverse_distances.sum()) @ models
        moved = float((after - point).norm())
        point = after
        if moved <= 1e-6 * float(point.norm()):
            break
    return point


if __name__ == "__main__":
    shared = parse_workload()
    serve(lambda: PlainLoop(shared))
