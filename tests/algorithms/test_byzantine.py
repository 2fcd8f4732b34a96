"""Byzantine parties: only their updates and rewards are changed."""

from functools import partial

import pytest
import torch

from descant import Federation, algorithms, parties
from descant.algorithms import ByzantineParties, FedAvg, FedRL
from descant.errors import SettingError
from descant.models import mlp


def fit_federation(method, rounds=4):
    population = parties.digits(count=5, seed=0)
    return Federation(partial(mlp, 64, 10, (16,)), population, method, lr=0.2, steps=10, batch=20).fit(
        rounds, progress=False
    )


def test_byzantine_parties_with_true_values_change_nothing():
    assert torch.equal(
        fit_federation(ByzantineParties(FedAvg(), 2)).state.global_model, fit_federation(FedAvg()).state.global_model
    )


@pytest.mark.parametrize("weights", [[1, 1, 1], [2, 1, 1]])
def test_byzantine_models_arrive_multiplied(weights):
    method = ByzantineParties(FedAvg(), 1, scale=-10.0)
    aggregate = method.aggregate(torch.tensor([[1.0], [4.0], [12.0]]), torch.tensor(weights, dtype=torch.float64))
    assert aggregate.point.item() == pytest.approx((-10 * weights[0] + 4 + 12) / sum(weights))


def test_poisoned_aggregator_does_not_modify_the_stack():
    models = torch.ones(3, 2)
    ByzantineParties(FedAvg(), 1, scale=5.0).aggregate(models, None)
    assert torch.equal(models, torch.ones(3, 2))


def test_claimed_reward_dominates_only_the_reward_weighted_mean():
    metrics = [{"reward": 10.0, "samples": 5}, {"reward": 20.0, "samples": 5}, {"reward": 30.0, "samples": 5}]
    assert ByzantineParties(FedRL(), 1, claimed_reward=1e6).compute_weights(metrics).tolist() == [1e6, 20.0, 30.0]
    assert ByzantineParties(FedRL("uniform"), 1, claimed_reward=1e6).compute_weights(metrics).tolist() == [
        1.0,
        1.0,
        1.0,
    ]
    assert metrics[0]["reward"] == 10.0


@pytest.mark.parametrize("robust", [algorithms.RFA, algorithms.CoordinateMedian])
def test_median_stays_among_honest_models_and_mean_does_not(robust):
    models = torch.randn(5, 30, generator=torch.Generator().manual_seed(0))
    honest = models[2:]
    mean, median = (
        ByzantineParties(base(), 2, scale=-1e6).aggregate(models, torch.ones(5)).point for base in (FedAvg, robust)
    )
    radius = (honest - honest.mean(0)).norm(dim=1).max()
    assert (median - honest.mean(0)).norm() < 2 * radius and (mean - honest.mean(0)).norm() > 1000 * radius


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"count": 0}, "'count'"),
        ({"count": 1.5}, "'count'"),
        ({"scale": float("nan")}, "'scale'"),
        ({"claimed_reward": "x"}, "'claimed_reward'"),
        ({"claimed_reward": float("inf")}, "'claimed_reward'"),
    ],
)
def test_invalid_settings_are_rejected(settings, message):
    with pytest.raises(SettingError, match=message):
        ByzantineParties(FedAvg(), **settings)
