"""Fixed points of Fed+, v2 §6: Theorem 1 (17), Corollary 1 (23)-(25), Proposition 3 (27)-(29), with the ∇."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from descant import Algorithm, Federation, algorithms
from descant.aggregation.aggregators import CoordinateMedian, GeometricMedian, Mean
from descant.aggregation.penalties import HalfSquare, Indicator, Zero, proximal_anchor
from descant.core.algorithm import Aggregate
from descant.core.settings import PerParty
from toy_problems import PENALTIES, ExactSolver, RegressionProblem, half_squared_error

ALPHA = 0.8
ATOL = 1e-9


def fixed_point(problem: RegressionProblem, algorithm: Algorithm, rounds: int = 400) -> tuple[Tensor, Tensor]:
    """Return W* [K, d] and w̃* [d] under Assumption 1: convex losses, full participation, exact local solutions."""
    fed = Federation(
        problem.model(), problem.population, algorithm, solver=ExactSolver(problem), loss=half_squared_error
    )
    last = fed.state.global_model
    for scored in fed.rounds(rounds):
        last, moved = scored.round.state.global_model, (scored.round.state.global_model - last).norm()
    assert moved < 1e-12
    return torch.stack([fed.state.personal_models.get(name)["model"] for name in fed.population]), last


@pytest.fixture(scope="module")
def problem() -> RegressionProblem:
    return RegressionProblem.random(count=5, dimension=4, seed=3)


@pytest.mark.parametrize("name", PENALTIES)
def test_theorem_1(problem: RegressionProblem, name: str) -> None:
    """Equation (17): mean ∇f̃_k(z*) = 0 (ERRATA 11: print lacks the ∇), w* = z* - ∇f̃(z*)/α, z* = w̃* + prox(w* - w̃*)."""
    penalty = PENALTIES[name]
    rho = 0.4
    w, center = fixed_point(problem, algorithms.FedPlus(penalty, alpha=ALPHA, rho=rho))
    z = proximal_anchor(penalty, w, center, rho=rho)
    gradient = problem.envelope_gradient(z, ALPHA)
    torch.testing.assert_close(gradient.mean(0), torch.zeros_like(center), rtol=0, atol=ATOL)
    torch.testing.assert_close(w, z - gradient / ALPHA, rtol=0, atol=ATOL)
    values = problem.losses(w, half_squared_error) + ALPHA / 2 * (w - z).square().sum(1)
    assert values.mean().abs() > 0.01  # (1/K) Σ f̃_k, as printed, is not 0


def test_corollary_1a(problem: RegressionProblem) -> None:
    """Equation (23): with R = w_k, every party is at its own minimizer."""
    w, _ = fixed_point(problem, algorithms.FedPlus(Zero(), alpha=ALPHA))
    torch.testing.assert_close(w, problem.minimizers(), rtol=0, atol=ATOL)


def test_corollary_1b(problem: RegressionProblem) -> None:
    """Equation (24): R = w̃ and the mean; z* = w̃*."""
    w, center = fixed_point(problem, algorithms.FedPlus(Indicator(), alpha=ALPHA))
    gradient = problem.envelope_gradient(center.expand_as(w), ALPHA)
    torch.testing.assert_close(gradient.mean(0), torch.zeros_like(center), rtol=0, atol=ATOL)
    torch.testing.assert_close(w, center - gradient / ALPHA, rtol=0, atol=ATOL)


def test_corollary_1c(problem: RegressionProblem) -> None:
    """Equation (25): R = (1-γ)w_k + γw̃ and the mean, which is φ = ½‖·‖² with ρ = γ/(1-γ)."""
    gamma = 0.3
    w, center = fixed_point(problem, algorithms.FedPlus(HalfSquare(), alpha=ALPHA, rho=gamma / (1 - gamma)))
    gradient = problem.envelope_gradient((1 - gamma) * w + gamma * center, ALPHA)
    torch.testing.assert_close(center, w.mean(0), rtol=0, atol=ATOL)
    torch.testing.assert_close(w, center - gradient / (ALPHA * gamma), rtol=0, atol=ATOL)


AGGREGATES: dict[str, Aggregate] = {
    "mean": Mean(),
    "geometric median": GeometricMedian(0.05),
    "coordinate median": CoordinateMedian(),
}


@pytest.mark.parametrize("name", AGGREGATES)
def test_proposition_3(problem: RegressionProblem, name: str) -> None:
    """Equations (27), (29): any aggregator, a fixed γ_k for each party."""
    aggregate = AGGREGATES[name]
    gammas = {party: 0.2 + 0.15 * k for k, party in enumerate(problem.population)}
    algorithm = algorithms.FedPlusFixed(PerParty(gammas), aggregate, alpha=ALPHA)
    w, center = fixed_point(problem, algorithm, rounds=1500)
    gamma = torch.tensor(list(gammas.values()), dtype=torch.float64).unsqueeze(1)
    scaled = problem.envelope_gradient((1 - gamma) * w + gamma * center, ALPHA) / (ALPHA * gamma)
    torch.testing.assert_close(w, center - scaled, rtol=0, atol=ATOL)
    torch.testing.assert_close(center, aggregate(w, None).point, rtol=0, atol=ATOL)
    torch.testing.assert_close(aggregate(scaled, None).point, torch.zeros_like(center), rtol=0, atol=ATOL)


def test_proposition_3_with_a_diagonal(problem: RegressionProblem) -> None:
    """The Λ of v2 §8.2, kept constant: γ may differ by column."""
    shared = torch.tensor([0.2, 0.9, 0.5, 0.4], dtype=torch.float64)
    own = {party: tuple((shared * (1 - 0.1 * k)).tolist()) for k, party in enumerate(problem.population)}
    each = torch.tensor([*own.values()], dtype=torch.float64)
    for given, gamma in ((tuple(shared.tolist()), shared), (PerParty(own), each)):
        w, center = fixed_point(problem, algorithms.FedPlusFixed(given, alpha=ALPHA))  # type: ignore[arg-type]
        gradient = problem.envelope_gradient((1 - gamma) * w + gamma * center, ALPHA)
        torch.testing.assert_close(w, center - gradient / (ALPHA * gamma), rtol=0, atol=ATOL)
