"""Equivalences between methods: v2 §5.4, Corollary 1, Proposition 2; v1 Propositions 1-3."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from descant import Algorithm, Federation, Sgd, algorithms, parties
from descant.aggregation.aggregators import GeometricMedian, Mean
from descant.aggregation.penalties import HalfSquare, Indicator, Norm1, Norm2, Zero
from descant.algorithms.components import sample_weights, uniform_weights
from descant.core.settings import ExponentialDecay, PerParty
from descant.errors import SettingError
from toy_problems import RegressionProblem, classification_parties, half_squared_error, network

F64 = torch.float64


def train(algorithm: Algorithm, lr: float = 0.1, rounds: int = 4) -> tuple[Tensor, Tensor]:
    """Train and return the global model and the personal models [K, d]."""
    fed = Federation(network(F64), classification_parties(5, F64), algorithm, lr=lr, steps=5, batch=4, seed=2)
    for _ in fed.rounds(rounds):
        pass
    own = [fed.state.personal_models.get(name).get("model", fed.state.global_model) for name in fed.population]
    return fed.state.global_model, torch.stack(own)


def test_fed_plus_with_alpha_0_and_init_mix_0_is_local_training_bit_for_bit() -> None:
    _, own = train(algorithms.FedPlus(Norm2(), alpha=0.0, init_mix=0.0))
    _, local = train(algorithms.Local())
    assert torch.equal(own, local)


CENTRAL: dict[str, tuple[Algorithm, Callable[[], Algorithm]]] = {
    "FedAvg": (algorithms.FedPlus(HalfSquare(), alpha=0.0, init_mix=1.0), algorithms.FedAvg),
    "RFA": (algorithms.FedPlus(Norm2(), rho=1e-6, alpha=0.0, init_mix=1.0), algorithms.RFA),
}


@pytest.mark.parametrize("name", CENTRAL)
def test_fed_plus_with_alpha_0_and_init_mix_1_is_the_baseline_bit_for_bit(name: str) -> None:
    general, special = CENTRAL[name]
    center, _ = train(replace(general, compute_weights=sample_weights))
    expected, _ = train(special())
    assert torch.equal(center, expected)


def test_fed_plus_with_a_vanishing_rho_is_the_coordinate_median() -> None:
    center, _ = train(algorithms.FedPlus(Norm1(), rho=1e-9, alpha=0.0, init_mix=1.0))
    expected, _ = train(algorithms.CoordinateMedian())
    torch.testing.assert_close(center, expected, rtol=0, atol=1e-8)


@pytest.mark.parametrize("mu", [0.1, 1.0])
def test_fedprox_is_fed_plus_with_a_longer_step(mu: float) -> None:
    """ERRATA 17 and FACTS A1: they are equal under η₊ = η/(1-μη), and not at the same η as v2 §5.4.5 prints it."""
    eta = 0.1
    expected, _ = train(algorithms.FedProx(mu), lr=eta)
    without_personalization = replace(
        algorithms.FedPlusFixed(1.0, alpha=mu, init_mix=1.0), compute_weights=sample_weights, personalize=None
    )
    center, _ = train(without_personalization, lr=eta / (1 - mu * eta))
    torch.testing.assert_close(center, expected, rtol=0, atol=1e-12)
    printed, _ = train(without_personalization, lr=eta)
    assert (printed - expected).abs().max() > 1e-4


def test_v1_is_v2_with_a_longer_step() -> None:
    eta = 0.1
    alpha = 0.5
    _, v1 = train(algorithms.FedPlusV1(HalfSquare(), Mean(), alpha), lr=eta)
    _, v2 = train(algorithms.FedPlus(Indicator(), alpha=alpha), lr=eta / (1 - alpha * eta))
    torch.testing.assert_close(v1, v2, rtol=0, atol=1e-12)


def test_fedavgplus_is_a_fixed_gamma() -> None:
    """§5.2.1: λ_k = ρ/(1+ρ)."""
    rho = 3.0
    _, plus = train(algorithms.FedAvgPlus(alpha=1.0, rho=rho))
    _, fixed = train(algorithms.FedPlusFixed(rho / (1 + rho), alpha=1.0))
    torch.testing.assert_close(plus, fixed, rtol=0, atol=1e-12)


@pytest.mark.parametrize("penalty", [Norm1(), Norm2()], ids=["norm 1", "norm 2"])
def test_a_rho_that_never_binds_draws_every_party_to_the_mean(penalty: Norm1 | Norm2) -> None:
    _, plus = train(algorithms.FedPlus(penalty, alpha=1.0, rho=1e6))
    _, fixed = train(algorithms.FedPlusFixed(1.0, Mean(), alpha=1.0))
    torch.testing.assert_close(plus, fixed, rtol=0, atol=1e-9)


def test_mu_zero_is_the_local_proximal_point_method() -> None:
    """Corollary 1(a): it has the minimizers of local training and takes another path."""
    problem = RegressionProblem.random(seed=4)
    eta = 1 / problem.lipschitz

    def own(algorithm: Algorithm, rounds: int) -> Tensor:
        solver = Sgd(lr=eta, steps=10, batch=None)
        fed = Federation(problem.model(), problem.population, algorithm, solver=solver, loss=half_squared_error)
        for _ in fed.rounds(rounds):
            pass
        return torch.stack([fed.state.personal_models.get(name)["model"] for name in fed.population])

    proximal = algorithms.FedPlus(Zero(), alpha=0.5)
    local = algorithms.Local()
    assert (own(proximal, 2) - own(local, 2)).abs().max() > 1e-3
    torch.testing.assert_close(own(proximal, 300), problem.minimizers(), rtol=0, atol=1e-9)
    torch.testing.assert_close(own(local, 300), problem.minimizers(), rtol=0, atol=1e-9)


def test_update_replies_give_the_same_result_as_model_replies() -> None:
    for algorithm in (algorithms.FedAvg(), algorithms.FedGeoMedPlus(alpha=1.0, rho=0.1)):
        model, _ = train(algorithm)
        change, _ = train(replace(algorithm, reply_content="update"))
        torch.testing.assert_close(change, model, rtol=0, atol=1e-12)


def test_alpha_may_decay_or_differ_by_party() -> None:
    """v1 §8: α^{k+1} = 0.99 α^k; α may differ by party."""
    decay = ExponentialDecay(0.5, 0.5)
    assert [decay(k, "any") for k in (1, 2, 3)] == [0.5, 0.25, 0.125]
    _, constant = train(algorithms.FedPlusV1(alpha=0.5), rounds=1)
    _, decaying = train(algorithms.FedPlusV1(alpha=decay), rounds=1)
    assert torch.equal(constant, decaying)  # they differ from round 2 on
    _, shared = train(algorithms.FedPlusV1(alpha=0.5))
    _, one = train(algorithms.FedPlusV1(alpha=PerParty({"1": 0.5}, 0.0)))
    _, local = train(algorithms.Local())
    assert torch.equal(one[[0, 2, 3, 4]], local[[0, 2, 3, 4]])
    assert not torch.equal(one[1], local[1])
    assert not torch.equal(shared[0], local[0])


def test_l2gd_is_local_training_when_the_mixture_is_off() -> None:
    _, own = train(algorithms.L2GD(lam=0.0, p=0.3))
    _, local = train(replace(algorithms.Local(), tune=algorithms.L2GD(p=0.3).tune))
    assert torch.equal(own, local)


def test_l2gd_finds_the_minimizer_of_the_mixture() -> None:
    """Hanzely & Richtárik (2020): min 1/n Σ f_i(x_i) + λ/2n Σ ‖x_i - x̄‖², in expectation over small steps."""
    problem = RegressionProblem.random(count=3, dimension=2, seed=1)
    lam = 0.7
    k, d = problem.offsets.shape
    mixing = torch.eye(k, dtype=F64) - torch.full((k, k), 1 / k, dtype=F64)
    system = torch.block_diag(*problem.curvatures) + lam * torch.kron(mixing, torch.eye(d, dtype=F64))
    best = torch.linalg.solve(system, problem.offsets.reshape(-1)).reshape(k, d)
    solver = Sgd(lr=0.002, batch=None)
    algorithm = algorithms.L2GD(lam, p=0.5)
    fed = Federation(problem.model(), problem.population, algorithm, solver=solver, loss=half_squared_error)
    for _ in fed.rounds(3000):
        pass
    personal = torch.stack([fed.state.personal_models.get(name)["model"] for name in fed.population])
    assert (personal - best).norm() < 0.02 * best.norm()
    assert (problem.minimizers() - best).norm() > 0.2 * best.norm()  # the mixture is not local training


def test_rfa_weights_by_samples_unless_weights_are_uniform() -> None:
    """ERRATA 16: weights are sample counts by default."""
    weighted, _ = train(replace(algorithms.FedAvg(), aggregate=GeometricMedian()))
    assert torch.equal(weighted, train(algorithms.RFA())[0])
    plain, _ = train(replace(algorithms.RFA(), compute_weights=uniform_weights))
    assert not torch.equal(weighted, plain)
    assert torch.equal(plain, train(algorithms.RFA(weights="uniform"))[0])


@pytest.mark.parametrize("make", [algorithms.FedAvg, algorithms.FedProx, algorithms.RFA])
def test_equal_sample_counts_make_both_weightings_agree(make: Callable[..., Algorithm]) -> None:
    """ERRATA 16: both readings are the same method when parties have equal sizes, as in the papers."""
    generator = torch.Generator().manual_seed(0)
    alike = parties.from_arrays(
        [(torch.randn(8, 6, generator=generator, dtype=F64) + k, torch.arange(8) % 3) for k in range(4)], dtype=F64
    )
    centers = []
    for weights in ("samples", "uniform"):
        fed = Federation(network(F64), alike, make(weights=weights), lr=0.1, steps=5, batch=4, seed=2)
        centers.append(fed.fit(3, progress=False).state.global_model)
    torch.testing.assert_close(*centers, rtol=0, atol=1e-12)


def test_known_aggregates_of_one_and_three_samples_under_both_weightings() -> None:
    """Models at 0 and 4 from 1 and 3 samples: the weighted mean is 3, the plain mean 2, the weighted median 4."""
    models = torch.tensor([[0.0], [4.0]], dtype=F64)
    metrics = [{"samples": 1.0}, {"samples": 3.0}]
    actual = {
        (make.__name__, weights): float(algorithm.aggregate(models, algorithm.compute_weights(metrics)).point)
        for make in (algorithms.FedAvg, algorithms.FedProx, algorithms.RFA)
        for weights in ("samples", "uniform")
        for algorithm in [make(weights=weights)]
    }
    expected = {("FedAvg", "samples"): 3.0, ("FedProx", "samples"): 3.0, ("RFA", "samples"): 4.0}
    expected |= {(name, "uniform"): 2.0 for name in ("FedAvg", "FedProx", "RFA")}
    assert actual == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("make", [algorithms.FedAvg, algorithms.FedProx, algorithms.RFA])
def test_unknown_weights_are_rejected(make: Callable[..., Algorithm]) -> None:
    message = f"The 'weights' of {make.__name__} must be one of 'samples', 'uniform'. Got 'sample'."
    with pytest.raises(SettingError, match=re.escape(message)):
        make(weights="sample")
