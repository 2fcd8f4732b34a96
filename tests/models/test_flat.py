"""Conversion of modules to rows and back, and the rule of `flat` for tensors that are not trainable parameters."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from descant import Algorithm, Federation, algorithms, parties
from descant.errors import ModelError
from descant.models.flat import Layout, Net
from descant.parties import Population
from toy_problems import classification_parties


class Mixed(nn.Module):
    """A module with trainable, frozen and tied parameters, statistics, counters and masks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 4)
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.tied = self.frozen
        self.head = nn.Linear(4, 3)
        self.register_buffer("mask", torch.tensor([0.0, float("-inf")]))
        self.register_buffer("positions", torch.arange(3))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.frozen(self.norm(self.first(x)).relu()))
        return output


def test_the_layout_separates_parameters_and_statistics() -> None:
    layout = Layout.from_module(Mixed())
    assert layout.parameter_names == (
        "first.weight",
        "first.bias",
        "norm.weight",
        "norm.bias",
        "head.weight",
        "head.bias",
    )
    assert layout.names[layout.parameter_count :] == ("norm.running_mean", "norm.running_var")
    assert (layout.trainable_width, layout.width) == (24 + 4 + 4 + 4 + 12 + 3, 24 + 4 + 4 + 4 + 12 + 3 + 8)


def test_a_row_restores_the_module() -> None:
    torch.manual_seed(0)
    module = Mixed().train()
    for _ in range(3):
        module(torch.randn(8, 6))
    net = Net(module)
    again = net.module_from_row(net.copy_initial_row())
    for (name, old), (_, new) in zip(module.state_dict().items(), again.state_dict().items(), strict=True):
        assert torch.equal(old, new), name
    x = torch.randn(5, 6)
    assert torch.equal(module.eval()(x), again(x))


@settings(deadline=None, derandomize=True, max_examples=30)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(1, 3))
def test_split_and_join_are_inverse(sizes: list[int], rows: int) -> None:
    layers = [nn.Linear(a, b) for a, b in zip(sizes, [*sizes[1:], 2], strict=True)]
    layout = Layout.from_module(nn.Sequential(*layers))
    stack = torch.randn(rows, layout.width)
    for k in range(rows):
        assert torch.equal(layout.join({name: part[k] for name, part in layout.split(stack).items()}), stack[k])


def test_the_users_module_is_not_changed() -> None:
    module = Mixed()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    population = classification_parties(5).subset(["0", "1", "2"])  # batch normalisation needs two samples
    fed = Federation(module, population, algorithms.FedAvg(), lr=0.1, steps=3, batch=4).fit(2, progress=False)
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())
    assert not torch.equal(fed.global_model_.get_parameter("head.weight"), before["head.weight"])
    for name in ("frozen.weight", "positions", "mask"):
        assert torch.equal(fed.global_model_.state_dict()[name], before[name])


@pytest.mark.parametrize("mode", ["vectorized", "looped"])
def test_running_statistics_are_the_weighted_mean_of_the_parties(mode: str) -> None:
    """After one step, a party's statistics are momentum · its batch's; the global model has their weighted mean."""
    population = classification_parties(4).subset(["0", "1"])
    torch.manual_seed(1)
    model = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3))
    fed = Federation(model, population, algorithms.FedAvg(), lr=0.1, steps=1, batch=100)
    fed.state = replace(fed.state, execution_mode=mode)
    fed.fit(1, progress=False)
    n = torch.tensor([float(population[name].samples) for name in population])
    means = torch.stack([0.1 * population[name].x.mean(0) for name in population])
    variances = torch.stack([0.9 + 0.1 * population[name].x.var(0) for name in population])
    expected = torch.cat([(n / n.sum()) @ means, (n / n.sum()) @ variances])
    torch.testing.assert_close(fed.state.global_model[fed.plan_.net.layout.trainable_width :], expected)
    assert (fed.global_model_.state_dict()["0.running_var"] > 0).all()
    assert fed.global_model_.state_dict()["0.num_batches_tracked"] == 0


def shifted_parties() -> Population:
    """Return two parties whose data, and so their statistics, differ strongly."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(30) % 3
    return parties.from_arrays([(torch.randn(30, 6, generator=generator) + shift, labels) for shift in (0.0, 100.0)])


def batch_norm_model() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3))


def test_lazy_layers_are_rejected_with_advice() -> None:
    with pytest.raises(ModelError, match=r"'0.weight' of Sequential has no shape .* call it once"):
        Net.from_model(lambda: nn.Sequential(nn.LazyLinear(5), nn.ReLU(), nn.LazyLinear(3)), 0)


def test_statistics_can_be_private_as_in_fedbn() -> None:
    algorithm = algorithms.FedPer(("0.*",))
    fed = Federation(batch_norm_model, shifted_parties(), algorithm, lr=0.1, steps=40, batch=10).fit(1, progress=False)
    means = [fed.models_[name].state_dict()["0.running_mean"].mean() for name in ("0", "1")]
    assert abs(means[0]) < 1 and means[1] > 90
    assert torch.equal(fed.global_model_.state_dict()["0.running_mean"], torch.zeros(6))  # statistics are never sent


@pytest.mark.parametrize("algorithm", [algorithms.Ditto(), algorithms.APFL(), algorithms.FedAvgPlus()])
def test_a_personal_model_has_the_statistics_of_its_party(algorithm: Algorithm) -> None:
    fed = Federation(batch_norm_model, shifted_parties(), algorithm, lr=0.1, steps=40, batch=10).fit(1, progress=False)
    means = [fed.models_[name].state_dict()["0.running_mean"].mean() for name in ("0", "1")]
    assert abs(means[0]) < 1 and means[1] > 90


class CountsCalls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        output: Tensor = self.head(x)
        return output


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (CountsCalls(), r"The buffer 'calls' changes while the model trains"),
        (nn.Sequential(nn.BatchNorm1d(6, momentum=None), nn.Linear(6, 3)), r"'0' averages its statistics by a counter"),
        (nn.Identity(), r"Identity has no trainable parameter"),
        (nn.Sequential(nn.Linear(6, 3), nn.Linear(3, 3).double()), r"must have one floating dtype"),
        (lambda: "model", r"must be an nn.Module or make one when called; it made 'model'"),
    ],
)
def test_an_unsupported_model_is_an_error(model: nn.Module, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        Federation(model, classification_parties(3), algorithms.FedAvg()).fit(1, progress=False)


def test_a_pattern_that_matches_nothing_names_the_layers() -> None:
    with pytest.raises(ModelError, match=r"No layer matches 'hed\*'. The model's layers: first.weight"):
        Federation(Mixed(), classification_parties(3), algorithms.FedPer(("hed*",))).fit(1, progress=False)
