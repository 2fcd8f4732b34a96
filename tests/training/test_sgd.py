"""The SGD solver against plain torch, written out: one module, one optimiser, one loop."""

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
from descant.training import gradient_descent, stacked_gradient
from descant.training.batches import draw_batches
from toy_problems import classification_parties, network


def plain(people: Population, solver: Sgd, rounds: int, seed: int, model: nn.Module | None = None) -> list[Tensor]:
    """Each party alone: its own module and its own torch optimiser, which lives through all rounds."""
    rows = []
    for party in people.values():
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


@pytest.mark.parametrize("way", ["stacked", "single", "vectorized", "looped"])
@pytest.mark.parametrize("name", SOLVERS)
def test_local_training_is_plain_torch_training(name: str, way: str) -> None:
    people = classification_parties(5, torch.float64)
    solver = SOLVERS[name]
    fed = Federation(network(torch.float64), people, algorithms.Local(), solver=solver, seed=3)
    fed.state = replace(fed.state, execution_mode=way)
    fed.fit(3, progress=False)
    for party, expected in zip(people, plain(people, solver, 3, seed=3), strict=True):
        torch.testing.assert_close(fed.state.personal_models.get(party)["model"], expected, rtol=0, atol=1e-12)


def test_fedrep_with_one_step_trains_both_halves() -> None:
    fed = Federation(network(), classification_parties(3), algorithms.FedRep(), lr=0.1, steps=1, batch=4).fit(
        1, progress=False
    )
    trained = fed.models_["0"].state_dict()
    start = network().state_dict()
    assert all(not torch.equal(trained[name], start[name]) for name in start)


class Counting(torch.optim.Optimizer):
    """Counts its steps in a Python number, which would be lost between rounds."""

    def __init__(self, params: object, lr: float) -> None:
        super().__init__(params, {"lr": lr})  # type: ignore[arg-type]

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["step"] = self.state[parameter].get("step", 0) + 1
                parameter.data -= group["lr"] * parameter.grad


def test_an_optimiser_whose_memory_cannot_be_kept_is_refused() -> None:
    with pytest.raises(SettingError, match="Counting cannot step a stack of parties: it keeps 'step' as"):
        Federation(network(), classification_parties(3), algorithms.FedAvg(), solver=Sgd(optimizer=Counting)).fit(
            1, progress=False
        )


def test_moments_that_are_reset_are_not_kept() -> None:
    people = classification_parties(3)
    for moments, kept in (("keep", 3), ("reset", 0)):
        solver = Sgd(lr=0.02, steps=2, batch=4, optimizer="Adam", moments=moments)  # type: ignore[arg-type]
        fed = Federation(network(), people, algorithms.FedAvg(), solver=solver).fit(1, progress=False)
        assert len(fed.engine_.party_states.names()) == kept


def test_stragglers_take_as_many_steps_as_the_round_says() -> None:
    people = classification_parties(5, torch.float64)
    solver = Sgd(lr=0.05, steps=6, batch=4, optimizer="Adam")
    algorithm = replace(algorithms.Local(), participation=algorithms.Stragglers(0.6))
    fed = Federation(network(torch.float64), people, algorithm, solver=solver, seed=3)
    (first,) = fed.rounds(1)
    works = {name: hyper.work for name, hyper in first.round.participants.items()}
    assert sum(work < 6 for work in works.values()) == 3 and min(works.values()) >= 1
    for name, work in works.items():
        (expected,) = plain(people.subset([name]), replace(solver, steps=work), 1, seed=3)
        torch.testing.assert_close(fed.state.personal_models.get(name)["model"], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
def test_fedrep_trains_the_head_and_then_the_body(optimizer: str) -> None:
    """With one party: two steps on the last layer alone, then two on the first alone, as plain torch does them."""
    people = classification_parties(5, torch.float64).subset(["0"])
    fed = Federation(
        network(torch.float64), people, algorithms.FedRep(), solver=Sgd(lr=0.1, steps=4, batch=100, optimizer=optimizer)
    )
    fed.fit(1, progress=False)
    module = network(torch.float64)
    party = people["0"]
    for layer in (2, 0):
        part = dict(module.named_modules())[str(layer)]
        stepper = getattr(torch.optim, optimizer)(part.parameters(), lr=0.1)
        for _ in range(2):
            module.zero_grad()
            nn.functional.cross_entropy(module(party.x), party.y).backward()
            stepper.step()
    trained = fed.models_["0"].state_dict()
    if optimizer == "SGD":  # Adam's own count of steps goes on for the body while it stands still
        for name, expected in module.state_dict().items():
            torch.testing.assert_close(trained[name], expected, rtol=0, atol=1e-12)
    halfway = Federation(network(torch.float64), people, algorithms.FedRep(head_share=1.0), solver=fed.solver).fit(
        1, False
    )
    assert torch.equal(halfway.models_["0"].state_dict()["0.weight"], network(torch.float64).state_dict()["0.weight"])


def test_an_epoch_takes_every_sample_once_and_steps_are_of_one_size() -> None:
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


def test_the_way_is_a_function_of_the_model() -> None:
    def way(model: nn.Module, count: int = 5, algorithm: Algorithm = algorithms.FedAvg()) -> str:  # noqa: B008
        return Federation(model, classification_parties(count), algorithm).state.execution_mode

    assert way(network()) == "stacked"
    assert way(nn.Linear(6, 3)) == "stacked"
    assert way(nn.Sequential(nn.Linear(6, 8), nn.GroupNorm(2, 8), nn.Linear(8, 3))) == "vectorized"
    assert way(nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3))) == "vectorized"
    assert way(Recurrent()) == "looped"
    assert way(nn.Sequential(nn.Linear(6, 8), nn.Dropout(), nn.Linear(8, 3))) == "looped"
    wide = gradient_descent.STACK_BYTES // 4 // 6
    large = nn.Sequential(nn.Linear(6, wide), nn.Linear(wide, 3))
    assert way(large) == "stacked"
    assert way(large, algorithm=algorithms.FedProx()) == "stacked"  # terms step at once, too
    assert way(nn.Sequential(nn.Linear(6, wide), nn.LayerNorm(wide), nn.Linear(wide, 3))) == "single"
    assert way(nn.Sequential(nn.Linear(6, wide), nn.GroupNorm(1, wide), nn.Linear(wide, 3))) == "looped"
    assert way(network(), count=1) == "single"


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


class Written(nn.Module):
    """A network as tutorials write it: functions, views by the batch's own length."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3, padding=1)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.max_pool2d(nn.functional.relu(self.conv(x.view(-1, 1, 4, 4))), 2)
        x = nn.functional.avg_pool2d(x, 1).reshape(x.shape[0], -1)
        output: Tensor = self.head(x.view(x.size(0), -1))
        return output


LAYERS["as tutorials write it"] = ((4, 4), Written)
LAYERS["unflattened"] = ((16,), lambda: nn.Sequential(nn.Unflatten(1, (1, 4, 4)), Written()))


def shaped(count: int, shape: tuple[int, ...], whole: bool = False) -> Population:
    """Small parties of unlike sizes with samples of some shape; whole numbers below 7 on request."""
    generator = torch.Generator().manual_seed(2)
    data = []
    for n in range(3, 3 + 2 * count, 2):
        x = torch.randn(n, *shape, generator=generator, dtype=torch.float64)
        x = torch.randint(7, (n, *shape), generator=generator) if whole else x
        data.append((x, torch.randint(0, 3, (n,), generator=generator)))
    return parties.from_arrays(data, test=0, dtype=None if whole else torch.float64)


def agree(model: nn.Module, people: Population, algorithm: Algorithm, solver: Sgd) -> None:
    """All ways of the kernel give what autograd and the module itself give."""
    rows = {}
    for way in ("stacked", "single", "looped"):
        fed = Federation(model, people, algorithm, solver=solver, seed=1)
        assert fed.state.execution_mode == "stacked"
        fed.state = replace(fed.state, execution_mode=way)
        fed.fit(2, progress=False)
        assert not fed.rejections_
        rows[way] = torch.stack([fed.state.personal_models.get(name)["model"] for name in people])
        losses = rows.setdefault("loss of " + way, torch.tensor([entry["loss"] for entry in fed.history_]))
        torch.testing.assert_close(losses, rows["loss of stacked"], rtol=1e-12, atol=0)
    torch.testing.assert_close(rows["stacked"], rows["looped"], rtol=0, atol=1e-12)
    torch.testing.assert_close(rows["single"], rows["looped"], rtol=0, atol=1e-12)


@pytest.mark.parametrize("solver", [Sgd(lr=0.1, epochs=2, batch=4), Sgd(lr=0.01, steps=3, batch=2, optimizer="Adam")])
@pytest.mark.parametrize("name", LAYERS)
def test_kernels_of_common_layers_give_what_the_module_gives(name: str, solver: Sgd) -> None:
    torch.manual_seed(0)
    shape, make = LAYERS[name]
    agree(make().double(), shaped(4, shape), algorithms.FedAvgPlus(alpha=0.5), solver)


@pytest.mark.parametrize("solver", [Sgd(lr=0.1, epochs=2, batch=4), Sgd(lr=0.1, steps=3, batch=2)])
@pytest.mark.parametrize("method", ["FedAvgPlus", "FedRep", "stragglers"])
@pytest.mark.parametrize("name", ["linear on rows", "no bias", "wide"])
def test_stacks_that_step_at_once_give_what_the_module_gives(
    name: str, method: str, solver: Sgd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As large models do: equal ones together, of unlike lengths apart, and not at all if a part must stand still."""
    monkeypatch.setattr(stacked_gradient, "LARGE_MODEL_BYTES", 0)
    torch.manual_seed(0)
    shape, make = LAYERS[name]
    algorithm = {
        "FedAvgPlus": algorithms.FedAvgPlus(alpha=0.5),
        "FedRep": replace(algorithms.FedAvgPlus(), freeze=algorithms.FedRep().freeze),
        "stragglers": replace(algorithms.FedAvgPlus(), participation=algorithms.Stragglers(share=0.5)),
    }[method]
    agree(make().double(), shaped(4, shape), algorithm, solver)


def test_kernels_look_up_words() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(12, 3)).double()
    agree(model, shaped(4, (3,), whole=True), algorithms.FedAvgPlus(), Sgd(lr=0.1, steps=3, batch=2))


def squared(output: Tensor, y: Tensor) -> Tensor:
    return (output - nn.functional.one_hot(y, 3)).square().sum(1)


def test_kernels_take_any_loss_and_term() -> None:
    rows = []
    for way in ("stacked", "single", "vectorized", "looped"):
        algorithm = replace(algorithms.FedProx(0.5), personalize=algorithms.FedAvgPlus().personalize)
        fed = Federation(
            network(torch.float64), classification_parties(5, torch.float64), algorithm, loss=squared, lr=0.1, steps=3
        )
        fed.state = replace(fed.state, execution_mode=way)
        rows.append(fed.fit(2, progress=False).state.global_model)
    for row in rows[:-1]:
        torch.testing.assert_close(row, rows[-1], rtol=0, atol=1e-12)


class Twisted(nn.Module):
    """What looks like common layers and must not be stacked."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first = nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.first(x)
        if self.kind == "overwrites":
            h = self.relu(h) + h  # h itself is changed by then
        elif self.kind == "mixes samples":
            h = h - h.mean(0)
        elif self.kind == "flattens all":
            h = torch.flatten(h).view(-1, 6)
        elif self.kind == "scales by the batch":
            h = h / h.size(0)
        output: Tensor = self.head(h)
        return output


class Spare(nn.Module):
    """A head that the output does not use, and that only a term draws back."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)
        self.spare = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(x)
        return output


def decay(sight: LossContext) -> Tensor:
    return sight.w.square().sum()


def test_parameters_that_only_a_term_sees_learn_from_it_alone() -> None:
    algorithm = replace(algorithms.FedAvg(), terms=(LossTerm("decay", decay, 0.1),))
    rows = []
    for way in ("", "looped"):
        torch.manual_seed(0)
        fed = Federation(
            Spare().double(), classification_parties(4, torch.float64), algorithm, lr=0.1, steps=3, batch=4
        )
        fed.state = replace(fed.state, execution_mode=way or fed.state.execution_mode)
        rows.append(fed.fit(2, progress=False).state.global_model)
    torch.testing.assert_close(rows[0], rows[1], rtol=0, atol=1e-12)


class Writing(nn.Module):
    """Changes what it is given, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(x.div_(2.0))
        return output


def test_a_module_that_writes_into_its_input_does_not_change_anybody_s_data() -> None:
    x = torch.randn(20, 6, generator=torch.Generator().manual_seed(0))
    before = x.clone()
    people = parties.from_arrays([(x[:10], torch.arange(10) % 3), (x[10:], torch.arange(10) % 3)], test=0.3)
    fed = Federation(Writing(), people, algorithms.FedAvg(), lr=0.1, steps=2, batch=3).fit(1, progress=False)
    fed.scores()
    assert torch.equal(x, before)
    assert fed.scores().personal.values.tolist() == fed.scores().personal.values.tolist()


@pytest.mark.parametrize("kind", ["overwrites", "mixes samples", "flattens all", "scales by the batch"])
def test_modules_that_only_look_common_are_not_stacked(kind: str) -> None:
    fed = Federation(Twisted(kind), classification_parties(4), algorithms.FedAvg(), lr=0.1, steps=2)
    assert fed.state.execution_mode == "vectorized"
    fed.fit(1, progress=False)


class Forward(nn.Module):
    """Layers that are used by code: twice, added, flattened, with a frozen one among them."""

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


@pytest.mark.parametrize(("frozen", "way"), [(False, "stacked"), (True, "vectorized")])
def test_modules_with_code_of_their_own_are_stacked_where_that_is_safe(frozen: bool, way: str) -> None:
    torch.manual_seed(0)
    model = Forward(frozen).double()
    people = classification_parties(4, torch.float64)
    solver = Sgd(lr=0.1, steps=3, batch=4)
    fed = Federation(model, people, algorithms.FedProx(0.3), solver=solver, seed=1)
    assert fed.state.execution_mode == way
    fed.fit(2, progress=False)
    again = Federation(model, people, algorithms.FedProx(0.3), solver=solver, seed=1)
    again.state = replace(again.state, execution_mode="looped")
    again.fit(2, progress=False)
    torch.testing.assert_close(fed.state.global_model, again.state.global_model, rtol=0, atol=1e-12)


def test_a_module_that_cannot_be_vectorised_learns_all_the_same() -> None:
    torch.manual_seed(0)
    model = Recurrent().double()
    people = classification_parties(4, torch.float64)
    solver = Sgd(lr=0.1, steps=3, batch=4)
    rows = []
    for party in people.values():
        torch.manual_seed(0)
        alone = parties.from_arrays({party.name: (party.x, party.y)}, test=0, dtype=torch.float64)
        rows += plain(alone, solver, 2, seed=1, model=Recurrent().double())
    fed = Federation(model, people, algorithms.Local(), solver=solver, seed=1).fit(2, progress=False)
    for party, expected in zip(people, rows, strict=True):
        torch.testing.assert_close(fed.state.personal_models.get(party)["model"], expected, rtol=0, atol=1e-12)


# ── terms ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def begin_matching(received: Tensor, rng: np.random.Generator) -> Tensor:
    """Private columns: a 5 x 3 matrix from the top of the trained model to the hidden layer of the received one."""
    return torch.linspace(-0.5, 0.5, 15, dtype=received.dtype)


def matching(sight: LossContext) -> Tensor:
    """A toy of representation matching: the trained model's top must give back the received model's hidden layer."""
    rebuilt = sight.features["2"] @ sight.private_params.reshape(3, 5)
    return (rebuilt - sight.received_features["1"]).square().mean()


MATCHING = replace(
    algorithms.FedAvg(),
    terms=(LossTerm("matching", matching, 0.5, feature_names=("1", "2"), initial_values=begin_matching),),
)


@pytest.mark.parametrize("way", ["stacked", "single", "vectorized", "looped"])
def test_a_term_may_own_private_columns_and_read_activations_of_both_models(way: str) -> None:
    people = classification_parties(3, torch.float64)
    lr = 0.1
    fed = Federation(network(torch.float64), people, MATCHING, lr=lr, steps=2, batch=100, seed=1)
    fed.state = replace(fed.state, execution_mode=way)
    fed.fit(2, progress=False)
    for name, memory in ((name, fed.engine_.party_states.get(name)) for name in people):
        assert set(memory) == {"private.matching"}
        torch.testing.assert_close(memory["private.matching"], _by_hand(people, name, lr), rtol=0, atol=1e-12)


def _by_hand(people: Population, name: str, lr: float) -> Tensor:
    """The same two rounds for everybody with plain modules, and the private matrix of one party at their end."""
    center = network(torch.float64)
    rng = np.random.default_rng(0)
    theta = {party: begin_matching(torch.zeros(1, dtype=torch.float64), rng) for party in people}
    for _ in range(2):
        modules = {}
        frozen = [p.detach().clone() for p in center.parameters()]
        for party in people.values():
            module = network(torch.float64)
            nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(frozen), module.parameters())
            own = theta[party.name].clone().requires_grad_()
            for _ in range(2):
                with torch.no_grad():
                    target = torch.tanh(party.x @ frozen[0].T + frozen[1])
                output = module(party.x)
                loss = nn.functional.cross_entropy(output, party.y)
                loss = loss + 0.5 * (output @ own.reshape(3, 5) - target).square().mean()
                trained = [*module.parameters(), own]
                for parameter, gradient in zip(trained, torch.autograd.grad(loss, trained), strict=True):
                    parameter.data -= lr * gradient
            theta[party.name], modules[party.name] = own.detach(), module
        total = sum(party.samples for party in people.values())
        mean = [
            sum(people[n].samples / total * list(m.parameters())[i].detach() for n, m in modules.items())
            for i in range(4)
        ]
        nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(mean), center.parameters())  # type: ignore[arg-type]
    return theta[name]


def test_private_columns_are_never_reported() -> None:
    from bytes_engine import BytesEngine

    seen: list[set[str]] = []

    class Listening(BytesEngine):
        def collect(self, timeout: float) -> list:  # type: ignore[type-arg]
            reports = super().collect(timeout)
            seen.extend(set(report.arrays) for report in reports)
            return reports

    names = {"0.weight", "0.bias", "2.weight", "2.bias"}
    Federation(network(), classification_parties(4), MATCHING, lr=0.1, steps=1, batch=4, engine=Listening).fit(
        2, progress=False
    )
    Federation(
        network(), classification_parties(4), algorithms.Ditto(), lr=0.1, steps=1, batch=4, engine=Listening
    ).fit(1, progress=False)
    assert all(arrays == names for arrays in seen)
    seen.clear()
    Federation(
        network(), classification_parties(4), algorithms.FedPer(), lr=0.1, steps=1, batch=4, engine=Listening
    ).fit(2, progress=False)
    assert all(arrays == {"0.weight", "0.bias"} for arrays in seen)


def drawn(received: Tensor, rng: np.random.Generator) -> Tensor:
    return torch.from_numpy(rng.normal(size=3)).to(received.dtype)


def nothing(sight: LossContext) -> Tensor:
    return 0 * sight.private_params.sum()


def test_private_columns_begin_from_draws_of_the_party_s_own_and_terms_do_not_mix_them_up() -> None:
    """A term before Ditto's leaves Ditto's private model alone: columns go by the term's name."""
    people = classification_parties(4)
    first = LossTerm("noise", nothing, initial_values=drawn)
    both = replace(algorithms.Ditto(), terms=(first, *algorithms.Ditto().terms))
    fed = Federation(network(), people, both, lr=0.1, steps=2, batch=4).fit(2, progress=False)
    plain = Federation(network(), people, algorithms.Ditto(), lr=0.1, steps=2, batch=4).fit(2, progress=False)
    begun = [fed.engine_.party_states.get(name)["private.noise"] for name in people]
    assert not torch.equal(begun[0], begun[1])
    for name in people:
        ours = fed.models_[name].state_dict()
        theirs = plain.models_[name].state_dict()
        assert all(torch.allclose(ours[key], theirs[key], atol=1e-6) for key in ours)
    with pytest.raises(SettingError, match="must have names of their own"):
        Federation(network(), people, replace(both, terms=(first, first))).fit(1, progress=False)


def test_the_loss_that_is_told_is_the_parties_own_and_not_the_terms() -> None:
    people = classification_parties(3)
    losses = [
        Federation(network(), people, algorithm, lr=0.1, steps=1, batch=100).fit(1, progress=False).history_[-1]["loss"]
        for algorithm in (algorithms.FedAvg(), algorithms.Ditto(), algorithms.FedProx(5.0))
    ]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6) == pytest.approx(losses[2], abs=1e-6)
    idle = Federation(network(), people, algorithms.FedAvg(), lr=0.1, steps=0).fit(1, progress=False)
    assert np.isnan(idle.history_[-1]["loss"])
    assert torch.allclose(idle.state.global_model, idle.state.initial_model)


def test_a_point_that_does_not_exist_is_named() -> None:
    algorithm = replace(algorithms.FedAvg(), terms=(LossTerm("matching", matching, feature_names=("nowhere",)),))
    with pytest.raises(ModelError, match=r"no point 'nowhere' to watch. It has: input, 0, 1, 2, output"):
        Federation(network(), classification_parties(3), algorithm).fit(1, progress=False)


# ── bad input ─────────────────────────────────────────────────────────────────────────────────────────────────────────


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
def test_bad_settings_are_named_before_any_work(solver: Sgd, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        Federation(network(), classification_parties(3), algorithms.FedAvg(), solver=solver).fit(1, progress=False)


@pytest.mark.parametrize("settings", [{"seed": "x"}, {"seed": 1.5}, {"memory_budget": "1 GB"}, {"seed": True}])
def test_numbers_that_are_none_are_named(settings: dict[str, object]) -> None:
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
def test_the_losses_that_a_tuner_sees_do_not_depend_on_the_cut(epochs: int) -> None:
    """Of parties with 9 to 25 samples, who have more batches the more they have, and a shorter one at the end."""

    def losses(most: int | None) -> list[dict[str, float]]:
        engine = InProcess if most is None else partial(InProcess, max_parties=most)
        solver = Sgd(lr=0.05, epochs=epochs, batch=4, optimizer="Adam")
        fed = Federation(network, classification_parties(5), algorithms.FedAvg(), solver=solver, engine=engine)
        return [{name: said["loss"] for name, said in round.round.metrics.items()} for round in fed.rounds(4)]

    assert losses(None) == losses(2) == losses(1)
