"""Synthetic prices: they move like their training prices, and unusable ones are found."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from descant.errors import PartyError, SettingError
from descant.portfolio.price_augmentation import (
    AUGMENTERS,
    Augmenter,
    GeometricBrownianMotion,
    NoAugmentation,
    VariableOrderMarkov,
    make_augmenter,
    unusable_reason,
)
from descant.portfolio.price_gan import Gan

TINY = Gan(path_days=6, steps=2, batch=4, hidden=8)
AUGMENTER_CASES: dict[str, Augmenter] = {
    "gbm": GeometricBrownianMotion(),
    "gbm, common": GeometricBrownianMotion(shared_motion=True),
    "vom": VariableOrderMarkov(),
    "vom, order 0": VariableOrderMarkov(order=0),
    "gan": TINY,
}
each_augmenter = pytest.mark.parametrize("augmenter", AUGMENTER_CASES.values(), ids=AUGMENTER_CASES)


def random_prices(days: int, m: int, seed: int = 0) -> Any:
    """Return read-only prices with a common market factor, and a drift and a deviation per asset."""
    rng = np.random.default_rng(seed)
    scale = rng.uniform(0.008, 0.025, m)
    moves = 0.7 * rng.standard_normal((days, 1)) + 0.7 * rng.standard_normal((days, m))
    prices = rng.uniform(5, 500, m) * np.exp(np.cumsum(rng.uniform(0, 0.001, m) + scale * moves, axis=0))
    prices.flags.writeable = False
    return prices


def returns(prices: Any) -> Any:
    return prices[1:] / prices[:-1] - 1


def fit(augmenter: Augmenter, prices: Any, seed: int = 1) -> Any:
    fitted = augmenter.fit(prices, np.random.default_rng(seed))
    fitted.flags.writeable = False
    return fitted


def draw(augmenter: Augmenter, prices: Any, days: int, seed: int = 2) -> Any:
    return augmenter.draw(fit(augmenter, prices), prices, days, np.random.default_rng(seed))


def correlations(moves: Any) -> Any:
    return np.corrcoef(moves, rowvar=False)


@settings(max_examples=15, deadline=None)
@given(st.sampled_from(sorted(AUGMENTER_CASES)), st.integers(1, 4), st.integers(1, 30), st.integers(0, 10**6))
def test_a_draw_depends_only_on_its_generator_and_changes_no_input(name: str, m: int, days: int, seed: int) -> None:
    augmenter = AUGMENTER_CASES[name]
    prices = random_prices(80, m, seed)
    fitted = fit(augmenter, prices, seed)
    again = fit(augmenter, prices, seed)
    assert fitted.dtype == np.float32 and fitted.ndim == 1 and (fitted == again).all()
    one, two, other = (
        augmenter.draw(fitted, prices, days, np.random.default_rng(key)) for key in (seed, seed, seed + 1)
    )
    assert one.shape == (days, m) and one.dtype == np.float64
    assert (one == two).all() and (one != other).all()


@each_augmenter
def test_a_draw_continues_from_the_last_price_without_a_jump(augmenter: Augmenter) -> None:
    prices = random_prices(400, 4)
    fitted = fit(augmenter, prices)
    deviations = returns(prices).std(axis=0)
    doubled = np.concatenate([prices, 2 * prices[-1:]])
    firsts = np.array([augmenter.draw(fitted, doubled, 1, np.random.default_rng(key))[0] for key in range(50)])
    assert (np.abs(firsts / doubled[-1] - 1) < 8 * deviations).all()
    rescaled = prices * np.array([3.0, 1.0, 0.1, 50.0])
    rescaled_draw, plain_draw = (
        augmenter.draw(fitted, start, 20, np.random.default_rng(5)) for start in (rescaled, prices)
    )
    np.testing.assert_allclose(rescaled_draw, plain_draw * np.array([3.0, 1.0, 0.1, 50.0]), rtol=1e-9)


@each_augmenter
def test_a_constant_price_stays_constant(augmenter: Augmenter) -> None:
    prices = np.column_stack([random_prices(100, 2), np.full(100, 7.0)])
    np.testing.assert_allclose(draw(augmenter, prices, 30)[:, 2], 7.0, rtol=1e-6)


@pytest.mark.parametrize("augmenter", [GeometricBrownianMotion(), VariableOrderMarkov()], ids=repr)
def test_long_draws_have_the_moments_of_the_prices(augmenter: Augmenter) -> None:
    """Over 40,000 days: means within 5 standard errors, deviations within 3 %, correlations within 0.03."""
    prices = random_prices(3000, 5)
    real = returns(prices)
    synthetic = returns(draw(augmenter, prices, 40_000))
    assert (np.abs(synthetic.mean(axis=0) - real.mean(axis=0)) < 5 * real.std(axis=0) / np.sqrt(len(synthetic))).all()
    np.testing.assert_allclose(synthetic.std(axis=0), real.std(axis=0), rtol=0.03)
    np.testing.assert_allclose(correlations(synthetic), correlations(real), atol=0.03)


@pytest.mark.parametrize("name", AUGMENTERS)
def test_make_augmenter_returns_the_named_class(name: str) -> None:
    augmenter = make_augmenter(name, **({"steps": 1} if name == "gan" else {}))
    prices = random_prices(60, 3)
    classes = {"none": NoAugmentation, "gbm": GeometricBrownianMotion, "vom": VariableOrderMarkov, "gan": Gan}
    assert type(augmenter) is classes[name]
    year = draw(augmenter, prices, 252)
    assert year.shape == (0 if name == "none" else 252, 3) and unusable_reason(year) == ""


def test_gbm_is_the_formula_of_the_paper() -> None:
    """v1 §9.3, with one Brownian motion: v_t = v_0 exp((μ - σ²/2) t + σ W_t)."""
    prices = random_prices(300, 3)
    path = draw(GeometricBrownianMotion(shared_motion=True), prices, 40, seed=9)
    mu = returns(prices).mean(axis=0)
    sigma = returns(prices).std(axis=0)
    motion = np.cumsum(np.random.default_rng(9).standard_normal(40))
    for day in range(1, 41):
        expected = prices[-1] * np.exp((mu - sigma**2 / 2) * day + sigma * motion[day - 1])
        np.testing.assert_allclose(path[day - 1], expected, rtol=1e-5)
    assert correlations(np.diff(np.log(path), axis=0)).min() > 0.9999


def mean_reverting_prices(days: int) -> Any:
    """Return two assets that mostly fall after both rose, and rise after both fell."""
    rng = np.random.default_rng(4)
    logs = np.zeros((days, 2))
    for day in range(1, days):
        logs[day] = (
            0.01 * rng.standard_normal() - 0.008 * np.sign(logs[day - 1].mean()) + 0.002 * rng.standard_normal(2)
        )
    return 100 * np.exp(np.cumsum(logs, axis=0))


def reversal_rate(prices: Any) -> float:
    """Return the share of days on which the market reverses its direction."""
    rose = np.diff(np.log(prices), axis=0).mean(axis=1) > 0
    return float((rose[1:] != rose[:-1]).mean())


def test_vom_has_the_reversal_rate_of_the_market() -> None:
    prices = mean_reverting_prices(3000)
    assert reversal_rate(prices) > 0.7
    assert abs(reversal_rate(draw(VariableOrderMarkov(order=1), prices, 10_000)) - reversal_rate(prices)) < 0.04
    assert (
        abs(reversal_rate(draw(VariableOrderMarkov(order=3, min_count=10), prices, 10_000)) - reversal_rate(prices))
        < 0.04
    )
    assert abs(reversal_rate(draw(VariableOrderMarkov(order=0), prices, 10_000)) - 0.5) < 0.04  # order 0 has no memory


@pytest.mark.parametrize("min_count", [1, 20, 45, 75, 150, 1000])
def test_vom_has_the_longest_context_that_was_seen_often_enough(min_count: int) -> None:
    """By hand, with contexts as texts; with growing `min_count` they have 3, 2, 1 and 0 days."""
    prices = random_prices(400, 2, seed=6)
    logs = np.diff(np.log(prices), axis=0)
    signs = "".join("+" if mean > 0 else "-" for mean in logs.mean(axis=1))
    rows = fit(VariableOrderMarkov(order=3, min_count=min_count), prices).reshape(8, -1)
    usual = logs[3:].mean(axis=0)
    lengths = set()
    for code, row in enumerate(rows):
        context = "".join("+" if code >> back & 1 else "-" for back in (2, 1, 0))  # the last day is the lowest bit
        while context and sum(signs[:t].endswith(context) for t in range(3, len(logs))) < min_count:
            context = context[1:]
        after = np.array([logs[t] for t in range(3, len(logs)) if signs[:t].endswith(context)])
        lengths.add(len(context))
        np.testing.assert_allclose(
            row[:2], (after.sum(axis=0) + min_count * usual) / (len(after) + min_count), rtol=1e-4
        )
    assert lengths == {1: {3}, 20: {3}, 45: {2, 3}, 75: {2}, 150: {1}, 1000: {0}}[min_count]


def test_a_gan_does_not_change_or_use_torchs_global_state() -> None:
    prices = random_prices(80, 3)
    before = torch.get_num_threads()
    random = torch.get_rng_state()
    plain = fit(TINY, prices)
    try:
        torch.set_num_threads(before + 1)
        torch.manual_seed(99)
        with torch.no_grad():
            assert (fit(TINY, prices) == plain).all()
        assert torch.get_num_threads() == before + 1
        torch.set_rng_state(random)
        draw(TINY, prices, 50)
        assert torch.equal(torch.get_rng_state(), random)
    finally:
        torch.set_num_threads(before)


def test_a_gan_has_the_moments_of_the_prices() -> None:
    """On each day of a path: means within 0.06 deviations, deviations within 6 %, however short the training."""
    prices = random_prices(300, 3)
    real = returns(prices)
    augmenter = Gan(path_days=6, steps=20, batch=8, hidden=16)
    fitted = fit(augmenter, prices)
    np.testing.assert_allclose(fitted[:3], real.mean(axis=0), rtol=1e-4)
    np.testing.assert_allclose(fitted[3:6], real.std(axis=0), rtol=1e-4)
    many = augmenter.draw(fitted, prices, 6 * 10_000 + 1, np.random.default_rng(3))
    paths = (returns(np.concatenate([prices[-1:], many]))[:-1].reshape(-1, 6, 3) - fitted[:3]) / fitted[3:6]
    np.testing.assert_allclose(paths.mean(axis=0), 0, atol=0.06)
    np.testing.assert_allclose(paths.std(axis=0), 1, rtol=0.06)


def test_a_gan_learns_which_assets_move_together() -> None:
    prices = random_prices(1000, 3)
    expected = correlations(returns(prices))

    def error(steps: int) -> float:
        augmenter = Gan(path_days=5, steps=steps, batch=32, hidden=32)
        return float(np.abs(correlations(returns(draw(augmenter, prices, 5000))) - expected).mean())

    assert error(400) < 0.15 < 0.25 < error(0)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 0.0, -2.5])
def test_an_invalid_price_is_found(bad: float) -> None:
    prices = random_prices(30, 4).copy()
    assert unusable_reason(prices) == ""
    prices[17, 2] = bad
    assert unusable_reason(prices) == f"asset 2 has the price {bad:.6g} on synthetic day 17"


@pytest.mark.parametrize(
    ("days", "growth", "usable"),
    [(252, 99, True), (252, 101, False), (252, 1 / 101, False), (504, 101, True), (5, 1.5, True), (5, 101, False)],
)
def test_moves_by_more_than_a_factor_of_100_per_year_are_unusable(days: int, growth: float, usable: bool) -> None:
    prices = np.column_stack([np.ones(days), growth ** np.linspace(0, 1, days)])
    assert unusable_reason(prices) == ("" if usable else "asset 1 moves by a factor of more than 100 per year")


@each_augmenter
def test_a_diverging_augmenter_is_found(augmenter: Augmenter) -> None:
    prices = random_prices(80, 2)
    wild = fit(augmenter, prices) * np.float32(3e4)
    assert unusable_reason(augmenter.draw(wild, prices, 252, np.random.default_rng(0))).startswith("asset ")


def test_invalid_settings_and_prices_are_rejected() -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(
        SettingError, match=r"There is no augmenter 'gmb'. Did you mean 'gbm'\? Allowed: gan, gbm, none"
    ):
        make_augmenter("gmb")
    with pytest.raises(SettingError, match=r"There is no setting of vom 'ordr'. Did you mean 'order'"):
        make_augmenter("vom", ordr=2)
    with pytest.raises(SettingError, match=r"The 'path_days' of Gan must be a whole number >= 5. Got 4."):
        make_augmenter("gan", path_days=4)
    with pytest.raises(PartyError, match=r"Gan needs prices \[days, assets\] of at least 23 days. Got \[22, 2\]."):
        Gan().fit(random_prices(22, 2), rng)
    with pytest.raises(PartyError, match=r"VariableOrderMarkov needs prices .* at least 6 days. Got \[5, 2\]."):
        VariableOrderMarkov().fit(random_prices(5, 2), rng)
    holed = random_prices(50, 2).copy()
    holed[3, 1] = np.nan
    with pytest.raises(PartyError, match=r"GeometricBrownianMotion needs a price > 0 for every asset and day"):
        GeometricBrownianMotion().fit(holed, rng)
    assert NoAugmentation().fit(holed, rng).size == 0
