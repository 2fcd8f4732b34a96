"""Representation matching, entropy regularization and weight divergence: laws, known answers, invalid input."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from bytes_engine import BytesEngine
from dataset_files import write_wave
from descant import Algorithm, Federation, Sgd, algorithms, parties
from descant.algorithms.representation_matching.loss_term_wrappers import EntropyTerm
from descant.core import seeds
from descant.core.algorithm import LossContext, LossTerm
from descant.core.settings import PerParty
from descant.errors import ModelError, SettingError
from descant.models.flat import Net, bind
from descant.models.matching_layers import InverseMaxPool, MatchingLoss
from descant.parties import Population
from descant.training.kernels.max_pooling import Switches, row_maxima
from descant.training.kernels.traced_kernel import Stack
from descant.training.objective import Objective
from descant.training.stacked_gradient import StackGradient
from toy_problems import classification_parties, network

MODES = ("stacked", "single", "vectorized", "looped")
RM = algorithms.RepresentationMatching


class TutorialNet(nn.Module):
    """A module in tutorial style: functions and methods, one used twice, and a view by the batch size."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3, stride=2)
        self.middle = nn.Linear(12, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.max_pool2d(torch.tanh(self.conv(x)), 2)
        x = torch.tanh(self.middle(x.view(x.size(0), -1)))
        output: Tensor = self.head(x.sigmoid())
        return output


NETS: dict[str, tuple[tuple[int, ...], Callable[[], nn.Module]]] = {
    "linear": ((4,), lambda: nn.Linear(4, 3)),
    "dense": ((6,), lambda: nn.Sequential(nn.Linear(6, 5), nn.Softplus(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))),
    "convolutions": (
        (2, 9, 7),
        lambda: nn.Sequential(
            *(nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2)),
            *(nn.Conv2d(4, 3, (2, 1), dilation=2, groups=1), nn.Tanh()),
            *(nn.Flatten(), nn.Linear(18, 5), nn.GELU(), nn.Linear(5, 3)),
        ),
    ),
    "strides and groups": (
        (10, 8, 6),
        lambda: nn.Sequential(
            *(nn.Conv2d(10, 4, 3, stride=(2, 1), padding=1, groups=2), nn.ELU(), nn.MaxPool2d((2, 3))),
            *(nn.Conv2d(4, 2, 2, padding="same"), nn.SiLU(), nn.Flatten(), nn.Linear(8, 3)),
        ),
    ),
    "lines": (
        (2, 11),
        lambda: nn.Sequential(
            *(nn.Conv1d(2, 4, 3, stride=2), nn.Tanh(), nn.MaxPool1d(2), nn.LayerNorm(2)),
            *(nn.Flatten(), nn.Linear(8, 6, bias=False), nn.Identity(), nn.Linear(6, 3)),
        ),
    ),
    "written": ((1, 9, 9), TutorialNet),
}


def make_module(name: str) -> nn.Module:
    torch.manual_seed(0)
    return NETS[name][1]().double()


def make_population(shape: tuple[int, ...], count: int = 3) -> Population:
    generator = torch.Generator().manual_seed(1)
    data = [
        (torch.randn(n, *shape, generator=generator), torch.randint(3, (n,), generator=generator))
        for n in range(4, 4 + 2 * count, 2)
    ]
    return parties.from_arrays(data, test=0, dtype=torch.float64)


def bound_term(algorithm: Algorithm, module: nn.Module) -> LossTerm:
    term = bind(algorithm, Net(module)).terms[-1]
    assert isinstance(term, LossTerm)
    return term


def loss_context(module: nn.Module, term: LossTerm, own: Tensor, w: Tensor, x: Tensor) -> LossContext:
    """Return the loss context of a trained model w; the module's own parameters are the received ones."""
    net = Net(module)
    received = net.copy_initial_row()
    none = torch.empty(0, dtype=x.dtype)
    output, _, features = net.apply_with_points(w, none, x, term.feature_names)
    frozen = net.apply_with_points(received, none, x, term.feature_names)[2]
    y = torch.zeros(len(x), dtype=torch.int64)
    return LossContext(
        w,
        received,
        own,
        x=x,
        y=y,
        output=output,
        features=features,
        received_features=frozen,
        apply=lambda p, i: i,
        loss=functional.cross_entropy,
    )


def test_points_are_the_input_every_non_linearity_and_the_top() -> None:
    def found(name: str) -> list[tuple[str, str]]:
        value = bound_term(RM(), make_module(name)).value
        assert isinstance(value, MatchingLoss)
        return [(link.to_point, link.from_point) for link in value.layers]

    assert found("linear") == [("input", "output")]
    assert found("dense") == [("input", "1"), ("1", "3"), ("3", "output")]
    assert found("convolutions") == [("input", "1"), ("1", "4"), ("4", "7"), ("7", "output")]
    assert found("written") == [("input", "tanh"), ("tanh", "tanh_1"), ("tanh_1", "sigmoid"), ("sigmoid", "output")]


def test_words_are_matched_by_their_embeddings() -> None:
    model = nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(12, 5), nn.Tanh(), nn.Linear(5, 3))
    assert bound_term(RM(), model).value.layers[0].to_point == "0"  # type: ignore[attr-defined]
    data = [(torch.randint(7, (9, 3)), torch.arange(9) % 3) for _ in range(3)]
    fed = Federation(model, parties.from_arrays(data, test=0), RM(), lr=0.1, steps=2, batch=4)
    assert fed.fit(2, progress=False).state.execution_mode == "stacked" and not fed.rejections_


@settings(deadline=None, derandomize=True, max_examples=20)
@given(st.lists(st.integers(3, 6), min_size=1, max_size=3), st.integers(0, 10**6))
def test_loss_is_zero_for_matching_layers_that_invert_a_linear_model(widths: list[int], seed: int) -> None:
    """Layers that only widen lose nothing: eq. (1) is 0 with the pseudo-inverse for θ."""
    torch.manual_seed(seed)
    sizes = [3, *sorted(widths)]
    model = nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(sizes))).double()
    points = ("input", *map(str, range(len(model))))
    term = bound_term(RM(points=points), model)
    own = []
    for layer in model:
        back = torch.linalg.pinv(layer.weight.detach())  # type: ignore[arg-type]
        own += [back, -back @ layer.bias.detach()]  # type: ignore[operator]
    theta = term.initial_values(Net(model).copy_initial_row(), np.random.default_rng(0))  # type: ignore[misc]
    assert isinstance(term.value, MatchingLoss)
    for part, values in zip(term.value.split(theta), own, strict=True):
        part.copy_(values)
    x = torch.randn(5, 3, dtype=torch.float64)
    assert float(term.value(loss_context(model, term, theta, Net(model).copy_initial_row(), x))) < 1e-18
    assert float(term.value(loss_context(model, term, theta, Net(model).copy_initial_row() + 0.1, x))) > 1e-6


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_loss_equals_that_of_torch_layers(reduction: str) -> None:
    """Compare eq. (1) with nn.ConvTranspose2d, nn.MaxUnpool2d and nn.Linear; ERRATA 5: mean or sum of squares."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 3)).double()
    term = bound_term(RM(reduction=reduction), model)  # type: ignore[arg-type]
    net = Net(model)
    x = torch.randn(5, 1, 6, 6, dtype=torch.float64)
    theta = term.initial_values(net.copy_initial_row(), np.random.default_rng(3))  # type: ignore[misc]
    w = net.copy_initial_row() + 0.05 * torch.randn_like(net.copy_initial_row())
    first = nn.ConvTranspose2d(2, 1, 3).double()
    second = nn.Linear(3, 8).double()
    assert isinstance(term.value, MatchingLoss)
    own = list(term.value.split(theta))
    for part, values in zip([*first.parameters(), *second.parameters()], own, strict=True):
        part.data = values
    trained = net.module_from_row(w)
    activation, before = (module[:2](x) for module in (trained, model))  # type: ignore[index]
    _, switches = functional.max_pool2d(activation, 2, return_indices=True)
    rebuilt = functional.max_unpool2d(second(trained(x)).view(5, 2, 2, 2), switches, 2)
    squares = [(first(activation) - x) ** 2, (rebuilt - before) ** 2]
    expected = sum(part.mean() if reduction == "mean" else part.flatten(1).sum(1).mean() for part in squares)
    torch.testing.assert_close(term.value(loss_context(model, term, theta, w, x)), expected, rtol=1e-12, atol=0)


def test_matching_layers_are_initialized_like_torch_layers() -> None:
    """The draws are uniform within ±1/√(fan in), from the party's own stream."""
    term = bound_term(RM(), nn.Sequential(nn.Linear(30, 100), nn.ReLU(), nn.Conv1d(1, 1, 1), nn.Linear(100, 40)))
    row = torch.zeros(3)
    assert isinstance(term.value, MatchingLoss) and term.initial_values is not None
    drawn = [list(term.value.split(term.initial_values(row, seeds.stream(0, 1, name, "matching")))) for name in "aab"]
    assert all(torch.equal(one, two) for one, two in zip(drawn[0], drawn[1], strict=True))
    assert not torch.equal(drawn[0][0], drawn[2][0])
    for part, fan_in in zip(drawn[0], (100, 100, 40, 40, 1, 1), strict=True):
        assert float(part.abs().max()) <= fan_in**-0.5
    assert float(drawn[0][0].abs().max()) > 0.99 * 100**-0.5 and abs(float(drawn[0][0].mean())) < 0.005


@pytest.mark.filterwarnings("ignore:Using padding='same'")  # torch's own warning about speed
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NETS)
def test_gradients_agree_with_finite_differences(name: str, mode: str) -> None:
    """Check eq. (2) with both other terms, along w and θ, for two parties with different strengths."""
    module = make_module(name)
    shape = NETS[name][0]
    net = Net(module)
    wrapped = algorithms.WeightDivergence(algorithms.EntropyRegularization(RM(), min_entropy=1.05), 0.3)
    terms = bind(wrapped, net).terms
    torch.manual_seed(4)
    theta = torch.stack([terms[0].initial_values(net.copy_initial_row(), np.random.default_rng(k)) for k in range(2)])
    columns = torch.cat([net.copy_initial_row() + 0.1 * torch.randn(2, net.layout.trainable_width).double(), theta], 1)
    x = torch.randn(2, 5, *shape, dtype=torch.float64)
    y = torch.randint(3, (2, 5))
    strengths = torch.tensor([[0.7, 0.4, 0.2], [1.5, 0.1, 0.0]], dtype=torch.float64)
    objective = Objective(net, functional.cross_entropy, terms, widths=(theta.shape[1], 0, 0))
    none = columns.new_empty(2, 0)
    received = net.copy_initial_row().repeat(2, 1)
    found = []
    for rows in ([0], [1]) if mode in ("single", "looped") else ([0, 1],):
        stack = Stack(net.layout, [columns[rows]], lead=int(mode != "single"))
        with torch.no_grad():
            descent = StackGradient(
                objective, mode, stack, statistics=none[rows], received=received[rows], strengths=strengths[rows]
            )
            descent(x[rows], y[rows])
        found.append(descent.stack.gradient)
    gradient = torch.cat(found)
    step = 1e-6

    def value(k: int, at: Tensor) -> Tensor:
        return objective.party_objective(at, none[k], received[k], strengths[k], x[k], y[k])[0].detach()

    for k in range(2):
        for column in np.random.default_rng(k).choice(columns.shape[1], 40, replace=False).tolist():
            there = torch.zeros(columns.shape[1], dtype=torch.float64)
            there[column] = step
            slope = (value(k, columns[k] + there) - value(k, columns[k] - there)) / (2 * step)
            assert abs(float(gradient[k, column] - slope)) < 1e-7


def all_parameters(fed: Federation, population: Population) -> Tensor:
    return torch.cat(
        [fed.state.global_model, *(fed.engine_.party_states.get(name)["private.matching"] for name in population)]
    )


def assert_modes_agree(model: nn.Module, population: Population, algorithm: Algorithm, solver: Sgd) -> None:
    """Assert that all execution modes give the same global model and matching layers."""
    rows = []
    for mode in MODES:
        fed = Federation(model, population, algorithm, solver=solver, seed=1)
        fed.state = replace(fed.state, execution_mode=mode)
        rows.append(all_parameters(fed.fit(2, progress=False), population))
        assert not fed.rejections_
    for row in rows[:-1]:
        torch.testing.assert_close(row, rows[-1], rtol=0, atol=1e-12)


SOLVERS = [Sgd(lr=0.1, epochs=2, batch=4), Sgd(lr=0.01, steps=3, batch=2, optimizer="Adam"), Sgd(lr=0.1, steps=2)]


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("solver", SOLVERS, ids=["epochs", "Adam", "at once"])
@pytest.mark.parametrize("name", ["dense", "convolutions", "strides and groups", "written"])
def test_all_execution_modes_agree(name: str, solver: Sgd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("descant.training.stacked_gradient.LARGE_MODEL_BYTES", 0)
    algorithm = algorithms.EntropyRegularization(RM(algorithms.FedAvgPlus(alpha=0.5), reduction="sum", coefficient=0.1))
    assert_modes_agree(make_module(name), make_population(NETS[name][0]), algorithm, solver)


@pytest.mark.parametrize("points", [("input", "0", "output"), ("0", "1", "2"), ("1", "2")])
def test_named_points_are_read_before_in_place_changes(points: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(inplace=True), nn.Linear(5, 3)).double()
    assert_modes_agree(model, make_population((6,)), RM(points=points), Sgd(lr=0.1, steps=3, batch=4))
    term = bound_term(RM(points=points), model)
    x = torch.randn(4, 6, dtype=torch.float64)
    features = loss_context(
        model, term, torch.zeros(term.value.width, dtype=x.dtype), Net(model).copy_initial_row(), x
    ).features  # type: ignore[attr-defined]
    if "0" in points:
        torch.testing.assert_close(features["0"], model[0](x))


def test_models_without_a_kernel_are_matched() -> None:
    def mode(*layers: nn.Module) -> str:
        torch.manual_seed(0)
        population = classification_parties(6).subset(["0", "1", "2"])
        fed = Federation(nn.Sequential(*layers), population, RM(), lr=0.1, steps=2, batch=4).fit(2, progress=False)
        assert not fed.rejections_ and fed.state.global_model.isfinite().all()
        return fed.state.execution_mode

    assert mode(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)) == "vectorized"
    assert mode(nn.Linear(6, 8), nn.Softplus(), nn.Linear(8, 3), nn.LogSoftmax(1)) == "vectorized"
    assert mode(nn.Linear(6, 8), nn.Dropout(), nn.ReLU(), nn.Linear(8, 3)) == "looped"
    assert mode(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)) == "stacked"


@pytest.mark.parametrize("mode", ["stacked", "single", "looped"])
def test_batches_change_no_bit_of_convolutions(mode: str) -> None:
    def hashed(batches: int) -> str:
        population = make_population(NETS["convolutions"][0], 4)
        solver = Sgd(lr=0.05, steps=2, batch=3)
        engine = partial(BytesEngine, batch_count=batches)
        fed = Federation(make_module("convolutions"), population, RM(), solver=solver, engine=engine)
        fed.state = replace(fed.state, execution_mode=mode)
        return fed.fit(2, progress=False).hash()

    assert len({hashed(batches) for batches in (1, 2, 3, 4)}) == 1


@settings(deadline=None, derandomize=True, max_examples=40)
@given(st.integers(2, 7), st.integers(2, 7), st.integers(1, 4), st.integers(0, 10**6))
def test_pooling_switches_match_torch_indices(rows: int, columns: int, high: int, seed: int) -> None:
    """Include many equal values, and a last row or column outside every window."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(high, (2, 3, rows, columns), generator=generator).double().requires_grad_()
    pooled, indices = functional.max_pool2d(x, 2, return_indices=True)
    slope = torch.randn(pooled.shape, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        switches = Switches.of(x, row_maxima(x))
        pairs = row_maxima(x)
        assert torch.equal(torch.maximum(pairs[..., 0, :], pairs[..., 1, :]), pooled)
        (expected,) = torch.autograd.grad(pooled, x, slope)
        assert torch.equal(switches.unpool(slope), expected)
        assert torch.equal(switches.pool(expected), slope)
        back = InverseMaxPool("", 2, (("kernel_size", 2), ("stride", 2)))
        assert torch.equal(back(slope, x), expected)
        assert torch.equal(switches.pool(x), x.flatten(2).gather(2, indices.flatten(2)).view(pooled.shape))


BASES = [algorithms.FedAvg(), algorithms.FedProx(0.1), algorithms.FedAvgPlus(alpha=1.0), algorithms.FedGeoMedPlus(1.0)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("base", BASES, ids=lambda base: base.name)
def test_coefficient_zero_equals_the_wrapped_algorithm_bit_for_bit(base: Algorithm, mode: str) -> None:
    def hashed(algorithm: Algorithm) -> str:
        fed = Federation(network(), classification_parties(5), algorithm, lr=0.1, steps=3, batch=4, seed=2)
        fed.state = replace(fed.state, execution_mode=mode)
        return fed.fit(2, progress=False).hash()

    plain = hashed(base)
    for wrap in (RM, algorithms.EntropyRegularization, algorithms.WeightDivergence):
        assert hashed(wrap(base, coefficient=0.0)) == plain
    assert hashed(RM(base)) != plain


@pytest.mark.parametrize("mode", MODES)
def test_party_with_coefficient_zero_trains_as_without_the_term(mode: str) -> None:
    """The other parties differ, because a coefficient may depend on party and round."""
    population = classification_parties(4, torch.float64)
    rows = []
    for algorithm in (algorithms.Local(), RM(algorithms.Local(), coefficient=PerParty({"1": 3.0}, default=0.0))):
        fed = Federation(network(torch.float64), population, algorithm, lr=0.1, steps=3, batch=4)
        fed.state = replace(fed.state, execution_mode=mode)
        fed.fit(2, progress=False)
        rows.append(torch.stack([fed.state.personal_models.get(name)["model"] for name in population]))
    apart = (rows[0] - rows[1]).abs().amax(1)
    assert float(apart[1]) > 1e-3 and float(apart[[0, 2, 3]].max()) < 1e-12


def test_wrapping_adds_one_term_and_changes_nothing_else() -> None:
    for base in BASES:
        wrapped = algorithms.WeightDivergence(algorithms.EntropyRegularization(RM(base)))
        assert wrapped.name == f"{base.name}+RM+ER+WD" and len(wrapped.terms) == len(base.terms) + 3
        assert replace(wrapped, name=base.name, terms=base.terms) == base


@pytest.mark.parametrize("mode", MODES)
def test_two_rounds_equal_plain_torch(mode: str) -> None:
    """Write out Algorithm 1 without its tuner: modules and one optimizer per party, which keeps its θ."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    population = classification_parties(3, torch.float64)
    lr = 0.1
    fed = Federation(model, population, RM(coefficient=0.5), lr=lr, steps=2, batch=100, seed=1)
    fed.state = replace(fed.state, execution_mode=mode)
    fed.fit(2, progress=False)
    term = bound_term(RM(), model)
    assert isinstance(term.value, MatchingLoss) and term.initial_values is not None
    global_model = nn.utils.parameters_to_vector(model.parameters()).detach()
    theta = {name: term.initial_values(global_model, seeds.stream(1, 1, name, "matching")) for name in population}
    for _ in range(2):
        frozen = Net(model).module_from_row(global_model)
        trained = {}
        for party in population.values():
            own = [part.clone().requires_grad_() for part in term.value.split(theta[party.name])]
            module = Net(model).module_from_row(global_model)
            optimizer = torch.optim.SGD([*module.parameters(), *own], lr)
            for _ in range(2):
                optimizer.zero_grad()
                hidden, aim = (one[:2](party.x) for one in (module, frozen))  # type: ignore[index]
                output = module[2](hidden)  # type: ignore[index]
                back = functional.linear(hidden, own[0], own[1]), functional.linear(output, own[2], own[3])
                squares = (back[0] - party.x).square().mean() + (back[1] - aim.detach()).square().mean()
                (functional.cross_entropy(output, party.y) + 0.5 * squares).backward()
                optimizer.step()
            for part, values in zip(term.value.split(theta[party.name]), own, strict=True):
                part.copy_(values.detach())
            trained[party.name] = nn.utils.parameters_to_vector(module.parameters()).detach()
        weights = torch.tensor([population[name].samples for name in population], dtype=torch.float64)
        global_model = (weights / weights.sum()) @ torch.stack(list(trained.values()))
    torch.testing.assert_close(
        all_parameters(fed, population), torch.cat([global_model, *theta.values()]), rtol=0, atol=1e-12
    )


def test_entropy_by_hand() -> None:
    """Eq. (8): probabilities (½, ½) have ln 2 nats, (¾, ¼) have 0.5623, a certain output has none."""
    output = torch.tensor([[0.0, 0.0], [math.log(3.0), 0.0], [200.0, 0.0]], dtype=torch.float64)
    entropies = [math.log(2), 0.75 * math.log(4 / 3) + 0.25 * math.log(4), 0.0]
    short = [max(0.0, 0.6 - entropy) for entropy in entropies]
    assert float(EntropyTerm(0.6).entropy_deficit(output)) == pytest.approx(sum(short) / 3, abs=1e-12)
    assert float(EntropyTerm(0.6, "batch").entropy_deficit(output)) == pytest.approx(
        0.6 - sum(entropies) / 3, abs=1e-12
    )
    assert float(EntropyTerm(0.4, "batch").entropy_deficit(output)) == 0.0


@pytest.mark.parametrize("classes", [2, 3, 7, 10, 100])
def test_default_min_entropy_is_reachable_for_any_number_of_classes(classes: int) -> None:
    """For ten classes it is exactly 2 nats; for others, the same share of the maximum."""
    output = torch.randn(4, classes, generator=torch.Generator().manual_seed(0))
    assert (
        float(EntropyTerm().entropy_deficit(torch.zeros(4, classes)))
        == 0.0
        < float(EntropyTerm().entropy_deficit(3 * output))
    )
    same = torch.equal(EntropyTerm().entropy_deficit(output), EntropyTerm(2.0).entropy_deficit(output))
    assert same == (classes == 10)
    confident = torch.eye(classes)[:1] * 200
    assert float(EntropyTerm().entropy_deficit(confident)) == pytest.approx(2 * math.log(classes) / math.log(10))


@settings(deadline=None, derandomize=True, max_examples=25)
@given(st.integers(2, 5), st.integers(1, 6), st.floats(0.1, 2.0), st.sampled_from(["samples", "batch"]))
def test_entropy_gradient_agrees_with_finite_differences(n: int, c: int, min_entropy: float, granularity: str) -> None:
    generator = torch.Generator().manual_seed(n * 10 + c)
    output = 2 * torch.randn(n, c, generator=generator, dtype=torch.float64)
    entropy = EntropyTerm(min_entropy, granularity)  # type: ignore[arg-type]
    assert torch.autograd.gradcheck(entropy.entropy_deficit, output.requires_grad_(), atol=1e-5)
    uncertain = torch.zeros(n, c, dtype=torch.float64, requires_grad=True)
    if min_entropy <= math.log(c):
        value = entropy.entropy_deficit(uncertain)
        assert value.item() == pytest.approx(0, abs=1e-12)
        assert torch.autograd.grad(value, uncertain)[0].abs().max() < 1e-12


def test_weight_divergence_is_fedprox_with_twice_the_coefficient() -> None:
    """The paper's penalty ‖w - w̃‖² has no factor of one half."""
    context = LossContext(torch.tensor([3.0, 1.0]), torch.tensor([1.0, 2.0]), *[torch.empty(0)] * 4, {}, {}, None, None)  # type: ignore[arg-type]
    (term,) = algorithms.WeightDivergence().terms
    assert isinstance(term, LossTerm) and float(term.value(context)) == 5.0
    global_models = [
        Federation(network(torch.float64), classification_parties(4, torch.float64), algorithm, lr=0.1, steps=4)
        .fit(2, False)
        .state.global_model
        for algorithm in (algorithms.WeightDivergence(coefficient=0.7), algorithms.FedProx(1.4), algorithms.FedAvg())
    ]
    torch.testing.assert_close(global_models[0], global_models[1], rtol=0, atol=1e-12)
    assert (global_models[0] - global_models[2]).abs().max() > 1e-3


class Branched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.again = nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).relu()
        output: Tensor = self.head((self.again(h) + h).relu())
        return output


class Deciding(Branched):
    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.first(x) if x.sum() > 0 else self.again(x))
        return output


def pooled(pool: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 2, 1), nn.ReLU(), pool, nn.Flatten(), nn.Linear(6, 3))


@pytest.mark.parametrize(
    ("model", "points", "message"),
    [
        (
            Branched(),
            None,
            r"'relu_1' cannot be mapped back to its 'relu': add \('add'\) is between them, and it has more than one",
        ),
        (Deciding(), None, r"points of Deciding cannot be found: torch.fx cannot trace it.* submodules: first, again"),
        (network(), ("input", "nowhere"), r"no point 'nowhere' to watch. It has: input, 0, 1, 2, output"),
        (network(), ("2", "output"), r"at least two points.* The model has: input, 0, 1, 2, output"),
        (
            pooled(nn.AvgPool1d(2)),
            None,
            r"AvgPool1d \('3'\) is between them, and it keeps no indices.*of input, 0, 1, 2, 3, 4",
        ),
        (pooled(nn.AdaptiveMaxPool1d(3)), None, r"AdaptiveMaxPool1d \('3'\) is between them, and it keeps no indices"),
        (pooled(nn.MaxPool1d(2, stride=1)), None, r"MaxPool1d \('3'\) is between them, and its windows overlap"),
        (pooled(nn.Softmin(1)), None, r"Softmin \('3'\) is between them, and it has no known inverse"),
        (pooled(nn.MaxPool1d(2)), "input", r"Matching needs at least two points.* Got \('input',\)"),
    ],
)
def test_models_that_cannot_be_matched_name_the_obstacle(
    model: nn.Module, points: tuple[str, ...] | None, message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        Federation(model, classification_parties(3), RM(points=points)).fit(1, progress=False)


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (RM(coefficient=-1.0), r"The 'coefficient' of FedAvg\+RM must be >= 0. Got -1.0."),
        (RM(reduction="max"), r"The 'reduction' of FedAvg\+RM must be one of 'mean', 'sum'. Got 'max'."),  # type: ignore[arg-type]
        (
            algorithms.EntropyRegularization(min_entropy=-1.0),
            r"The 'min_entropy' of FedAvg\+ER must be >= 0. Got -1.0.",
        ),
        (
            algorithms.EntropyRegularization(granularity="all"),
            r"The 'granularity' of FedAvg\+ER must be one of 'samples', 'batch'.",
        ),  # type: ignore[arg-type]
        (algorithms.WeightDivergence(coefficient=-0.1), r"The 'coefficient' of FedAvg\+WD must be >= 0. Got -0.1."),
        (RM(coefficient=None), r"The 'coefficient' of FedAvg\+RM must be >= 0. Got None."),  # type: ignore[arg-type]
        (
            algorithms.EntropyRegularization(coefficient=None),  # type: ignore[arg-type]
            r"The 'coefficient' of FedAvg\+ER must be >= 0. Got None.",
        ),
        (algorithms.WeightDivergence(coefficient=None), r"The 'coefficient' of FedAvg\+WD must be >= 0. Got None."),  # type: ignore[arg-type]
        (RM(RM()), r"must have different names"),
    ],
)
def test_invalid_settings_are_rejected(algorithm: Algorithm, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        Federation(network(), classification_parties(3), algorithm).fit(1, progress=False)


def test_part_of_a_branched_model_can_be_matched() -> None:
    fed = Federation(Branched(), classification_parties(4), RM(points=("relu_1", "output")), lr=0.1, steps=2).fit(
        1, progress=False
    )
    assert fed.state.execution_mode == "stacked" and not fed.rejections_


def test_code_on_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run its examples in order, in a folder with the sound files that they name."""
    page = (Path(__file__).parents[2] / "docs" / "representation-matching.md").read_text(encoding="utf-8")
    for word, hz in (("yes", 400), ("no", 2000)):
        for k in range(6):
            write_wave(tmp_path / "words" / word / f"{k}.wav", 0.5 * np.sin(hz * np.arange(8000) / (2 + 0.1 * k)))
    monkeypatch.chdir(tmp_path)
    exec("\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)), {})
    assert (tmp_path / "path.png").stat().st_size > 10_000
