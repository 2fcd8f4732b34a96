"""The SGD solver compared with plain torch: one module, one optimizer, one loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from descant import Algorithm, Federation, Sgd, algorithms, parties
from descant.core import seeds
from descant.core.algorithm import LossContext, LossTerm
from descant.engines.in_process import InProcess
from descant.errors import ModelError, SettingError
from descant.parties import Population
from descant.training import stacked_descent, stacked_gradient
from descant.training.batches import draw_batches
from toy_problems import classification_parties, network


def plain_torch(
    population: Population, solver: Sgd, rounds: int, seed: int, model: nn.Module | None = None
) -> list[Tensor]:
    """Train each party alone, with its own module and a torch optimizer that persists over all rounds."""
    rows = []
    for party in population.values():
        module = (model or network(torch.float64)).train()
        make = getattr(torch.optim, str(solver.optimizer))
        optimizer = make(module.parameters(), lr=solver.lr, **solver.options)
        for t in range(1, rounds + 1):
            if solver.moments == "reset":
                optimizer = make(module.parameters(), lr=solver.lr, **solver.options)
            rng = seeds.stream(seed, t, party.name, "batch")
            draws = draw_batches(party.samples, solver.batch, solver.hyper.work, unit=solver.unit, rng=rng)
            for index, length in zip(draws.indices, draws.lengths, strict=True):
                optimizer.zero_grad()
                output = module(party.x[index[:length]])
                nn.functional.cross_entropy(output, party.y[index[:length]]).backward()
                optimizer.step()
        rows.append(nn.utils.parameters_to_vector(module.parameters()).detach())
    return rows


SOLVERS = {
    "steps": Sgd(lr=0.1, steps=5, batch=4),
    "epochs": Sgd(lr=0.1, epochs=2, batch=4),
    "all at once": Sgd(lr=0.1, steps=3, batch=None),
    "momentum": Sgd(lr=0.05, steps=5, batch=4, options={"momentum": 0.9, "weight_decay": 0.01}),
    "Adam": Sgd(lr=0.02, steps=5, batch=4, optimizer="Adam"),
    "Adam, epochs": Sgd(lr=0.02, epochs=2, batch=4, optimizer="Adam"),
    "Adam, reset": Sgd(lr=0.02, steps=5, batch=4, optimizer="Adam", moments="reset"),
    "RMSprop": Sgd(lr=0.01, steps=5, batch=4, optimizer="RMSprop"),
    "AdamW": Sgd(lr=0.01, steps=5, batch=4, optimizer="AdamW"),
}


@pytest.mark.parametrize("mode", ["stacked", "single", "vectorized", "looped"])
@pytest.mark.parametrize("name", SOLVERS)
def test_local_training_is_plain_torch_training(name: str, mode: str) -> None:
    population = classification_parties(5, torch.float64)
    solver = SOLVERS[name]
    fed = Federation(network(torch.float64), population, algorithms.Local(), solver=solver, seed=3)
    fed.state = replace(fed.state, execution_mode=mode)
    fed.fit(3, progress=False)
    for party, expected in zip(population, plain_torch(population, solver, 3, seed=3), strict=True):
        torch.testing.assert_close(fed.state.personal_models.get(party)["model"], expected, rtol=0, atol=1e-12)


def test_fedrep_with_one_step_trains_both_halves() -> None:
    fed = Federation(network(), classification_parties(3), algorithms.FedRep(), lr=0.1, steps=1, batch=4).fit(
        1, progress=False
    )
    trained = fed.models_["0"].state_dict()
    start = network().state_dict()
    assert all(not torch.equal(trained[name], start[name]) for name in start)


class CountingOptimizer(torch.optim.Optimizer):
    """Counts its steps in a Python number, which would be lost between rounds."""

    def __init__(self, params: object, lr: float) -> None:
        super().__init__(params, {"lr": lr})  # type: ignore[arg-type]

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["step"] = self.state[parameter].get("step", 0) + 1
                parameter.data -= group["lr"] * parameter.grad


def test_an_optimizer_with_non_tensor_state_is_rejected() -> None:
    with pytest.raises(SettingError, match="CountingOptimizer cannot step a stack of parties: it keeps 'step' as"):
        Federation(
            network(), classification_parties(3), algorithms.FedAvg(), solver=Sgd(optimizer=CountingOptimizer)
        ).fit(1, progress=False)


def test_reset_moments_are_not_stored() -> None:
    population = classification_parties(3)
    for moments, stored in (("keep", 3), ("reset", 0)):
        solver = Sgd(lr=0.02, steps=2, batch=4, optimizer="Adam", moments=moments)  # type: ignore[arg-type]
        fed = Federation(network(), population, algorithms.FedAvg(), solver=solver).fit(1, progress=False)
        assert len(fed.engine_.party_states.names()) == stored


def test_stragglers_take_the_steps_that_the_round_assigns() -> None:
    population = classification_parties(5, torch.float64)
    solver = Sgd(lr=0.05, steps=6, batch=4, optimizer="Adam")
    algorithm = replace(algorithms.Local(), participation=algorithms.Stragglers(0.6))
    fed = Federation(network(torch.float64), population, algorithm, solver=solver, seed=3)
    (first,) = fed.rounds(1)
    works = {name: hyper.work for name, hyper in first.round.participants.items()}
    assert sum(work < 6 for work in works.values()) == 3 and min(works.values()) >= 1
    for name, work in works.items():
        (expected,) = plain_torch(population.subset([name]), replace(solver, steps=work), 1, seed=3)
        torch.testing.assert_close(fed.state.personal_models.get(name)["model"], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
def test_fedrep_trains_the_head_and_then_the_body(optimizer: str) -> None:
    """With one party: two steps on the last layer alone, then two on the first alone, as plain torch does them."""
    population = classification_parties(5, torch.float64).subset(["0"])
    fed = Federation(
        network(torch.float64),
        population,
        algorithms.FedRep(),
        solver=Sgd(lr=0.1, steps=4, batch=100, optimizer=optimizer),
    )
    fed.fit(1, progress=False)
    module = network(torch.float64)
    party = population["0"]
    for layer in (2, 0):
        part = dict(module.named_modules())[str(layer)]
        stepper = getattr(torch.optim, optimizer)(part.parameters(), lr=0.1)
        for _ in range(2):
            module.zero_grad()
            nn.functional.cross_entropy(module(party.x), party.y).backward()
            stepper.step()
    trained = fed.models_["0"].state_dict()
    if optimizer == "SGD":  # Adam also counts the steps in which the body is frozen
        for name, expected in module.state_dict().items():
            torch.testing.assert_close(trained[name], expected, rtol=0, atol=1e-12)
    halfway = Federation(network(torch.float64), population, algorithms.FedRep(head_share=1.0), solver=fed.solver).fit(
        1, False
    )
    assert torch.equal(halfway.models_["0"].state_dict()["0.weight"], network(torch.float64).state_dict()["0.weight"])


def test_an_epoch_takes_every_sample_once_and_steps_have_equal_sizes() -> None:
    rng = seeds.stream(0, 1, "a", "batch")
    epochs = draw_batches(11, 4, 2, unit="epochs", rng=rng)
    assert epochs.lengths == (4, 4, 3, 4, 4, 3)
    for first in (0, 3):
        taken = [int(i) for step in range(first, first + 3) for i in epochs.indices[step, : epochs.lengths[step]]]
        assert sorted(taken) == list(range(11))
    steps = draw_batches(11, 4, 5, unit="steps", rng=rng)
    assert steps.lengths == (4,) * 5
    assert all(len(set(row.tolist())) == 4 for row in steps.indices)
    assert draw_batches(3, 4, 2, unit="steps", rng=rng).lengths == (3, 3)
    assert draw_batches(1, 4, 2, unit="steps", rng=rng).indices.tolist() == [[0], [0]]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.lstm(x.reshape(-1, 2, 3))[0][:, -1])
        return output


def test_the_execution_mode_is_a_function_of_the_model() -> None:
    def mode(model: nn.Module, count: int = 5, algorithm: Algorithm = algorithms.FedAvg()) -> str:  # noqa: B008
        return Federation(model, classification_parties(count), algorithm).state.execution_mode

    assert mode(network()) == "stacked"
    assert mode(nn.Linear(6, 3)) == "stacked"
    assert mode(nn.Sequential(nn.Linear(6, 8), nn.GroupNorm(2, 8), nn.Linear(8, 3))) == "vectorized"
    assert mode(nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3))) == "vectorized"
    assert mode(Recurrent()) == "looped"
    assert mode(nn.Sequential(nn.Linear(6, 8), nn.Dropout(), nn.Linear(8, 3))) == "looped"
    wide = stacked_descent.STACK_BYTES // 4 // 6
    large = nn.Sequential(nn.Linear(6, wide), nn.Linear(wide, 3))
    assert mode(large) == "stacked"
    assert mode(large, algorithm=algorithms.FedProx()) == "stacked"  # fused steps with terms, too
    assert mode(nn.Sequential(nn.Linear(6, wide), nn.LayerNorm(wide), nn.Linear(wide, 3))) == "single"
    assert mode(nn.Sequential(nn.Linear(6, wide), nn.GroupNorm(1, wide), nn.Linear(wide, 3))) == "looped"
    assert mode(network(), count=1) == "single"


LAYERS: dict[str, tuple[tuple[int, ...], Callable[[], nn.Module]]] = {
    "linear on rows": ((2, 3), lambda: nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Flatten(), nn.Linear(8, 3))),
    "no bias": ((6,), lambda: nn.Sequential(nn.Linear(6, 20, bias=False), nn.ReLU(inplace=True), nn.Linear(20, 3))),
    "wide": ((6,), lambda: nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 33), nn.SiLU(), nn.Linear(33, 3))),
    "layer norm": ((6,), lambda: nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ELU(), nn.Linear(8, 3))),
    "layer norm of rows": ((2, 3), lambda: nn.Sequential(nn.LayerNorm((2, 3)), nn.Flatten(), nn.Linear(6, 3))),
    "convolution": (
        (1, 6, 6),
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(4, 2, 2, bias=False),
            nn.LeakyReLU(),
            nn.AvgPool2d(2),
            nn.Flatten(),
            nn.Linear(2, 3),
        ),
    ),
    "convolution of a line": (
        (2, 5),
        lambda: nn.Sequential(
            nn.Conv1d(2, 4, 3, stride=2),
            nn.Softplus(),
            nn.MaxPool1d(2),
            nn.AdaptiveAvgPool1d(1),
            nn.Flatten(),
            nn.Linear(4, 3),
        ),
    ),
}


class FunctionalCalls(nn.Module):
    """A network as in tutorials: functional calls, and views by the batch size."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3, padding=1)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.max_pool2d(nn.functional.relu(self.conv(x.view(-1, 1, 4, 4))), 2)
        x = nn.functional.avg_pool2d(x, 1).reshape(x.shape[0], -1)
        output: Tensor = self.head(x.view(x.size(0), -1))
        return output


LAYERS["functional calls"] = ((4, 4), FunctionalCalls)
LAYERS["unflattened"] = ((16,), lambda: nn.Sequential(nn.Unflatten(1, (1, 4, 4)), FunctionalCalls()))


def parties_with_shape(count: int, shape: tuple[int, ...], integers: bool = False) -> Population:
    """Return small parties of different sizes with samples of this shape; integers below 7 on request."""
    generator = torch.Generator().manual_seed(2)
    data = []
    for n in range(3, 3 + 2 * count, 2):
        x = torch.randn(n, *shape, generator=generator, dtype=torch.float64)
        x = torch.randint(7, (n, *shape), generator=generator) if integers else x
        data.append((x, torch.randint(0, 3, (n,), generator=generator)))
    return parties.from_arrays(data, test=0, dtype=None if integers else torch.float64)


def check_modes_agree(model: nn.Module, population: Population, algorithm: Algorithm, solver: Sgd) -> None:
    """Check that all execution modes of the kernel give the result of the module itself."""
    rows = {}
    for mode in ("stacked", "single", "looped"):
        fed = Federation(model, population, algorithm, solver=solver, seed=1)
        assert fed.state.execution_mode == "stacked"
        fed.state = replace(fed.state, execution_mode=mode)
        fed.fit(2, progress=False)
        assert not fed.rejections_
        rows[mode] = torch.stack([fed.state.personal_models.get(name)["model"] for name in population])
        losses = rows.setdefault("loss of " + mode, torch.tensor([entry["loss"] for entry in fed.history_]))
        torch.testing.assert_close(losses, rows["loss of stacked"], rtol=1e-12, atol=0)
    torch.testing.assert_close(rows["stacked"], rows["looped"], rtol=0, atol=1e-12)
    torch.testing.assert_close(rows["single"], rows["looped"], rtol=0, atol=1e-12)


@pytest.mark.parametrize("solver", [Sgd(lr=0.1, epochs=2, batch=4), Sgd(lr=0.01, steps=3, batch=2, optimizer="Adam")])
@pytest.mark.parametrize("name", LAYERS)
def test_kernels_of_common_layers_equal_the_module(name: str, solver: Sgd) -> None:
    torch.manual_seed(0)
    shape, make = LAYERS[name]
    check_modes_agree(make().double(), parties_with_shape(4, shape), algorithms.FedAvgPlus(alpha=0.5), solver)


@pytest.mark.parametrize("solver", [Sgd(lr=0.1, epochs=2, batch=4), Sgd(lr=0.1, steps=3, batch=2)])
@pytest.mark.parametrize("method", ["FedAvgPlus", "FedRep", "stragglers"])
@pytest.mark.parametrize("name", ["linear on rows", "no bias", "wide"])
def test_fused_steps_equal_the_module(name: str, method: str, solver: Sgd, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for large models: parties of equal lengths in one stack, and no fused steps with frozen parts."""
    monkeypatch.setattr(stacked_gradient, "LARGE_MODEL_BYTES", 0)
    torch.manual_seed(0)
    shape, make = LAYERS[name]
    algorithm = {
        "FedAvgPlus": algorithms.FedAvgPlus(alpha=0.5),
        "FedRep": replace(algorithms.FedAvgPlus(), freeze=algorithms.FedRep().freeze),
        "stragglers": replace(algorithms.FedAvgPlus(), participation=algorithms.Stragglers(share=0.5)),
    }[method]
    check_modes_agree(make().double(), parties_with_shape(4, shape), algorithm, solver)


def test_kernels_support_embeddings() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(12, 3)).double()
    check_modes_agree(
        model, parties_with_shape(4, (3,), integers=True), algorithms.FedAvgPlus(), Sgd(lr=0.1, steps=3, batch=2)
    )


def squared(output: Tensor, y: Tensor) -> Tensor:
    return (output - nn.functional.one_hot(y, 3)).square().sum(1)


def test_kernels_support_any_loss_and_term() -> None:
    rows = []
    for mode in ("stacked", "single", "vectorized", "looped"):
        algorithm = replace(algorithms.FedProx(0.5), personalize=algorithms.FedAvgPlus().personalize)
        fed = Federation(
            network(torch.float64), classification_parties(5, torch.float64), algorithm, loss=squared, lr=0.1, steps=3
        )
        fed.state = replace(fed.state, execution_mode=mode)
        rows.append(fed.fit(2, progress=False).state.global_model)
    for row in rows[:-1]:
        torch.testing.assert_close(row, rows[-1], rtol=0, atol=1e-12)


class Unstackable(nn.Module):
    """Common layers in a forward that must not be stacked."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first = nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.first(x)
        if self.kind == "overwrites":
            h = self.relu(h) + h  # the second h is overwritten by then
        elif self.kind == "mixes samples":
            h = h - h.mean(0)
        elif self.kind == "flattens all":
            h = torch.flatten(h).view(-1, 6)
        elif self.kind == "scales by the batch":
            h = h / h.size(0)
        output: Tensor = self.head(h)
        return output


class UnusedHead(nn.Module):
    """A model with a head that the output does not use, and only a loss term regularizes."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)
        self.spare = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(x)
        return output


def decay(context: LossContext) -> Tensor:
    return context.w.square().sum()


def test_unused_parameters_are_trained_by_terms_alone() -> None:
    algorithm = replace(algorithms.FedAvg(), terms=(LossTerm("decay", decay, 0.1),))
    rows = []
    for mode in ("", "looped"):
        torch.manual_seed(0)
        fed = Federation(
            UnusedHead().double(), classification_parties(4, torch.float64), algorithm, lr=0.1, steps=3, batch=4
        )
        fed.state = replace(fed.state, execution_mode=mode or fed.state.execution_mode)
        rows.append(fed.fit(2, progress=False).state.global_model)
    torch.testing.assert_close(rows[0], rows[1], rtol=0, atol=1e-12)


class InPlaceInput(nn.Module):
    """Changes its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(x.div_(2.0))
        return output


def test_a_module_that_writes_to_its_input_does_not_change_the_data() -> None:
    x = torch.randn(20, 6, generator=torch.Generator().manual_seed(0))
    before = x.clone()
    population = parties.from_arrays([(x[:10], torch.arange(10) % 3), (x[10:], torch.arange(10) % 3)], test=0.3)
    fed = Federation(InPlaceInput(), population, algorithms.FedAvg(), lr=0.1, steps=2, batch=3).fit(1, progress=False)
    fed.scores()
    assert torch.equal(x, before)
    assert fed.scores().personal.values.tolist() == fed.scores().personal.values.tolist()


@pytest.mark.parametrize("kind", ["overwrites", "mixes samples", "flattens all", "scales by the batch"])
def test_modules_with_unsafe_forwards_are_not_stacked(kind: str) -> None:
    fed = Federation(Unstackable(kind), classification_parties(4), algorithms.FedAvg(), lr=0.1, steps=2)
    assert fed.state.execution_mode == "vectorized"
    fed.fit(1, progress=False)


class CustomForward(nn.Module):
    """A forward that reuses, adds and flattens layers, one of them optionally frozen."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.again = nn.Linear(6, 6, bias=False)
        self.head = nn.Linear(6, 3)
        self.again.requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(torch.flatten(x, 1)))
        h = nn.functional.leaky_relu(self.again(h) + h, negative_slope=0.2)
        output: Tensor = self.head(self.first(h).relu() * h)
        return output


@pytest.mark.parametrize(("frozen", "mode"), [(False, "stacked"), (True, "vectorized")])
def test_modules_with_a_custom_forward_are_stacked_if_that_is_safe(frozen: bool, mode: str) -> None:
    torch.manual_seed(0)
    model = CustomForward(frozen).double()
    population = classification_parties(4, torch.float64)
    solver = Sgd(lr=0.1, steps=3, batch=4)
    fed = Federation(model, population, algorithms.FedProx(0.3), solver=solver, seed=1)
    assert fed.state.execution_mode == mode
    fed.fit(2, progress=False)
    again = Federation(model, population, algorithms.FedProx(0.3), solver=solver, seed=1)
    again.state = replace(again.state, execution_mode="looped")
    again.fit(2, progress=False)
    torch.testing.assert_close(fed.state.global_model, again.state.global_model, rtol=0, atol=1e-12)


def test_a_module_that_vmap_rejects_is_trained_by_a_loop() -> None:
    torch.manual_seed(0)
    model = Recurrent().double()
    population = classification_parties(4, torch.float64)
    solver = Sgd(lr=0.1, steps=3, batch=4)
    rows = []
    for party in population.values():
        torch.manual_seed(0)
        alone = parties.from_arrays({party.name: (party.x, party.y)}, test=0, dtype=torch.float64)
        rows += plain_torch(alone, solver, 2, seed=1, model=Recurrent().double())
    fed = Federation(model, population, algorithms.Local(), solver=solver, seed=1).fit(2, progress=False)
    for party, expected in zip(population, rows, strict=True):
        torch.testing.assert_close(fed.state.personal_models.get(party)["model"], expected, rtol=0, atol=1e-12)


def begin_matching(received: Tensor, rng: np.random.Generator) -> Tensor:
    """Return private columns: a 5 x 3 matrix from the trained model's output to the received hidden layer."""
    return torch.linspace(-0.5, 0.5, 15, dtype=received.dtype)


def matching(context: LossContext) -> Tensor:
    """Toy representation matching: reconstruct the received hidden layer from the trained model's output."""
    rebuilt = context.features["2"] @ context.private_params.reshape(3, 5)
    return (rebuilt - context.received_features["1"]).square().mean()


MATCHING = replace(
    algorithms.FedAvg(),
    terms=(LossTerm("matching", matching, 0.5, feature_names=("1", "2"), initial_values=begin_matching),),
)


@pytest.mark.parametrize("mode", ["stacked", "single", "vectorized", "looped"])
def test_a_term_may_own_private_columns_and_read_activations_of_both_models(mode: str) -> None:
    population = classification_parties(3, torch.float64)
    lr = 0.1
    fed = Federation(network(torch.float64), population, MATCHING, lr=lr, steps=2, batch=100, seed=1)
    fed.state = replace(fed.state, execution_mode=mode)
    fed.fit(2, progress=False)
    for name in population:
        state = fed.engine_.party_states.get(name)
        assert set(state) == {"private.matching"}
        torch.testing.assert_close(
            state["private.matching"], _matching_in_plain_torch(population, name, lr), rtol=0, atol=1e-12
        )


def _matching_in_plain_torch(population: Population, name: str, lr: float) -> Tensor:
    """Run the same two rounds with plain modules, and return the private matrix of one party."""
    global_model = network(torch.float64)
    rng = np.random.default_rng(0)
    theta = {party: begin_matching(torch.zeros(1, dtype=torch.float64), rng) for party in population}
    for _ in range(2):
        modules = {}
        frozen = [p.detach().clone() for p in global_model.parameters()]
        for party in population.values():
            module = network(torch.float64)
            nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(frozen), module.parameters())
            private = theta[party.name].clone().requires_grad_()
            for _ in range(2):
                with torch.no_grad():
                    target = torch.tanh(party.x @ frozen[0].T + frozen[1])
                output = module(party.x)
                loss = nn.functional.cross_entropy(output, party.y)
                loss = loss + 0.5 * (output @ private.reshape(3, 5) - target).square().mean()
                trained = [*module.parameters(), private]
                for parameter, gradient in zip(trained, torch.autograd.grad(loss, trained), strict=True):
                    parameter.data -= lr * gradient
            theta[party.name], modules[party.name] = private.detach(), module
        total = sum(party.samples for party in population.values())
        mean = [
            sum(population[n].samples / total * list(m.parameters())[i].detach() for n, m in modules.items())
            for i in range(4)
        ]
        nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(mean), global_model.parameters())  # type: ignore[arg-type]
    return theta[name]


def test_private_columns_are_never_sent() -> None:
    from bytes_engine import BytesEngine

    sent: list[set[str]] = []

    class RecordingEngine(BytesEngine):
        def collect(self, timeout: float) -> list:  # type: ignore[type-arg]
            replies = super().collect(timeout)
            sent.extend(set(reply.arrays) for reply in replies)
            return replies

    names = {"0.weight", "0.bias", "2.weight", "2.bias"}
    Federation(network(), classification_parties(4), MATCHING, lr=0.1, steps=1, batch=4, engine=RecordingEngine).fit(
        2, progress=False
    )
    Federation(
        network(), classification_parties(4), algorithms.Ditto(), lr=0.1, steps=1, batch=4, engine=RecordingEngine
    ).fit(1, progress=False)
    assert all(arrays == names for arrays in sent)
    sent.clear()
    Federation(
        network(), classification_parties(4), algorithms.FedPer(), lr=0.1, steps=1, batch=4, engine=RecordingEngine
    ).fit(2, progress=False)
    assert all(arrays == {"0.weight", "0.bias"} for arrays in sent)


def random_columns(received: Tensor, rng: np.random.Generator) -> Tensor:
    return torch.from_numpy(rng.normal(size=3)).to(received.dtype)


def zero_loss(context: LossContext) -> Tensor:
    return 0 * context.private_params.sum()


def test_private_columns_are_drawn_per_party_and_belong_to_one_term() -> None:
    """A term before Ditto's does not affect Ditto's private model: columns are keyed by the term's name."""
    population = classification_parties(4)
    first = LossTerm("noise", zero_loss, initial_values=random_columns)
    both = replace(algorithms.Ditto(), terms=(first, *algorithms.Ditto().terms))
    fed = Federation(network(), population, both, lr=0.1, steps=2, batch=4).fit(2, progress=False)
    plain = Federation(network(), population, algorithms.Ditto(), lr=0.1, steps=2, batch=4).fit(2, progress=False)
    columns = [fed.engine_.party_states.get(name)["private.noise"] for name in population]
    assert not torch.equal(columns[0], columns[1])
    for name in population:
        ours = fed.models_[name].state_dict()
        theirs = plain.models_[name].state_dict()
        assert all(torch.allclose(ours[key], theirs[key], atol=1e-6) for key in ours)
    with pytest.raises(SettingError, match="must have different names"):
        Federation(network(), population, replace(both, terms=(first, first))).fit(1, progress=False)


def test_the_reported_loss_excludes_the_terms() -> None:
    population = classification_parties(3)
    losses = [
        Federation(network(), population, algorithm, lr=0.1, steps=1, batch=100)
        .fit(1, progress=False)
        .history_[-1]["loss"]
        for algorithm in (algorithms.FedAvg(), algorithms.Ditto(), algorithms.FedProx(5.0))
    ]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6) == pytest.approx(losses[2], abs=1e-6)
    idle = Federation(network(), population, algorithms.FedAvg(), lr=0.1, steps=0).fit(1, progress=False)
    assert np.isnan(idle.history_[-1]["loss"])
    assert torch.allclose(idle.state.global_model, idle.state.initial_model)


def test_an_unknown_point_is_named() -> None:
    algorithm = replace(algorithms.FedAvg(), terms=(LossTerm("matching", matching, feature_names=("nowhere",)),))
    with pytest.raises(ModelError, match=r"no point 'nowhere' to watch. It has: input, 0, 1, 2, output"):
        Federation(network(), classification_parties(3), algorithm).fit(1, progress=False)


@pytest.mark.parametrize(
    ("solver", "message"),
    [
        (Sgd(lr=-1.0), r"The 'lr' of Sgd must be > 0. Got -1.0."),
        (Sgd(lr=float("nan")), r"The 'lr' of Sgd must be > 0. Got nan."),
        (Sgd(batch=0), r"The 'batch' of Sgd must be a whole number >= 1. Got 0."),
        (Sgd(steps=2.5), r"The 'steps' of Sgd must be a whole number >= 0. Got 2.5."),  # type: ignore[arg-type]
        (Sgd(lr="fast"), r"The 'lr' of Sgd must be > 0. Got 'fast'."),  # type: ignore[arg-type]
        (Sgd(steps=3, epochs=2), r"steps or epochs, not both"),
        (Sgd(optimizer=3), r"Give the name of an optimizer of torch.optim, or its class. Got 3."),  # type: ignore[arg-type]
        (Sgd(optimizer="Adamm"), r"There is no optimizer 'Adamm'. Did you mean 'Adam'\?"),
        (Sgd(optimizer="LBFGS"), r"LBFGS cannot step a stack"),
        (Sgd(optimizer="Adafactor"), r"Adafactor is not element-wise"),
        (Sgd(moments="forget"), r"The 'moments' of Sgd must be one of 'keep', 'reset'. Got 'forget'."),  # type: ignore[arg-type]
    ],
)
def test_bad_settings_are_named_before_training(solver: Sgd, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        Federation(network(), classification_parties(3), algorithms.FedAvg(), solver=solver).fit(1, progress=False)


@pytest.mark.parametrize("settings", [{"seed": "x"}, {"seed": 1.5}, {"memory_budget": "1 GB"}, {"seed": True}])
def test_settings_that_are_no_integers_are_named(settings: dict[str, object]) -> None:
    (name,) = settings
    with pytest.raises(SettingError, match=f"The '{name}' of Federation must be a whole number. Got"):
        Federation(network(), classification_parties(3), algorithms.FedAvg(), **settings).fit(1, progress=False)  # type: ignore[arg-type]


def test_a_solver_and_its_shorthand_exclude_each_other() -> None:
    with pytest.raises(SettingError, match="not both"):
        Federation(network(), classification_parties(3), algorithms.FedAvg(), solver=Sgd(), lr=0.1).fit(
            1, progress=False
        )


def test_a_loss_that_is_nan_at_the_start_is_an_error() -> None:
    model = nn.Linear(6, 3)
    with torch.no_grad():
        model.weight.fill_(float("nan"))
    with pytest.raises(ModelError, match="The loss is nan at the start"):
        Federation(model, classification_parties(3), algorithms.FedAvg()).fit(1, progress=False)


def test_a_model_of_the_wrong_shape_is_an_error() -> None:
    with pytest.raises(ModelError, match=r"Linear, its loss or a term fails on a batch \(10, 6\) torch.float32"):
        Federation(nn.Linear(7, 3), classification_parties(4), algorithms.FedAvg()).fit(1, progress=False)


@pytest.mark.parametrize("epochs", [1, 2, 9])
def test_reported_losses_do_not_depend_on_the_cut(epochs: int) -> None:
    """Parties have 9 to 25 samples, so different numbers of batches, and a shorter last one."""

    def losses(max_parties: int | None) -> list[dict[str, float]]:
        engine = InProcess if max_parties is None else partial(InProcess, max_parties=max_parties)
        solver = Sgd(lr=0.05, epochs=epochs, batch=4, optimizer="Adam")
        fed = Federation(network, classification_parties(5), algorithms.FedAvg(), solver=solver, engine=engine)
        return [{name: metrics["loss"] for name, metrics in round.round.metrics.items()} for round in fed.rounds(4)]

    assert losses(None) == losses(2) == losses(1)
