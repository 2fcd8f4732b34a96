"""Synthetic prices: they move as those that they were learnt from, and those that cannot be used are found."""

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
KINDS: dict[str, Augmenter] = {
    "gbm": GeometricBrownianMotion(),
    "gbm, common": GeometricBrownianMotion(shared_motion=True),
    "vom": VariableOrderMarkov(),
    "vom, order 0": VariableOrderMarkov(order=0),
    "gan": TINY,
}
each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def invented(days: int, m: int, seed: int = 0) -> Any:
    """Prices that share a market, with a drift and a deviation of their own each; nobody may write to them."""
    rng = np.random.default_rng(seed)
    scale = rng.uniform(0.008, 0.025, m)
    moves = 0.7 * rng.standard_normal((days, 1)) + 0.7 * rng.standard_normal((days, m))
    prices = rng.uniform(5, 500, m) * np.exp(np.cumsum(rng.uniform(0, 0.001, m) + scale * moves, axis=0))
    prices.flags.writeable = False
    return prices


def returns(prices: Any) -> Any:
    return prices[1:] / prices[:-1] - 1


def fitted(kind: Augmenter, prices: Any, seed: int = 1) -> Any:
    found = kind.fit(prices, np.random.default_rng(seed))
    found.flags.writeable = False
    return found


def drawn(kind: Augmenter, prices: Any, days: int, seed: int = 2) -> Any:
    return kind.draw(fitted(kind, prices), prices, days, np.random.default_rng(seed))


def correlations(moves: Any) -> Any:
    return np.corrcoef(moves, rowvar=False)


# ── laws of every kind ────────────────────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=15, deadline=None)
@given(st.sampled_from(sorted(KINDS)), st.integers(1, 4), st.integers(1, 30), st.integers(0, 10**6))
def test_a_draw_is_decided_by_its_generator_and_leaves_what_it_reads_alone(
    name: str, m: int, days: int, seed: int
) -> None:
    kind = KINDS[name]
    prices = invented(80, m, seed)
    found = fitted(kind, prices, seed)
    again = fitted(kind, prices, seed)
    assert found.dtype == np.float32 and found.ndim == 1 and (found == again).all()
    one, two, other = (kind.draw(found, prices, days, np.random.default_rng(key)) for key in (seed, seed, seed + 1))
    assert one.shape == (days, m) and one.dtype == np.float64
    assert (one == two).all() and (one != other).all()


@each_kind
def test_a_draw_goes_on_from_the_last_price_without_a_jump(kind: Augmenter) -> None:
    prices = invented(400, 4)
    found = fitted(kind, prices)
    deviations = returns(prices).std(axis=0)
    doubled = np.concatenate([prices, 2 * prices[-1:]])
    firsts = np.array([kind.draw(found, doubled, 1, np.random.default_rng(key))[0] for key in range(50)])
    assert (np.abs(firsts / doubled[-1] - 1) < 8 * deviations).all()
    elsewhere = prices * np.array([3.0, 1.0, 0.1, 50.0])
    there, here = (kind.draw(found, one, 20, np.random.default_rng(5)) for one in (elsewhere, prices))
    np.testing.assert_allclose(there, here * np.array([3.0, 1.0, 0.1, 50.0]), rtol=1e-9)


@each_kind
def test_an_asset_that_stands_still_goes_on_standing(kind: Augmenter) -> None:
    prices = np.column_stack([invented(100, 2), np.full(100, 7.0)])
    np.testing.assert_allclose(drawn(kind, prices, 30)[:, 2], 7.0, rtol=1e-6)


@pytest.mark.parametrize("kind", [GeometricBrownianMotion(), VariableOrderMarkov()], ids=repr)
def test_long_draws_move_as_the_prices_did(kind: Augmenter) -> None:
    """Over 40,000 days: means within 5 standard errors, deviations within 3 %, correlations within 0.03."""
    prices = invented(3000, 5)
    real = returns(prices)
    made = returns(drawn(kind, prices, 40_000))
    assert (np.abs(made.mean(axis=0) - real.mean(axis=0)) < 5 * real.std(axis=0) / np.sqrt(len(made))).all()
    np.testing.assert_allclose(made.std(axis=0), real.std(axis=0), rtol=0.03)
    np.testing.assert_allclose(correlations(made), correlations(real), atol=0.03)


@pytest.mark.parametrize("name", AUGMENTERS)
def test_a_kind_goes_by_its_name(name: str) -> None:
    kind = make_augmenter(name, **({"steps": 1} if name == "gan" else {}))
    prices = invented(60, 3)
    assert type(kind).__name__.lower() == {"none": "nothing"}.get(name, name)
    year = drawn(kind, prices, 252)
    assert year.shape == (0 if name == "none" else 252, 3) and unusable_reason(year) == ""


# ── geometric Brownian motion ─────────────────────────────────────────────────────────────────────────────────────────


def test_gbm_is_the_formula_of_the_paper() -> None:
    """v1 §9.3, with one Brownian motion: v_t = v_0 exp((μ - σ²/2) t + σ W_t)."""
    prices = invented(300, 3)
    found = drawn(GeometricBrownianMotion(shared_motion=True), prices, 40, seed=9)
    mu = returns(prices).mean(axis=0)
    sigma = returns(prices).std(axis=0)
    motion = np.cumsum(np.random.default_rng(9).standard_normal(40))
    for day in range(1, 41):
        expected = prices[-1] * np.exp((mu - sigma**2 / 2) * day + sigma * motion[day - 1])
        np.testing.assert_allclose(found[day - 1], expected, rtol=1e-5)
    assert correlations(np.diff(np.log(found), axis=0)).min() > 0.9999


# ── variable-order Markov ─────────────────────────────────────────────────────────────────────────────────────────────


def turning(days: int) -> Any:
    """Two assets that mostly fall after both rose, and rise after they fell."""
    rng = np.random.default_rng(4)
    logs = np.zeros((days, 2))
    for day in range(1, days):
        logs[day] = (
            0.01 * rng.standard_normal() - 0.008 * np.sign(logs[day - 1].mean()) + 0.002 * rng.standard_normal(2)
        )
    return 100 * np.exp(np.cumsum(logs, axis=0))


def turns(prices: Any) -> float:
    """How often the market goes the other way than the day before."""
    rose = np.diff(np.log(prices), axis=0).mean(axis=1) > 0
    return float((rose[1:] != rose[:-1]).mean())


def test_vom_turns_as_often_as_the_market_did() -> None:
    prices = turning(3000)
    assert turns(prices) > 0.7
    assert abs(turns(drawn(VariableOrderMarkov(order=1), prices, 10_000)) - turns(prices)) < 0.04
    assert abs(turns(drawn(VariableOrderMarkov(order=3, min_count=10), prices, 10_000)) - turns(prices)) < 0.04
    assert (
        abs(turns(drawn(VariableOrderMarkov(order=0), prices, 10_000)) - 0.5) < 0.04
    )  # without a context nothing is remembered


@pytest.mark.parametrize("least", [1, 20, 45, 75, 150, 1000])
def test_vom_has_the_longest_context_that_was_seen_often_enough(least: int) -> None:
    """By hand, with contexts as texts; as `least` grows they are 3, 2, 1 and 0 days long."""
    prices = invented(400, 2, seed=6)
    logs = np.diff(np.log(prices), axis=0)
    signs = "".join("+" if one > 0 else "-" for one in logs.mean(axis=1))
    rows = fitted(VariableOrderMarkov(order=3, min_count=least), prices).reshape(8, -1)
    usual = logs[3:].mean(axis=0)
    lengths = set()
    for code, row in enumerate(rows):
        context = "".join("+" if code >> back & 1 else "-" for back in (2, 1, 0))  # the last day is the lowest bit
        while context and sum(signs[:t].endswith(context) for t in range(3, len(logs))) < least:
            context = context[1:]
        after = np.array([logs[t] for t in range(3, len(logs)) if signs[:t].endswith(context)])
        lengths.add(len(context))
        np.testing.assert_allclose(row[:2], (after.sum(axis=0) + least * usual) / (len(after) + least), rtol=1e-4)
    assert lengths == {1: {3}, 20: {3}, 45: {2, 3}, 75: {2}, 150: {1}, 1000: {0}}[least]


# ── the network ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_gan_leaves_torch_as_it_was_and_asks_it_for_nothing() -> None:
    prices = invented(80, 3)
    before = torch.get_num_threads()
    random = torch.get_rng_state()
    plain = fitted(TINY, prices)
    try:
        torch.set_num_threads(before + 1)
        torch.manual_seed(99)
        with torch.no_grad():
            assert (fitted(TINY, prices) == plain).all()
        assert torch.get_num_threads() == before + 1
        torch.set_rng_state(random)
        drawn(TINY, prices, 50)
        assert torch.equal(torch.get_rng_state(), random)
    finally:
        torch.set_num_threads(before)


def test_a_gan_drifts_and_varies_as_the_prices_did() -> None:
    """Whatever it has learnt: means within 0.06 deviations, deviations within 6 %, on each day of a path alike."""
    prices = invented(300, 3)
    real = returns(prices)
    kind = Gan(path_days=6, steps=20, batch=8, hidden=16)
    found = fitted(kind, prices)
    np.testing.assert_allclose(found[:3], real.mean(axis=0), rtol=1e-4)
    np.testing.assert_allclose(found[3:6], real.std(axis=0), rtol=1e-4)
    many = kind.draw(found, prices, 6 * 10_000 + 1, np.random.default_rng(3))
    paths = (returns(np.concatenate([prices[-1:], many]))[:-1].reshape(-1, 6, 3) - found[:3]) / found[3:6]
    np.testing.assert_allclose(paths.mean(axis=0), 0, atol=0.06)
    np.testing.assert_allclose(paths.std(axis=0), 1, rtol=0.06)


def test_a_gan_learns_which_assets_move_together() -> None:
    prices = invented(1000, 3)
    wanted = correlations(returns(prices))

    def error(steps: int) -> float:
        kind = Gan(path_days=5, steps=steps, batch=32, hidden=32)
        return float(np.abs(correlations(returns(drawn(kind, prices, 5000))) - wanted).mean())

    assert error(400) < 0.15 < 0.25 < error(0)


# ── what cannot be used ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("bad", [np.nan, np.inf, 0.0, -2.5])
def test_a_price_that_is_none_is_found(bad: float) -> None:
    prices = invented(30, 4).copy()
    assert unusable_reason(prices) == ""
    prices[17, 2] = bad
    assert unusable_reason(prices) == f"asset 2 has the price {bad:.6g} on synthetic day 17"


@pytest.mark.parametrize(
    ("days", "growth", "usable"),
    [(252, 99, True), (252, 101, False), (252, 1 / 101, False), (504, 101, True), (5, 1.5, True), (5, 101, False)],
)
def test_more_than_a_hundredfold_a_year_is_not_sound(days: int, growth: float, usable: bool) -> None:
    prices = np.column_stack([np.ones(days), growth ** np.linspace(0, 1, days)])
    assert unusable_reason(prices) == ("" if usable else "asset 1 moves by a factor of more than 100 a year")


@each_kind
def test_a_generator_that_blows_up_is_found(kind: Augmenter) -> None:
    prices = invented(80, 2)
    wild = fitted(kind, prices) * np.float32(3e4)
    assert unusable_reason(kind.draw(wild, prices, 252, np.random.default_rng(0))).startswith("asset ")


def test_what_cannot_be_learnt_from_is_told() -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(
        SettingError, match=r"There is no augmenter 'gmb'. Did you mean 'gbm'\? Allowed: gan, gbm, none"
    ):
        make_augmenter("gmb")
    with pytest.raises(SettingError, match=r"There is no setting of vom 'ordr'. Did you mean 'order'"):
        make_augmenter("vom", ordr=2)
    with pytest.raises(SettingError, match=r"The 'path' of Gan must be a whole number >= 5. Got 4."):
        make_augmenter("gan", path=4)
    with pytest.raises(PartyError, match=r"Gan needs prices \[days, assets\] of at least 23 days. Got \[22, 2\]."):
        Gan().fit(invented(22, 2), rng)
    with pytest.raises(PartyError, match=r"Vom needs prices .* at least 6 days. Got \[5, 2\]."):
        VariableOrderMarkov().fit(invented(5, 2), rng)
    holed = invented(50, 2).copy()
    holed[3, 1] = np.nan
    with pytest.raises(PartyError, match=r"Gbm needs a price > 0 for every asset and day"):
        GeometricBrownianMotion().fit(holed, rng)
    assert NoAugmentation().fit(holed, rng).size == 0
