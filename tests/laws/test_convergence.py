"""Theorem 2 of Fed+ v2: F_μ never increases at η = 1/L (ERRATA 12) and falls as O(1/t); gradients vanish (39)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from descant import Federation, Sgd, algorithms
from descant.aggregation.penalties import Norm1, Norm2, Penalty, envelope, proximal_anchor
from descant.core.algorithm import Loss
from toy_problems import PENALTIES, RegressionProblem, cosine_loss, half_squared_error

ALPHA = 0.5
LOSSES: dict[str, Loss] = {"convex": half_squared_error, "not convex": cosine_loss}


def models(
    problem: RegressionProblem, penalty: Penalty, rho: float, loss: Loss, rounds: int, sample: int
) -> Iterator[Tensor]:
    """Yield W^t after each round: η = 1/L_f, full gradients, sampled parties, aggregation over all (ERRATA 14)."""
    algorithm = algorithms.FedPlus(penalty, alpha=ALPHA, rho=rho, aggregate_over="all")
    solver = Sgd(lr=1 / problem.lipschitz, steps=2, batch=None)
    participation = algorithms.Sample(sample)
    fed = Federation(
        problem.model(), problem.population, algorithm, solver=solver, loss=loss, participation=participation, seed=1
    )
    initial = fed.state.initial_model
    for _ in fed.rounds(rounds):
        yield torch.stack([fed.state.personal_models.get(name).get("model", initial) for name in fed.population])


def objective(problem: RegressionProblem, penalty: Penalty, rho: float, loss: Loss, w: Tensor) -> Tensor:
    """Return F_μ(W) = mean f_k(w_k) + μ·Φ_ρ(w_k - w̃), eq. (2), (5), (9), with μ = αρ."""
    center = penalty.center(rho)(w, None).point
    return (problem.losses(w, loss) + ALPHA * rho * envelope(penalty, w - center, rho)).mean()


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", PENALTIES)
def test_the_objective_never_increases(name: str, loss: str) -> None:
    problem = RegressionProblem.random(count=6, dimension=3, seed=5)
    penalty = PENALTIES[name]
    rho = 0.3
    trajectory = models(problem, penalty, rho, LOSSES[loss], rounds=40, sample=3)
    values = torch.stack([objective(problem, penalty, rho, LOSSES[loss], w) for w in trajectory])
    assert (values.diff() <= 1e-12).all()
    assert values[-1] < values[0] - 1e-3


@pytest.mark.parametrize("penalty", [Norm1(), Norm2()], ids=["norm 1", "norm 2"])
def test_the_objective_falls_as_one_over_t(penalty: Penalty) -> None:
    """Check that t·(F_μ(W^t) - F_μ*) stays bounded; at a rate of 1/√t it would grow eightfold from t=16 to t=1024.

    With fewer samples than columns the problem is not strongly convex, which would make the rate exponential.
    """
    problem = RegressionProblem.random(count=4, dimension=8, n=3, seed=2)
    rho = 0.3
    trajectory = list(models(problem, penalty, rho, half_squared_error, rounds=1024, sample=4))
    values = torch.stack([objective(problem, penalty, rho, half_squared_error, w) for w in trajectory[15:]])
    scaled = torch.arange(16, 1025) * (values - minimum(problem, penalty, rho, trajectory[-1]))
    assert scaled[0] > 0.1  # it is still far from the minimum at t=16
    assert scaled.max() < 4 * scaled[0]
    assert scaled[-1] < scaled[0]


def minimum(problem: RegressionProblem, penalty: Penalty, rho: float, start: Tensor) -> Tensor:
    """Return min F_μ by L-BFGS in (W, w̃) together, without any code of Fed+."""
    w = start.clone().requires_grad_()
    center = start.mean(0).requires_grad_()
    optimizer = torch.optim.LBFGS([w, center], max_iter=4000, tolerance_grad=1e-10, tolerance_change=0)

    def value() -> Tensor:
        optimizer.zero_grad()
        total = (problem.losses(w, half_squared_error) + ALPHA * rho * envelope(penalty, w - center, rho)).mean()
        total.backward()
        return total

    optimizer.step(value)
    return value().detach()


@pytest.mark.parametrize("name", ["half square", "norm 2", "norm 1"])
def test_gradients_vanish_with_sampled_parties(name: str) -> None:
    """Equation (39), with F_k of eq. (12): ∇F_k = ∇f_k(w_k) + α(w_k - z_k)."""
    problem = RegressionProblem.random(count=6, dimension=3, seed=5)
    penalty = PENALTIES[name]
    rho = 0.3
    trajectory = list(models(problem, penalty, rho, half_squared_error, rounds=600, sample=3))

    def residual(w: Tensor) -> float:
        center = penalty.center(rho)(w, None).point
        gradient = problem.gradient(w) + ALPHA * (w - proximal_anchor(penalty, w, center, rho=rho))
        return gradient.square().sum().item()

    assert residual(trajectory[3]) > 1e-3
    assert residual(trajectory[-1]) < 1e-18
