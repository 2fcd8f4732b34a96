"""Toy problems with known answers, and the matrix of methods that every law covers: a new method adds one line."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from descant import Algorithm, algorithms, models, parties
from descant.aggregation.penalties import ByLayer, HalfSquare, Indicator, Norm1, Norm2, NormP, Penalty, Zero
from descant.core.algorithm import Hyper, Loss, LossTerm
from descant.core.interfaces import TrainJob, TrainResult
from descant.core.settings import ExponentialDecay, PerParty
from descant.models.flat import Net
from descant.parties import Population
from descant.portfolio import generate_market
from descant.training.evaluation import evaluate_test_sets

METHODS: dict[str, Callable[[], Algorithm]] = {
    "Local": algorithms.Local,
    "FedAvg": algorithms.FedAvg,
    "FedProx": lambda: algorithms.FedProx(0.1),
    "RFA": algorithms.RFA,
    "CoordinateMedian": algorithms.CoordinateMedian,
    "FedAvgPlus": lambda: algorithms.FedAvgPlus(alpha=1.0, rho=2.0),
    "FedGeoMedPlus": lambda: algorithms.FedGeoMedPlus(alpha=1.0, rho=0.1),
    "FedCoMedPlus": lambda: algorithms.FedCoMedPlus(alpha=1.0, rho=0.05),
    "FedPlus, p=∞": lambda: algorithms.FedPlus(NormP(math.inf), alpha=1.0, rho=0.1),
    "FedPlus, by layer": lambda: algorithms.FedPlus(ByLayer({"0.*": HalfSquare(), "2.*": Norm1()}), alpha=1.0, rho=0.1),
    "FedPlus, over all": lambda: algorithms.FedPlus(Norm2(), alpha=1.0, rho=0.1, aggregate_over="all"),
    "FedPlus, mixed start": lambda: algorithms.FedPlus(Norm2(), alpha=1.0, rho=0.1, init_mix=0.3),
    "FedPlusFixed": lambda: algorithms.FedPlusFixed(0.3, alpha=1.0),
    "FedPlusV1": lambda: algorithms.FedPlusV1(Norm2(), alpha=PerParty({"1": 0.5}, ExponentialDecay(0.3, 0.9))),
    "FedAvg, changes": lambda: replace(algorithms.FedAvg(), reply_content="update"),
    "L2GD": lambda: algorithms.L2GD(lam=0.5, p=0.3),
    "Ditto": algorithms.Ditto,
    "APFL": algorithms.APFL,
    "pFedMe": algorithms.pFedMe,
    "FedPer": algorithms.FedPer,
    "FedRep": algorithms.FedRep,
    "FedAvg+AH": lambda: algorithms.AdaptiveHyper(
        lr=(0.05, 0.1, 0.2), work=(1, 2, 4), reward="clients", loss_samples=4
    ),
    "FedAvg, decaying": lambda: algorithms.DecaySchedule(lr_factor=0.9, work_factor=0.7),
    "FedAvg, of all samples": lambda: algorithms.FedAvg(normalize="total"),
    "matching": lambda: algorithms.RepresentationMatching(algorithms.FedGeoMedPlus(alpha=1.0, rho=0.1)),
    "divergence, unsure": lambda: algorithms.EntropyRegularization(algorithms.WeightDivergence(coefficient=0.1), 1.0),
    "stragglers": lambda: replace(algorithms.FedAvg(), participation=algorithms.Stragglers(0.5)),
}

PRIVATE_METHODS: dict[str, Callable[[], Algorithm]] = {
    "FedAvg, private": lambda: algorithms.CentralDP(clip=0.1, source="seed"),
    "FedAvgPlus, private": lambda: algorithms.CentralDP(algorithms.FedAvgPlus(alpha=1.0), clip=0.1, source="seed"),
    "FedProx, private at parties": lambda: algorithms.LocalDP(algorithms.FedProx(0.1), clip=0.1, source="seed"),
    "FedAvg, secure": algorithms.SecureAggregation,
    "FedRep, secure": lambda: algorithms.SecureAggregation(algorithms.FedRep()),
}
"""Private methods, which reject some features: coreset proxies, interpolation, evaluation of local training."""

ALL_METHODS = {**METHODS, **PRIVATE_METHODS}

PENALTIES: dict[str, Penalty] = {
    "half square": HalfSquare(),
    "norm 2": Norm2(),
    "norm 1": Norm1(),
    "norm ∞": NormP(math.inf),
    "zero": Zero(),
    "indicator": Indicator(),
}


def classification_parties(count: int = 5, dtype: torch.dtype = torch.float32, seed: int = 0) -> Population:
    """Return small parties of different sizes; the last has one sample, the one before fewer than a batch."""
    generator = torch.Generator().manual_seed(seed)
    data = []
    for k in range(count):
        n = 1 if k == count - 1 else 3 if k == count - 2 else 9 + 4 * k
        x = torch.randn(n, 6, generator=generator, dtype=dtype) + 0.5 * k
        data.append((x, torch.randint(0, 3, (n,), generator=generator)))
    return parties.from_arrays(data, test=0, dtype=dtype)


def cartpole_agents() -> Population:
    """Return three CartPole agents whose poles differ."""
    return parties.agents(count=3, heterogeneity=0.3, test_episodes=2)


def policy_network() -> nn.Module:
    """Return the policy network of the CartPole agents."""
    return models.mlp(4, 2, (8,))


def generated_desks() -> Population:
    """Return three small desks on generated prices."""
    return parties.desks(
        generate_market(assets=7, years=3, seed=1),
        count=3,
        assets=4,
        window=10,
        train=("2006", "2007"),
        test=("2008", "2008-03"),
    )


def trading_network() -> nn.Module:
    """Return the network of the generated desks."""
    return models.eiie("cnn", window=10, hidden=6)


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)


def wide_network() -> nn.Module:
    """Return a network whose Adam moments take 200 kB a party."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 2500), nn.Tanh(), nn.Linear(2500, 3))


def half_squared_error(output: Tensor, y: Tensor) -> Tensor:
    """Return ½(output - y)² a sample: convex, curvature at most 1."""
    return 0.5 * (output.squeeze(-1) - y) ** 2


def cosine_loss(output: Tensor, y: Tensor) -> Tensor:
    """Return 1 - cos(output - y) a sample: not convex, absolute curvature at most 1."""
    return 1 - torch.cos(output.squeeze(-1) - y)


@dataclass(frozen=True)
class RegressionProblem:
    """K least-squares parties with known minimizers: f_k(w) = 1/(2n) ‖X_k w - y_k‖², so ∇f_k = A_k w - b_k."""

    population: Population

    @classmethod
    def random(cls, count: int = 5, dimension: int = 4, n: int = 12, seed: int = 0) -> RegressionProblem:
        generator = torch.Generator().manual_seed(seed)
        data = []
        for _ in range(count):
            x = torch.randn(n, dimension, generator=generator, dtype=torch.float64)
            w = 2 * torch.randn(dimension, generator=generator, dtype=torch.float64)
            noise = 0.3 * torch.randn(n, generator=generator, dtype=torch.float64)
            data.append((x, x @ w + noise))
        return cls(parties.from_arrays(data, test=0, dtype=torch.float64))

    @property
    def curvatures(self) -> Tensor:
        """Return A_k, ``[K, d, d]``."""
        return torch.stack([p.x.T @ p.x / len(p.x) for p in self.population.values()])

    @property
    def offsets(self) -> Tensor:
        """Return b_k, ``[K, d]``."""
        return torch.stack([p.x.T @ p.y / len(p.x) for p in self.population.values()])

    @property
    def lipschitz(self) -> float:
        """Return L_f, the largest curvature of any party."""
        return float(torch.linalg.eigvalsh(self.curvatures).max())

    def minimizers(self) -> Tensor:
        return torch.linalg.solve(self.curvatures, self.offsets.unsqueeze(-1)).squeeze(-1)

    def gradient(self, rows: Tensor) -> Tensor:
        return torch.einsum("kij,kj->ki", self.curvatures, rows) - self.offsets

    def losses(self, rows: Tensor, loss: Loss) -> Tensor:
        return torch.stack(
            [loss((p.x @ w).unsqueeze(-1), p.y).mean() for p, w in zip(self.population.values(), rows, strict=True)]
        )

    def envelope_gradient(self, z: Tensor, alpha: float) -> Tensor:
        """Return ∇f̃_k(z) = α(z - prox(z)), the gradient of the Moreau envelope of f_k, eq. (16)."""
        eye = torch.eye(z.shape[1], dtype=z.dtype)
        solved = torch.linalg.solve(self.curvatures + alpha * eye, (self.offsets + alpha * z).unsqueeze(-1)).squeeze(-1)
        return alpha * (z - solved)

    def model(self) -> nn.Module:
        """Return a linear model without bias, all zeros."""
        layer = nn.Linear(self.curvatures.shape[1], 1, bias=False, dtype=torch.float64)
        with torch.no_grad():
            layer.weight.zero_()
        return layer


@dataclass(frozen=True)
class ExactSolver:
    """A solver that returns the exact argmin of f_k(w) + α/2 ‖w - z‖², eq. (15): Assumption 1 of Fed+ v2."""

    problem: RegressionProblem
    metric = None
    evaluate = staticmethod(evaluate_test_sets)

    @property
    def hyper(self) -> Hyper:
        return Hyper()

    def execution_modes(
        self, net: Net, loss: Loss, terms: tuple[LossTerm, ...], party: object, count: int
    ) -> dict[str, str]:
        return {"exact": ""}

    def train(self, job: TrainJob) -> TrainResult:
        names: Sequence[str] = [party.name for party in job.parties]
        rows = [self.problem.population.names.index(name) for name in names]
        a = self.problem.curvatures[rows]
        b = self.problem.offsets[rows]
        assert job.anchor is not None and job.alphas is not None
        eye = torch.eye(b.shape[1], dtype=b.dtype)
        right_side = (b + job.alphas * job.anchor).unsqueeze(-1)
        w = torch.linalg.solve(a + job.alphas.unsqueeze(-1) * eye, right_side).squeeze(-1)
        return TrainResult(w, [{}] * len(rows), [{"samples": party.samples} for party in job.parties])
