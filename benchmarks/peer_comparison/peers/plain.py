"""A plain torch loop, as a researcher writes it: one module that takes the weights of each party in turn."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils import parameters_to_vector

from peer_comparison.peers.models import build, load, weights_of
from peer_comparison.peers.protocol import serve, told
from peer_comparison.peers.work import Array, Shared


class Loop:
    """FedAvg, or FedGeoMed+ where the workload says so."""

    def __init__(self, shared: Shared) -> None:
        torch.set_num_threads(shared.threads)
        self.shared, self.work = shared, shared.work
        self.rng = np.random.default_rng(self.work.seed)
        x, y = torch.from_numpy(shared.x), torch.from_numpy(shared.y)
        self.parties = [(x[cut], y[cut]) for cut in shared.cuts()]
        self.model = load(build(self.work.model), shared.initial())
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.SGD(self.parameters, lr=self.work.lr)
        self.center = self.initial = parameters_to_vector(self.parameters).detach().clone()
        self.own: dict[int, Tensor] = {}

    def rounds(self, n: int) -> None:
        for _ in range(n):
            present = self.rng.choice(len(self.parties), self.work.present, replace=False)
            if self.work.method == "FedAvg":
                self.federated_average(present)
            else:
                self.fed_plus(present)

    def federated_average(self, present: Array) -> None:
        total, samples = torch.zeros_like(self.center), 0
        for party in present:
            self.set(self.center)
            self.train(party)
            n = len(self.parties[party][1])
            total.add_(parameters_to_vector(self.parameters).detach(), alpha=n)
            samples += n
        self.center = total / samples

    def fed_plus(self, present: Array) -> None:
        for party in present:
            own = self.own.get(party, self.initial)
            self.set(own)
            away = own - self.center
            kept = max(0.0, 1 - self.work.rho / max(float(away.norm()), 1e-12))
            self.train(party, toward=self.center + kept * away)
            self.own[party] = parameters_to_vector(self.parameters).detach()
        self.center = geometric_median(torch.stack([self.own[party] for party in present]), self.work.rho)

    def train(self, party: int, toward: Tensor | None = None) -> None:
        x, y = self.parties[party]
        theta = 1 / (1 + self.work.alpha * self.work.lr)
        anchors = [] if toward is None else self.split(toward)
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
        self.set(self.center)
        return weights_of(self.model)


def geometric_median(models: Tensor, rho: float) -> Tensor:
    """Weiszfeld's iterations, smoothed by rho."""
    point = models.mean(0)
    for _ in range(100):
        pulls = 1 / (models - point).norm(dim=1).clamp(min=rho)
        after = (pulls / pulls.sum()) @ models
        moved = float((after - point).norm())
        point = after
        if moved <= 1e-6 * float(point.norm()):
            break
    return point


if __name__ == "__main__":
    shared = told()
    serve(lambda: Loop(shared))
