"""Batching never changes the result: every method, 1, 2, 3 and K batches, absent parties, serialized messages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bytes_engine import BytesEngine
from descant import Federation, Sgd, algorithms
from descant.engines import InProcess
from toy_problems import ALL_METHODS, classification_parties, network


def rows_after(name: str, batch_count: int, dtype: torch.dtype, solver: Sgd, model: nn.Module | None = None) -> Tensor:
    """Return the global model and every personal model after three rounds, as one matrix."""
    engine = partial(BytesEngine, batch_count=batch_count, absent=("2",))
    fed = Federation(
        model or network(dtype),
        classification_parties(6, dtype),
        ALL_METHODS[name](),
        solver=solver,
        seed=5,
        engine=engine,
    )
    for _ in fed.rounds(3):
        pass
    assert not fed.rejections_
    present = [name for name in fed.population if name != "2"]
    modules = [fed.global_model_, *(fed.models_[name] for name in present)]
    return torch.stack([nn.utils.parameters_to_vector(module.parameters()).detach() for module in modules])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("name", ALL_METHODS)
def test_batching_never_changes_the_result(name: str, dtype: torch.dtype) -> None:
    solver = Sgd(lr=0.1, steps=4, batch=4)
    whole = rows_after(name, 1, dtype, solver)
    assert whole.isfinite().all()
    bound = (1e-6 if dtype == torch.float32 else 1e-9) * whole.abs().max()
    for batch_count in (2, 3, 5):
        torch.testing.assert_close(rows_after(name, batch_count, dtype, solver), whole, rtol=0, atol=float(bound))


@pytest.mark.parametrize("options", [{"optimizer": "Adam"}, {"options": {"momentum": 0.9}}], ids=["Adam", "momentum"])
def test_batching_changes_nothing_with_optimizer_states_of_different_ages(options: dict[str, object]) -> None:
    solver = Sgd(lr=0.05, epochs=2, batch=4, **options)  # type: ignore[arg-type]
    whole = rows_after("stragglers", 1, torch.float64, solver)
    torch.testing.assert_close(rows_after("stragglers", 3, torch.float64, solver), whole, rtol=0, atol=1e-9)


@pytest.mark.parametrize("execution_mode", ["stacked", "single", "vectorized", "looped"])
@pytest.mark.parametrize("name", ["FedGeoMedPlus", "FedProx", "Ditto", "matching", "stragglers"])
def test_batching_changes_no_bit_in_any_execution_mode(name: str, execution_mode: str) -> None:
    def run_hash(batch_count: int) -> str:
        solver = Sgd(lr=0.05, epochs=1, batch=4, optimizer="Adam")
        engine = partial(BytesEngine, batch_count=batch_count, absent=("2",))
        fed = Federation(
            network(), classification_parties(6), ALL_METHODS[name](), solver=solver, seed=5, engine=engine
        )
        fed.state = replace(fed.state, execution_mode=execution_mode)
        return fed.fit(2, progress=False).hash()

    assert run_hash(1) == run_hash(3) == run_hash(5)  # bit for bit, party states included


class Smooth(nn.Module):
    """A network whose activation is a function and no layer."""

    def __init__(self, function: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
        super().__init__()
        self.function = function
        self.first = nn.Linear(6, 5, dtype=dtype)
        self.last = nn.Linear(5, 3, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(self.function(self.first(x)))
        return output


_ACTIVATIONS = [
    torch.sigmoid,
    torch.tanh,
    nn.functional.gelu,
    nn.functional.elu,
    nn.functional.silu,
    nn.functional.softplus,
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("execution_mode", ["stacked", "vectorized"])
@pytest.mark.parametrize("function", _ACTIVATIONS, ids=lambda function: function.__name__)
def test_batching_changes_no_bit_of_smooth_activations(function: Any, execution_mode: str, dtype: torch.dtype) -> None:
    """Vectorized kernels must compute the tail of an array like the rest of it: 3 samples of 5 units."""
    layers = {"sigmoid": nn.Sigmoid(), "tanh": nn.Tanh(), "gelu": nn.GELU(), "elu": nn.ELU(), "silu": nn.SiLU()}

    def run_hash(model: nn.Module, batch_count: int, seed: int) -> str:
        solver = Sgd(lr=0.05, steps=2, batch=3)
        engine = partial(BytesEngine, batch_count=batch_count)
        fed = Federation(
            model, classification_parties(6, dtype), algorithms.FedAvg(), solver=solver, seed=seed, engine=engine
        )
        fed.state = replace(fed.state, execution_mode=execution_mode)
        return fed.fit(2, progress=False).hash()

    for seed in range(3):
        torch.manual_seed(seed)
        functional = Smooth(function, dtype)
        layer = layers.get(function.__name__, nn.Softplus())
        for model in (functional, nn.Sequential(functional.first, layer, functional.last)):
            assert len({run_hash(model, batch_count, seed) for batch_count in (1, 2, 3, 6)}) == 1


def test_batching_changes_no_bit_of_running_statistics() -> None:
    def run_hash(batch_count: int) -> str:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
        population = classification_parties(7).subset(["0", "1", "2", "3", "4"])
        engine = partial(BytesEngine, batch_count=batch_count)
        fed = Federation(model, population, algorithms.FedAvgPlus(), lr=0.1, steps=3, batch=4, engine=engine)
        assert fed.state.execution_mode == "vectorized"
        return fed.fit(2, progress=False).hash()

    assert run_hash(1) == run_hash(2) == run_hash(5)


class OwnDropout(nn.Module):
    """A module that draws random numbers in its own forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3)).double()

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.body(x)
        return output


def test_batching_changes_no_bit_of_modules_that_draw_random_numbers() -> None:
    torch.manual_seed(0)
    model = OwnDropout()
    solver = Sgd(lr=0.1, steps=4, batch=4)
    whole = rows_after("FedAvg", 1, torch.float64, solver, model)
    assert torch.equal(rows_after("FedAvg", 3, torch.float64, solver, model), whole)


@pytest.mark.parametrize("execution_mode", ["stacked", "single", "vectorized", "looped"])
def test_reported_losses_do_not_depend_on_batching(execution_mode: str) -> None:
    def losses(max_parties: int | None) -> list[float]:
        solver = Sgd(lr=0.05, epochs=1, batch=4)
        engine = partial(InProcess, max_parties=max_parties)
        fed = Federation(
            network(), classification_parties(6), algorithms.FedAvgPlus(), solver=solver, seed=5, engine=engine
        )
        fed.state = replace(fed.state, execution_mode=execution_mode)
        return [round["loss"] for round in fed.fit(3, progress=False).history_]

    assert losses(1) == losses(2) == losses(None)
