"""Laws of portfolio desks: batching, resume, stacking, merging, and a reward equal to the backtest's growth.

They cover Fed+ v1 §9 and v2 §8.2, and the errata: rows 27 (the fee), 28 (no look-ahead) and 29 (the reward).
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial, partialmethod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from bytes_engine import BytesEngine
from descant import Federation, Trader, algorithms, parties
from descant import models as problems
from descant.analysis import backtest_federation
from descant.engines import InProcess, Processes
from descant.models.flat import Net
from descant.parties import Desk
from descant.portfolio import Market, generate_market, run_backtest
from descant.portfolio.price_gan import Gan
from descant.training.kernels.layers import GradientTarget
from descant.training.kernels.traced_kernel import Kernel, Stack, kernel_of
from descant.training.portfolio_policy import first_day
from descant.training.rl_losses import LogReturn, log_softmax
from toy_problems import METHODS

KINDS = ("cnn", "rnn", "lstm")
AUGMENT = ("gbm", "none", "vom", "gan")
TRADER = Trader(lr=1e-3, iterations=6, batch=8, regenerate_every=10, synthetic_days=20)


@pytest.fixture(autouse=True)
def short_gan_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit the training of adversarial networks to a few steps."""
    monkeypatch.setattr(Gan, "__init__", partialmethod(Gan.__init__, steps=3))


@cache
def market() -> Market:
    return generate_market(assets=7, years=3, seed=1)


def desks(count: int = 5, **rest: Any) -> parties.Population:
    settings_of_desks = {"train": ("2006", "2007"), "test": ("2008", "2008-03"), "augment": AUGMENT, **rest}
    return parties.desks(market(), count=count, assets=4, window=10, **settings_of_desks)


def make_federation(kind: str = "cnn", algorithm: Any = None, solver: Any = TRADER, **rest: Any) -> Federation:
    net = partial(problems.eiie, kind, window=10, hidden=6)
    population = rest.pop("population", None) or desks()
    return Federation(net, population, algorithm or algorithms.FedAvg(), solver=solver, **{"seed": 3, **rest})


def models(fed: Federation) -> Tensor:
    rows = [fed.global_model_, *fed.models_.values()]
    return torch.stack([nn.utils.parameters_to_vector(module.parameters()).detach() for module in rows])


@pytest.mark.parametrize("lead", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_stacked_gradients_equal_those_of_the_plain_module(kind: str, lead: int) -> None:
    torch.manual_seed(0)
    net = Net(problems.eiie(kind, window=7, hidden=5).double())
    kernel = kernel_of(net, lead)
    assert isinstance(kernel, Kernel)
    rows = torch.stack([net.copy_initial_row() + 0.1 * torch.randn_like(net.copy_initial_row()) for _ in range(3)])
    x = 1 + 0.1 * torch.randn(3, 11, 4, 8).double()
    slope = torch.randn(3, 11, 5).double()
    for chosen in [[0, 1, 2]] if lead else [[0], [1], [2]]:
        stack = Stack(net.layout, [rows[chosen]], lead)
        bound = kernel.bind(stack.w, GradientTarget(stack.g))
        for _ in range(2):  # gradients do not accumulate from batch to batch
            output = bound.forward(x[chosen].numpy() if lead else x[chosen[0]])
            bound.backward(slope[chosen].numpy() if lead else slope[chosen[0]])
        for at, k in enumerate(chosen):
            leaf = rows[k].clone().requires_grad_()
            reference = net.apply(leaf, leaf[:0], x[k])[0]
            (expected,) = torch.autograd.grad((reference * slope[k]).sum(), leaf)
            actual = torch.as_tensor(output[at] if lead else output)
            torch.testing.assert_close(actual, reference.detach(), rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(stack.gradient[at], expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("kind", "torch_module"), [("rnn", nn.RNN), ("lstm", nn.LSTM)])
def test_recurrent_evaluators_match_torch(kind: str, torch_module: Any) -> None:
    ours: Any = problems.eiie(kind, hidden=5).evaluator
    theirs = torch_module(1, 5, batch_first=True)
    with torch.no_grad():
        theirs.weight_hh_l0.copy_(ours.step[:, :5])
        theirs.weight_ih_l0.copy_(ours.step[:, 5:6])
        theirs.bias_ih_l0.copy_(ours.step[:, 6])
        theirs.bias_hh_l0.zero_()
    x = torch.randn(20, 30)
    torch.testing.assert_close(ours(x), theirs(x.unsqueeze(2))[0][:, -1])


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([0.0, 0.002, 0.1]))
def test_the_reward_is_the_log_growth_of_a_backtest_and_its_gradient_matches_autograd(seed: int, cost: float) -> None:
    rng = torch.Generator().manual_seed(seed)
    output = torch.randn(3, 9, 5, generator=rng, dtype=torch.float64)
    y = 1 + 0.05 * torch.randn(3, 9, 5, generator=rng, dtype=torch.float64)
    y[..., 0] = 1
    loss = LogReturn(cost)
    leaf = output.clone().requires_grad_()
    each = torch.stack([loss(one, relatives) for one, relatives in zip(leaf, y, strict=True)])
    (expected,) = torch.autograd.grad(each.mean(1).sum(), leaf)
    slope, means = loss.output_gradient(output.numpy(), y.numpy())
    np.testing.assert_allclose(slope, expected.numpy(), atol=1e-12)
    np.testing.assert_allclose(means, each.detach().mean(1).numpy(), atol=1e-12)
    weights = np.exp(log_softmax(output.numpy()))
    path = run_backtest(lambda t, before: weights[:, t], y[..., 1:].numpy(), cost, exact_fees=False)
    entry = 1 - cost * weights[:, 0, 1:].sum(-1)  # a batch begins inside the history and pays no fee to enter
    growth = path.growth.copy()
    growth[:, 0] /= entry
    np.testing.assert_allclose(-each.detach().numpy(), np.log(growth), atol=1e-12)


def test_batch_starts_favor_recent_days_and_stay_within_the_history() -> None:
    chances = np.random.default_rng(0).random(20_000)
    drawn = np.array([first_day(chance, 0.01, 30, latest=400) for chance in chances])
    assert drawn.min() == 30 and drawn.max() == 400
    share = np.bincount(400 - drawn, minlength=371) / len(drawn)
    expected = 0.99 ** np.arange(371)
    np.testing.assert_allclose(share.cumsum(), (expected / expected.sum()).cumsum(), atol=0.015)


def test_no_policy_sees_a_price_before_its_day() -> None:
    """Changed prices from a day on change the weights after that day and nothing before it."""
    from descant.training.backtest_evaluation import backtest_models

    torch.manual_seed(0)
    net = Net(problems.eiie("cnn", window=10))
    desk: Any = desks()["0"]
    row = net.copy_initial_row() + 0.3 * torch.randn_like(net.copy_initial_row())
    day = 20
    later = desk.test_prices.copy()
    later[desk.window + day :] *= np.random.default_rng(0).uniform(0.5, 2, later[desk.window + day :].shape)
    before, after = (backtest_models(net, [one], [row]) for one in (desk, replace(desk, test_prices=later)))
    held = [path.weights[0] for path in (before, after)]
    assert np.array_equal(held[0][: day + 1], held[1][: day + 1]) and not np.allclose(
        held[0][day + 1], held[1][day + 1]
    )
    assert (
        np.array_equal(before.growth[0, :day], after.growth[0, :day]) and before.growth[0, day] != after.growth[0, day]
    )


def test_training_ignores_prices_of_the_test_period() -> None:
    changed = market().prices.copy()
    changed[market().dates >= np.datetime64("2008")] *= 7.7
    other = parties.desks(
        replace(market(), prices=changed),
        count=5,
        assets=4,
        window=10,
        augment=AUGMENT,
        train=("2006", "2007"),
        test=("2008", "2008-03"),
    )
    original, changed_later = (
        make_federation(population=population).fit(3, progress=False) for population in (desks(), other)
    )
    assert torch.equal(models(original), models(changed_later))


def test_a_batch_holds_prices_up_to_each_day_and_the_next_relatives() -> None:
    from descant.core.interfaces import TrainJob
    from descant.training.portfolio_policy import _DeskBatches

    desk: Any = desks(augment=("none",))["0"]
    job: Any = train_job(TrainJob, [desk])
    batches = _DeskBatches(TRADER, job, 0)
    batches.regenerate(0)
    (first,), x, y = batches.next_batches([0.3])
    for day in (0, 5):
        t = first + day
        np.testing.assert_allclose(x[0, day, :, :10].T, desk.prices[t - 9 : t + 1] / desk.prices[t], rtol=1e-6)
        np.testing.assert_allclose(y[0, day, 1:], desk.prices[t + 1] / desk.prices[t], rtol=1e-6)
    assert (y[..., 0] == 1).all() and (x[..., 10] == 0.25).all()
    batches.store_weights([first], np.log(np.full((1, 8, 5), 0.2, dtype=np.float32)))
    assert np.allclose(batches.next_batches([0.3])[1][0, 1:, :, 10], 0.2)  # the weights of the day before, without cash


def train_job(job: Any, desks: list[Desk]) -> Any:
    party_states = [{} for _ in desks]
    rest = dict.fromkeys(
        ("net", "loss", "hyperparameters", "start", "received", "anchor", "alphas", "terms", "freeze", "execution_mode")
    )
    return job(parties=desks, party_states=party_states, seed=0, round=1, **rest)


def active_policy(seed: int = 0) -> tuple[Net, Tensor]:
    """Return a policy with unequal weights that depend on the weights held."""
    torch.manual_seed(seed)
    net = Net(problems.eiie("cnn", window=10))
    row = 6 * net.copy_initial_row()
    return net, row


def test_a_backtest_equals_a_plain_loop_over_the_days() -> None:
    """The loop finds fees by bisection, enters from cash, and shows the policy its weights of the day before."""
    from descant.training.backtest_evaluation import backtest_models

    net, row = active_policy()
    module = net.module_from_row(row)
    desk = desks(cost=0.05)["1"]
    assert isinstance(desk, Desk)
    value = 1.0
    before = np.eye(5)[0]
    chosen = np.zeros(4)
    growth = []
    turned = []
    for t in range(desk.test_count):
        seen = desk.test_prices[t : t + 10] / desk.test_prices[t + 9]
        x = torch.from_numpy(np.concatenate([seen.T, chosen[:, None]], 1)).float()[None]
        after = module(x)[0].double().softmax(0).detach().numpy()
        low = 0.0
        high = 1.0
        for _ in range(60):  # μ such that sales and cash pay for purchases and fees
            mu = (low + high) / 2
            paid = 0.05 * np.abs(before[1:] - mu * after[1:])
            sold = before[1:] > mu * after[1:]
            cash = before[0] + (before[1:] - mu * after[1:] - paid)[sold].sum()
            needed = mu * after[0] + ((mu * after[1:] - before[1:]) / (1 - 0.05))[~sold].sum()
            low, high = (mu, high) if cash >= needed else (low, mu)
        relatives = np.concatenate([[1.0], desk.test_prices[t + 10] / desk.test_prices[t + 9]])
        growth.append(mu * (relatives @ after))
        turned.append(np.abs(after[1:] - before[1:]).sum())
        before = relatives * after / (relatives @ after)
        chosen = after[1:]
        value *= growth[-1]
    path = backtest_models(net, [desk], [row])
    np.testing.assert_allclose(path.growth[0], growth, rtol=2e-5)
    np.testing.assert_allclose(path.turnover[0], turned, rtol=1e-3, atol=1e-5)
    assert path.weights[0].std() > 0.05 and value < 1  # it trades, and that costs


@pytest.mark.parametrize("moments", ["keep", "reset"])
def test_a_round_of_a_desk_equals_a_plain_training_loop(moments: Any) -> None:
    """The loop has the batches, the weights held before each, the fee, Adam and a second synthetic year."""
    from descant.core import seeds
    from descant.portfolio.price_augmentation import make_augmenter

    trader = replace(TRADER, iterations=14, regenerate_every=6, moments=moments)
    fed = make_federation("cnn", algorithms.Local(), solver=trader, population=desks(2, augment=("gbm",), cost=0.05))
    start = fed.state.global_model.clone()
    fed.fit(1, progress=False)
    desk = fed.population["1"]
    assert isinstance(desk, Desk)
    module = fed.plan_.net.module_from_row(start)
    optimizer = torch.optim.Adam(module.parameters(), 1e-3)
    kind = make_augmenter("gbm")
    fitted = kind.fit(desk.prices, seeds.stream(3, 0, "1", "generator"))
    held = np.full((len(desk.prices) + 20, 4), 0.25)
    losses = []
    chances = seeds.stream(3, 1, "1", "batch").random(14)
    for step, chance in enumerate(chances):
        if step % 6 == 0:
            year = kind.draw(fitted, desk.prices, 20, seeds.stream(3, step // 6, "1", "synthetic"))
            prices = np.concatenate([desk.prices, year])
            held[len(desk.prices) :] = 0.25
        first = first_day(chance, trader.recency_bias, 9, latest=len(prices) - 9)
        days = range(first, first + 8)
        x = np.stack([np.concatenate([(prices[t - 9 : t + 1] / prices[t]).T, held[t - 1][:, None]], 1) for t in days])
        y = np.stack([np.concatenate([[1.0], prices[t + 1] / prices[t]]) for t in days])
        weights = module(torch.from_numpy(x).float()).softmax(1)
        loss = torch.zeros(())
        last = None
        for now, relatives in zip(weights, torch.from_numpy(y).float(), strict=True):
            fee = 0.0 if last is None else 0.05 * (now[1:] - last[1:]).abs().sum()
            loss = loss - ((1 - fee) * (relatives @ now)).log() / 8
            last = relatives * now / (relatives @ now)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        held[first : first + 8] = weights.detach()[:, 1:].numpy()
        losses.append(loss.item())
    torch.testing.assert_close(models(fed)[2], nn.utils.parameters_to_vector(module.parameters()), rtol=0, atol=2e-4)
    kept = fed.engine_.party_states.get("1")
    np.testing.assert_allclose(kept["desk.weights"].numpy(), held, atol=1e-4)
    assert fed.history_[-1]["rewards"]["1"] == pytest.approx(-np.mean(losses), rel=1e-3)


def test_moments_are_reset_only_where_merging_changed_the_model() -> None:
    def center(moments: Any, algorithm: Any) -> Tensor:
        return models(make_federation("cnn", algorithm, solver=replace(TRADER, moments=moments)).fit(3, progress=False))

    assert not torch.equal(center("keep", algorithms.FedAvg()), center("reset", algorithms.FedAvg()))
    assert torch.equal(center("keep", algorithms.Local()), center("reset", algorithms.Local()))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("algorithm", [algorithms.FedAvg, algorithms.FedAvgPlus], ids=lambda method: method.__name__)
def test_batching_never_changes_a_bit(kind: str, algorithm: Any) -> None:
    def run_hash(engine: Any) -> str:
        fed = make_federation(kind, algorithm(), engine=engine)
        assert fed.state.execution_mode == "stacked"
        return fed.fit(3, progress=False).hash()

    whole = run_hash(InProcess)
    assert all(
        run_hash(engine) == whole for engine in (partial(InProcess, max_parties=1), partial(BytesEngine, batch_count=2))
    )


@pytest.mark.filterwarnings("ignore:Party .* trains on real prices alone:descant.DescantWarning")
def test_failed_synthetic_prices_are_reported_alike_under_batching_and_resume(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from descant.portfolio.price_augmentation import GeometricBrownianMotion

    def draw(self: Any, fitted: Any, prices: Any, days: int, rng: Any) -> Any:
        return prices[-days:] * (np.inf if rng.random() < 0.5 else 1)

    monkeypatch.setattr(GeometricBrownianMotion, "draw", draw)

    def real_only_entries(fed: Federation) -> list[Any]:
        return [entry.get("real_only", {}) for entry in fed.history_]

    whole = real_only_entries(make_federation().fit(5, progress=False))
    assert {} in whole and {"4": 2.0} in whole  # the second desk with Brownian motion
    for engine in (partial(InProcess, max_parties=1), partial(BytesEngine, batch_count=2)):
        assert real_only_entries(make_federation(engine=engine).fit(5, progress=False)) == whole
    make_federation().fit(2, progress=False).save(tmp_path / "run")
    assert real_only_entries(make_federation().load(tmp_path / "run").fit(3, progress=False)) == whole


@pytest.mark.parametrize("execution_mode", ["single", "looped"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_execution_mode_matches_stacked_training(kind: str, execution_mode: str) -> None:
    def rows(execution_mode: str) -> Tensor:
        fed = make_federation(kind)
        fed.state = replace(fed.state, execution_mode=execution_mode)
        return models(fed.fit(2, progress=False))

    assert not torch.equal(rows("stacked")[0], make_federation(kind).state.global_model)
    torch.testing.assert_close(rows(execution_mode), rows("stacked"), rtol=0, atol=1e-5)


def test_batching_and_memory_budget_change_nothing_under_partial_participation() -> None:
    def run_hash(**rest: Any) -> str:
        return make_federation(participation=3, **rest).fit(4, progress=False).hash()

    assert run_hash() == run_hash(engine=partial(BytesEngine, batch_count=3)) == run_hash(memory_budget=0)


def test_every_desk_pays_its_own_cost(tmp_path: Path) -> None:
    """A desk learns and earns the same among desks with other costs as among desks with its own."""
    alike = [desks(4, cost=cost) for cost in (0.002, 0.0, 0.1)]
    mixed = parties.Population([alike[k % 3]._source(str(k)) for k in range(4)])
    beside, *alone = (
        make_federation("cnn", algorithms.Local(), population=one).fit(2, progress=False) for one in (mixed, *alike)
    )
    actual, *expected = (backtest_federation(fed) for fed in (beside, *alone))
    for k in range(4):
        assert torch.equal(models(beside)[k + 1], models(alone[k % 3])[k + 1])
        for part in ("growth", "uniform", "hold"):
            assert np.array_equal(getattr(actual, part)[k], getattr(expected[k % 3], part)[k])
        assert beside.scores().personal.values[k] == alone[k % 3].scores().personal.values[k]
    assert beside.plot("portfolio", tmp_path / "value.png").exists()


def test_worker_processes_give_the_same_hash() -> None:
    processes = Processes(workers=2, threads=1)
    try:
        population = partial(desks, augment=AUGMENT[:3])  # without "gan": its short training is not patched in there
        fed = make_federation(population=population, engine=processes)
        fed.engine_.wait()  # type: ignore[attr-defined]
        assert fed.fit(2, progress=False).hash() == make_federation(population=population).fit(2, progress=False).hash()
    finally:
        processes.close()


def test_resuming_from_a_checkpoint_equals_an_uninterrupted_run(tmp_path: Path) -> None:
    """The run stops inside a synthetic year; weights and fitted generators are restored."""
    whole = make_federation().fit(4, progress=False)
    make_federation().fit(2, progress=False).save(tmp_path / "run")
    again = make_federation(population=desks()).load(tmp_path / "run")
    assert again.fit(2, progress=False).hash() == whole.hash()
    for name in "03":  # Brownian motion and an adversarial network
        kept = again.engine_.party_states.get(name)
        assert kept["desk.weights"].shape == (len(desks()[name].prices) + 20, 4) and len(kept["desk.generator"])  # type: ignore[attr-defined]
    for other in (desks(cost=0.01), desks(augment=("gbm", "none", "gbm"))):
        with pytest.raises(Exception, match="saved by another federation: data"):
            make_federation(population=other).load(tmp_path / "run")


@pytest.mark.filterwarnings("ignore:.*:descant.DescantWarning")
@pytest.mark.parametrize("name", [name for name, make in METHODS.items() if not make().loss_samples])
def test_every_method_merges_desks(name: str) -> None:
    class Policy(nn.Sequential):
        """A module with the inputs and outputs of a policy, and the layer names that the methods refer to."""

        def __init__(self) -> None:
            super().__init__(nn.Linear(44, 8), nn.ReLU(), nn.Linear(8, 5))

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = super().forward(x.flatten(1))
            return output

    fed = Federation(Policy, desks(3), METHODS[name](), solver=TRADER).fit(2, progress=False)
    rows = models(fed)
    assert not fed.rejections_ and rows.isfinite().all()
    if name not in ("Local", "L2GD"):
        assert not torch.equal(rows[0], fed.state.initial_model)
