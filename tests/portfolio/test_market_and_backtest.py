"""Markets, transaction costs, back-tests and performance measures, against independent computations."""

from __future__ import annotations

import math
import sys
import zipfile
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from dataset_files import write_csv
from descant import portfolio
from descant.errors import PartyError, SettingError
from descant.portfolio import (
    Market,
    buy_and_hold,
    drift,
    generate_market,
    run_backtest,
    uniform_rebalancing,
)
from descant.portfolio import (
    performance_measures as measures,
)
from descant.portfolio import (
    transaction_costs as fees,
)

NAN = math.nan
DATES = ["2018-12-28", "2018-12-31", "2019-01-02", "2019-01-03"]
PRICES = [[1.0, NAN, 8.0], [2.0, NAN, 4.0], [4.0, 5.0, 2.0], [4.0, 10.0, 1.0]]  # B begins late


def small() -> Market:
    return Market.create(DATES, ["A", "B", "C"], PRICES, "prices.csv")


def weights(assets: int, *lead: int) -> st.SearchStrategy[np.ndarray]:
    """Return points of the simplex, cash first; some on its boundary."""
    shares = arrays(np.float64, (*lead, 1 + assets), elements=st.sampled_from([0.0, 1.0]) | st.floats(0.01, 1.0))
    return shares.map(normalize)


def normalize(shares: np.ndarray) -> np.ndarray:
    shares[..., 0] += shares.sum(-1) == 0
    return shares / shares.sum(-1, keepdims=True)


def relatives(assets: int, days: int, *lead: int) -> st.SearchStrategy[np.ndarray]:
    return arrays(np.float64, (*lead, days, assets), elements=st.floats(0.5, 2.0))


COSTS = st.sampled_from([0.0, 0.002]) | st.floats(1e-6, 0.3)


def test_a_market_is_selected_by_period_and_by_name() -> None:
    market = small()
    assert market.between("2019", "2019").dates.astype(str).tolist() == DATES[2:]
    assert market.between("2018-12-31", "2019-01-02").dates.astype(str).tolist() == DATES[1:3]
    assert market.between(2018, "2018-12").prices[:, 0].tolist() == [1.0, 2.0]
    picked = market.select(["C", "A"])
    assert picked.names == ("C", "A") and picked.prices[0].tolist() == [8.0, 1.0]
    assert market.relatives[:, 0].tolist() == [2.0, 2.0, 1.0]


def test_complete_leaves_out_late_assets_or_early_days_and_notes_it() -> None:
    market = small()
    without = market.complete("exclude")
    later = market.complete("later")
    assert without.names == ("A", "C") and len(without.dates) == 4
    assert without.note == "without 1 of 3 assets, whose prices begin after 2018-12-28: B"
    assert later.names == market.names and later.dates.astype(str).tolist() == DATES[2:]
    assert later.note == "without 2 of 4 days, those before 2019-01-02, when B begins"
    assert not np.isnan(without.prices).any() and not np.isnan(later.prices).any()
    assert without.between("2019", "2019").note == without.select(["A"]).note == without.note
    assert market.between("2019", "2019").complete("exclude").note == ""


@pytest.mark.parametrize(
    ("prices", "message"),
    [
        ([[1, NAN, 8], [2, NAN, 4], [4, 5, 0], [4, 10, 1]], "the price of C on 2019-01-02 is 0. Expected finite"),
        ([[1, NAN, 8], [2, NAN, 4], [4, -5, 2], [4, 10, 1]], "the price of B on 2019-01-02 is -5. Expected finite"),
        ([[1, NAN, 8], [2, NAN, 4], [4, 5, 2], [math.inf, 10, 1]], "the price of A on 2019-01-03 is inf. Expected"),
        (
            [[1, NAN, 8], [2, NAN, 4], [4, 5, 2], [4, NAN, 1]],
            "B has no price on 2019-01-03, but it has one on 2019-01",
        ),
        (
            [[1, NAN, 8], [NAN, NAN, 4], [4, 5, 2], [4, 10, 1]],
            "A has no price on 2018-12-31, but it has one on 2018-12",
        ),
        (
            [[1, 8], [2, 4], [4, 2], [4, 1]],
            r"it has 4 dates, 3 assets and prices of shape [4, 2]. Expected a price",
        ),
        (
            [["1", "x", "8"]] * 4,
            "its prices are not numbers (could not convert string to float: 'x'). Expected a price",
        ),
    ],
)
def test_invalid_prices_are_rejected_by_asset_and_date(prices: Any, message: str) -> None:
    with pytest.raises(PartyError) as error:
        Market.create(DATES, ["A", "B", "C"], prices, "prices.csv")
    assert str(error.value).startswith(f"prices.csv cannot be used: {message}")


@pytest.mark.parametrize(
    ("dates", "names", "message"),
    [
        (["2018-12-28", "2018-12-28", *DATES[2:]], "ABC", "the date 2018-12-28 occurs twice"),
        ([DATES[1], DATES[0], *DATES[2:]], "ABC", "the date 2018-12-28 comes after 2018-12-31"),
        ([*DATES[:3], "03.01.2019"], "ABC", "date 4 of 4 is '03.01.2019'"),
        ([*DATES[:3], "20190103"], "ABC", "date 4 of 4 is '20190103'"),
        (["2018-12-28", "2018-12-32", *DATES[2:]], "ABC", "date 2 of 4 is '2018-12-32'"),
        (np.array([*DATES[:3], "NaT"], "datetime64[D]"), "ABC", "date 4 of 4 is 'NaT'"),
        (np.arange(20190101, 20190105), "ABC", "its dates have shape (4,) of int64"),
        (DATES, "ABA", "the asset 'A' occurs 2 times"),
        (DATES, ["A", " ", "C"], "the asset ' ' occurs 1 times"),
        ([], "ABC", "it has no rows"),
        (DATES, "", "it has no assets"),
    ],
)
def test_invalid_dates_and_names_are_rejected(dates: Any, names: Any, message: str) -> None:
    with pytest.raises(PartyError) as error:
        Market.create(dates, names, PRICES)
    assert str(error.value).startswith(f"The market cannot be used: {message}. Expected ")


def test_dates_may_be_dates_or_texts_with_the_time_of_day() -> None:
    for dates in ([date.fromisoformat(day) for day in DATES], np.array(DATES, "datetime64[ns]"), np.array(DATES, "S")):
        assert Market.create(dates, "ABC", PRICES).dates.astype(str).tolist() == DATES
    assert Market.create([f"{day} 00:00:00-05:00" for day in DATES], "ABC", PRICES).dates.dtype == "datetime64[D]"


@pytest.mark.parametrize(
    ("call", "error_type", "message"),
    [
        (lambda market: market.between("2020", "2021"), SettingError, "prices.csv covers 2018-12-28 to 2019-01-03"),
        (
            lambda market: market.between("2018-12-29", "2018-12-30"),
            SettingError,
            "no prices from 2018-12-29 to 2018-12-30",
        ),
        (
            lambda market: market.between("today", "2021"),
            SettingError,
            "a date such as 2018-12-31, or a year. Got 'today'",
        ),
        (lambda market: market.between("2019", "2019-02-30"), SettingError, "Got '2019-02-30'"),
        (
            lambda market: market.select(["A", "D"]),
            SettingError,
            "no asset 'D' in prices.csv: it has 3, such as A, B, C.",
        ),
        (
            lambda market: generate_market().select(["a7"]),
            SettingError,
            "no asset 'a7' in the generated market: it has 30, similar: A",
        ),
        (lambda market: market.select(["A", "A"]), PartyError, "the asset 'A' occurs 2 times"),
        (lambda market: market.complete("excluded"), SettingError, "Did you mean 'exclude'? Allowed: exclude, later"),
        (
            lambda market: market.select(["B"]).complete("exclude"),
            PartyError,
            "every asset begins after 2018-12-28, so noth",
        ),
        (
            lambda market: market.between(2018, 2018).complete("later"),
            PartyError,
            "B has no price up to 2018-12-31, so",
        ),
        (
            lambda market: generate_market(assets=0),
            SettingError,
            "The 'assets' of generate_market must be a whole number >= 1. Got 0",
        ),
        (
            lambda market: generate_market(years=1.5),
            SettingError,
            "The 'years' of generate_market must be a whole number >= 1. Got 1.5",
        ),
    ],
)
def test_invalid_requests_to_a_market_are_rejected(
    call: Callable[[Market], Market], error_type: type[Exception], message: str
) -> None:
    with pytest.raises(error_type) as error:
        call(small())
    assert message in str(error.value)


def equal(one: Market, other: Market) -> bool:
    same = np.array_equal(one.dates, other.dates) and one.names == other.names
    return same and np.array_equal(one.prices, other.prices, equal_nan=True)


def test_a_csv_file_is_read_as_written(tmp_path: Path) -> None:
    rows = [[day, *("" if math.isnan(x) else repr(x) for x in row)] for day, row in zip(DATES, PRICES, strict=True)]
    for encoding in ("utf-8", "utf-8-sig"):
        file = write_csv(tmp_path / "prices.csv", [["Date", "A", "B", "C"], *rows, []], encoding)
        market = portfolio.read_market(file)
        assert equal(market, small()) and market.source == str(file)


def test_an_npz_file_may_hold_several_prices_and_late_assets(tmp_path: Path) -> None:
    file = tmp_path / "prices.npz"
    prices = np.array(PRICES, dtype=np.float32)
    np.savez(
        file,
        dates=np.array(DATES, "datetime64[D]"),
        tickers=np.array(["A", "B", "C"]),
        adj_close=prices,
        low=prices / 2,
    )
    assert equal(portfolio.read_market(file), small()) and portfolio.read_market(file).prices.dtype == np.float64
    assert np.array_equal(portfolio.read_market(str(file), "low").prices, np.array(PRICES) / 2, equal_nan=True)
    with pytest.raises(
        PartyError, match=r"it has no 'close', only dates, tickers, adj_close, low\. Expected daily prices"
    ):
        portfolio.read_market(file, "close")


def test_a_parquet_file_is_read_as_written(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    columns = {name: [row[column] for row in PRICES] for column, name in enumerate("ABC")}
    columns["B"] = [None, None, 5, 10]
    file = tmp_path / "prices.parquet"
    for days in (DATES, [date.fromisoformat(day) for day in DATES]):
        parquet.write_table(
            arrow.table({**columns, "Date": days}), file
        )  # the dates come last, as pandas writes its index
        assert equal(portfolio.read_market(file), small())
    parquet.write_table(arrow.table(columns), file)
    with pytest.raises(PartyError, match=r"prices\.parquet cannot be used: its columns without numbers are none"):
        portfolio.read_market(file)


def test_a_parquet_file_without_pyarrow_names_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(PartyError, match=r"Reading .*prices\.parquet needs pyarrow: pip install pyarrow\."):
        portfolio.read_market(tmp_path / "prices.parquet")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [["Date", "A"], ["2019-01-02", "1"], ["2019-01-03", "one"]],
            "the price of A on 2019-01-03 is 'one'. Expected a n",
        ),
        ([["Date", "A"], ["2019-01-02", "0"]], "the price of A on 2019-01-02 is 0. Expected finite prices > 0"),
        ([["Date", "A"], ["2019-01-02", "1"], ["2019-01-03", ""]], "A has no price on 2019-01-03, but it has one"),
        (
            [["2019-01-02", "1.5", "7"], ["2019-01-03", "2", "8"]],
            "its first line is 2019-01-02,1.5,7. Expected a first line of names",
        ),
        ([["Date", "A", "B"], ["2019-01-02", "1"]], "the row of 2019-01-02 has 2 fields. Expected 3 fields per row"),
        ([["Date", "A"]], "it has no rows. Expected daily prices: an .npz file with"),
        (
            [["Date;A;B"], ["2019-01-02;1", "5;2"]],
            "its first line is Date;A;B. Expected a .csv file with commas between the fields and decimal points in the",
        ),
        ([["Date"], ["2019-01-02"]], "it has no assets. Expected daily prices: an .npz file with"),
        ([], "it has no rows. Expected daily prices: an .npz file with"),
    ],
)
def test_an_invalid_csv_file_is_named(tmp_path: Path, rows: list[list[str]], message: str) -> None:
    file = write_csv(tmp_path / "prices.csv", rows)
    with pytest.raises(PartyError) as error:
        portfolio.read_market(file)
    assert str(error.value).startswith(f"{file} cannot be used: {message}")


def test_errors_of_price_files_name_the_expected_format(tmp_path: Path) -> None:
    with pytest.raises(
        PartyError, match=r"There is no file .*none\.npz\. Expected daily prices: an \.npz file with dates"
    ):
        portfolio.read_market(tmp_path / "none.npz")
    with pytest.raises(
        PartyError, match=r"prices\.xlsx cannot be used: its suffix is '\.xlsx'\. Expected daily prices"
    ):
        portfolio.read_market(tmp_path / "prices.xlsx")
    objects = tmp_path / "objects.npz"
    np.savez(objects, dates=np.array([{}]), tickers=np.array(["A"]), adj_close=np.ones((1, 1)))
    with pytest.raises(
        PartyError, match=r"objects\.npz cannot be used: it holds objects, or no arrays at all \(ValueErr"
    ):
        portfolio.read_market(objects)
    damaged = tmp_path / "damaged.npz"
    for content in (b"", b"PK\x03\x04 and no more", b"date,A\n2019-01-02,1\n"):
        damaged.write_bytes(content)
        with pytest.raises(PartyError, match=r"damaged\.npz cannot be used: .* Expected daily prices"):
            portfolio.read_market(damaged)
    with zipfile.ZipFile(damaged, "w") as archive:
        archive.writestr("notes.txt", "no arrays")
    with pytest.raises(PartyError, match=r"damaged\.npz cannot be used: it has no 'dates', only notes\.txt"):
        portfolio.read_market(damaged)
    (tmp_path / "quotes.csv").write_bytes(b'Date,A\n2019-01-02,"1\n')
    with pytest.raises(PartyError, match=r"quotes\.csv cannot be used: unexpected end of data \(Error\)"):
        portfolio.read_market(tmp_path / "quotes.csv")
    (tmp_path / "latin.csv").write_bytes("Date,Zürich\n".encode("latin-1"))
    with pytest.raises(PartyError, match=r"latin\.csv cannot be used: .*invalid.* \(UnicodeDecodeError\)"):
        portfolio.read_market(tmp_path / "latin.csv")


def test_the_generated_market_has_business_days_and_is_reproducible() -> None:
    market = generate_market(assets=4, years=2, first="2006-07-01")
    assert market.dates[[0, -1]].astype(str).tolist() == ["2006-07-03", "2007-12-31"]
    assert np.is_busday(market.dates).all() and np.diff(market.dates).max() == np.timedelta64(3, "D")
    assert equal(market, generate_market(assets=4, years=2, first="2006-07-01"))
    assert not np.array_equal(market.prices, generate_market(assets=4, years=2, first="2006-07-01", seed=1).prices)
    assert equal(market.select(["A02"]), generate_market(assets=2, years=2, first="2006-07-01").select(["A02"]))


def test_generated_assets_are_correlated_and_predictable() -> None:
    logs = np.log(generate_market().prices)
    moves = np.diff(logs, axis=0)
    correlation = np.corrcoef(moves.T)[np.triu_indices(30, 1)]
    assert 0.15 < correlation.mean() < 0.5
    own = moves - moves.mean(1, keepdims=True)
    level = np.cumsum(own, axis=0)
    by_chance = 1 / math.sqrt(own.size)
    week = np.corrcoef((level[5:-1] - level[:-6]).ravel(), own[6:].ravel())[0, 1]
    quarter = np.corrcoef((level[55:-6] - level[:-61]).ravel(), own[61:].ravel())[0, 1]  # without the last week
    assert week < -10 * by_chance and quarter > 2 * by_chance


def remaining_share(before: np.ndarray, after: np.ndarray, c: float) -> float:
    """Return the μ at which cash is neither left over nor missing, by bisection."""
    low = 0.0
    high = 1.0
    for _ in range(60):
        mu = (low + high) / 2
        change = before[1:] - mu * after[1:]
        cash = before[0] + (1 - c) * change[change > 0].sum() + change[change < 0].sum() / (1 - c)
        low, high = (mu, high) if cash > mu * after[0] else (low, mu)
    return low


@settings(deadline=None)
@given(st.integers(1, 5).flatmap(lambda m: st.tuples(weights(m, 3), weights(m, 3))), COSTS)
def test_the_exact_factor_balances_the_account(pair: tuple[np.ndarray, np.ndarray], c: float) -> None:
    before, after = pair
    factor = fees.exact_factor(before, after, c)
    assert factor == pytest.approx([remaining_share(*both, c) for both in zip(before, after, strict=True)], abs=2e-10)
    assert (factor >= (1 - c) ** 2 - 1e-9).all() and (factor <= 1 + 1e-9).all()
    assert factor == pytest.approx(fees.approximate_factor(before, after, c), abs=4 * c**2 / (1 - c) + 2e-10)
    assert factor.tolist() == [float(fees.exact_factor(*both, c)) for both in zip(before, after, strict=True)]


@settings(deadline=None)
@given(weights(3), weights(3), COSTS)
def test_no_trade_or_no_cost_keeps_the_whole_value(one: np.ndarray, other: np.ndarray, c: float) -> None:
    for fee in (fees.exact_factor, fees.approximate_factor):
        assert fee(one, one, c) == pytest.approx(1, abs=1e-15)
        assert fee(one, other, 0.0) == 1


def test_costs_of_whole_trades() -> None:
    cash, first, second = np.eye(3)
    assert fees.exact_factor(cash, first, 0.1) == pytest.approx(0.9) and fees.exact_factor(
        first, cash, 0.1
    ) == pytest.approx(0.9)
    assert fees.exact_factor(first, second, 0.1) == pytest.approx(0.81)  # sold, and bought with what was left
    assert fees.approximate_factor(first, second, 0.1) == pytest.approx(0.8)
    assert fees.turnover(np.stack([cash, first]), second).tolist() == [1, 2]


@settings(deadline=None)
@given(st.integers(1, 5).flatmap(lambda m: st.tuples(weights(m, 2), relatives(m, 1, 2))))
def test_weights_stay_on_the_simplex_when_they_drift(pair: tuple[np.ndarray, np.ndarray]) -> None:
    held = pair[0]
    factors = pair[1][:, 0]
    drifted = drift(held, factors)
    assert (drifted >= 0).all() and drifted.sum(-1) == pytest.approx(1)
    with_cash = np.concatenate([np.ones((2, 1)), factors], axis=1)
    assert drifted * (with_cash * held).sum(-1, keepdims=True) == pytest.approx(with_cash * held)


def follow(chosen: np.ndarray) -> Callable[[int, np.ndarray], np.ndarray]:
    def choose(t: int, before: np.ndarray) -> np.ndarray:
        return chosen[..., t, :]

    return choose


@settings(deadline=None)
@given(weights(3, 5), COSTS, st.booleans())
def test_with_constant_prices_only_costs_change_the_value(chosen: np.ndarray, c: float, exact: bool) -> None:
    still = np.ones((5, 3))
    assert run_backtest(follow(chosen), still, 0.0, exact_fees=exact).growth == pytest.approx(1, abs=1e-15)
    path = run_backtest(follow(chosen), still, c, exact_fees=exact)
    before = np.concatenate([np.eye(4)[:1], chosen[:-1]])
    fee = fees.exact_factor if exact else fees.approximate_factor
    assert path.growth == pytest.approx(fee(before, chosen, c), abs=1e-12)
    assert path.turnover == pytest.approx(np.abs(before - chosen)[:, 1:].sum(1), abs=1e-12)


@settings(deadline=None)
@given(weights(3, 2, 6), relatives(3, 6, 2), COSTS, st.integers(0, 5))
def test_a_backtest_never_looks_ahead(chosen: np.ndarray, factors: np.ndarray, c: float, day: int) -> None:
    """The weights chosen on a day earn the next relatives and depend on earlier ones only."""

    def logging_into(log: list[np.ndarray]) -> Callable[[int, np.ndarray], np.ndarray]:
        def choose(t: int, before: np.ndarray) -> np.ndarray:
            log.append(before)
            return chosen[:, t]

        return choose

    other = factors.copy()
    other[:, day:] = 1 / factors[:, day:]
    weights_seen: list[np.ndarray] = []
    other_weights_seen: list[np.ndarray] = []
    one = run_backtest(logging_into(weights_seen), factors, c)
    two = run_backtest(logging_into(other_weights_seen), other, c)
    assert np.array_equal(one.growth[:, :day], two.growth[:, :day])
    assert np.array_equal(weights_seen[: day + 1], other_weights_seen[: day + 1])
    fee = fees.exact_factor(weights_seen[day], chosen[:, day], c)
    earned = chosen[:, day, 0] + (chosen[:, day, 1:] * factors[:, day]).sum(-1)
    assert one.growth[:, day] == pytest.approx(fee * earned)


@settings(deadline=None)
@given(relatives(3, 7, 2), COSTS)
def test_a_batch_of_backtests_equals_single_ones(factors: np.ndarray, c: float) -> None:
    for strategy in (uniform_rebalancing, buy_and_hold):
        both = strategy(factors, c)
        for index in range(2):
            single = strategy(factors[index], c)
            assert np.array_equal(both.growth[index], single.growth)
            assert np.array_equal(both.weights[index], single.weights)
        assert np.log(both.growth).sum(-1) == pytest.approx(np.log(measures.portfolio_values(both.growth)[:, -1]))
        assert both.weights.sum(-1) == pytest.approx(1) and both.turnover.shape == (2, 7)


def test_uniform_rebalancing_equals_a_plain_loop() -> None:
    factors = [[1.1, 0.9], [1.2, 1.0], [0.8, 1.3]]
    c = 0.01
    held = [0.0, 0.0]
    growth = []
    for row in factors:
        value = 1 - c * sum(abs(share - 0.5) for share in held)
        worth = [value * 0.5 * factor for factor in row]
        growth.append(sum(worth))
        held = [share / sum(worth) for share in worth]
    path = uniform_rebalancing(np.array(factors), c, exact_fees=False)
    assert path.growth == pytest.approx(growth, rel=1e-14)
    assert path.turnover == pytest.approx([1, 0.1, 1 / 11])
    assert path.weights.tolist() == [[0, 0.5, 0.5]] * 3


def test_buy_and_hold_pays_once_and_earns_the_price_changes() -> None:
    market = generate_market(assets=5, years=1)
    path = buy_and_hold(market.relatives, 0.002)
    kept = (market.prices[-1] / market.prices[0]).mean()
    assert measures.portfolio_values(path.growth)[-1] == pytest.approx(0.998 * kept)
    assert path.turnover[0] == 1 and path.turnover[1:] == pytest.approx(0, abs=1e-14)
    assert uniform_rebalancing(market.relatives, 0.002).turnover[1:].min() > 1e-4


def test_invalid_inputs_of_a_backtest_are_rejected() -> None:
    still = np.ones((3, 2))
    for c in (-0.1, 1.0, NAN):
        with pytest.raises(SettingError, match=r"The 'c' of a back-test must be >= 0 and < 1.* Got"):
            uniform_rebalancing(still, c)
    with pytest.raises(
        PartyError, match=r"Asset 1 on day 0 has nan: if assets begin late, call Market\.complete first"
    ):
        uniform_rebalancing(small().relatives, 0.0)
    with pytest.raises(PartyError, match=r"\[\.\.\., days, assets\] of at least one asset\. Got \(3,\)"):
        run_backtest(follow(still), np.ones(3), 0.0)
    with pytest.raises(PartyError, match=r"on day 0 must have shape \(3,\), cash first\. Got \(2,\)"):
        run_backtest(follow(still), still, 0.0)
    for chosen in ([0.5, 0.6, 0.2], [1.5, -0.5, 0.0], [NAN, 0.0, 1.0]):
        with pytest.raises(PartyError, match=r"The weights chosen on day 0 must be >= 0 and sum to 1"):
            run_backtest(follow(np.array([chosen] * 3)), still, 0.0)


def test_weights_in_single_precision_are_normalized() -> None:
    shares = np.full((3, 4), 1 / 3, dtype=np.float32)
    shares[:, 0] = 0
    path = run_backtest(follow(shares), np.ones((3, 3)), 0.0)
    assert path.weights.sum(-1).tolist() == [1, 1, 1] and path.growth.tolist() == [1, 1, 1]
    assert shares.dtype == np.float32 and shares[0, 1] == np.float32(1 / 3)


GROWTH = [
    [1.012, 0.985, 1.004, 1.021, 0.962, 0.991, 1.008, 1.015, 0.999, 1.003, 0.978, 1.017],
    [0.95, 1.1, 0.9, 0.92, 1.3, 1.01],
]
# By empyrical-reloaded 0.7.1: annual_return, sharpe_ratio, annual_volatility, max_drawdown, cum_returns_final.
EXPECTED = [
    [-0.1317750089350388, -0.37507155050519236, 0.2799465858143134, -0.04665799999999996, 0.993293807000198],
    [211.45983482335404, 3.1594927387473453, 2.3927891674779875, -0.17200000000000004, 1.13608638],
]


def compute_measures(growth: np.ndarray) -> list[np.ndarray]:
    names = ("annual_return", "sharpe_ratio", "volatility", "max_drawdown")
    values = [getattr(measures, name)(growth) for name in names]
    return [*values[:3], -values[3], measures.portfolio_values(growth)[..., -1]]


@pytest.mark.parametrize(("growth", "expected"), list(zip(GROWTH, EXPECTED, strict=True)))
def test_measures_equal_stored_values_of_empyrical(growth: list[float], expected: list[float]) -> None:
    assert compute_measures(np.array(growth)) == pytest.approx(expected, rel=1e-12)
    stacked = compute_measures(np.array([growth, [1.5] * len(growth)]))
    assert [float(row[0]) for row in stacked] == pytest.approx(expected, rel=1e-12)


def test_measures_agree_with_empyrical() -> None:
    empyrical = pytest.importorskip("empyrical")
    for seed in range(5):
        growth = uniform_rebalancing(generate_market(assets=4, years=2, seed=seed).relatives, 0.002).growth
        names = ("annual_return", "sharpe_ratio", "annual_volatility", "max_drawdown")
        expected = [getattr(empyrical, name)(growth - 1) for name in names]
        assert compute_measures(growth) == pytest.approx(
            [*expected, empyrical.cum_returns_final(growth - 1, 1)], rel=1e-10
        )


@settings(deadline=None)
@given(arrays(np.float64, (2, 8), elements=st.floats(0.5, 2.0)))
def test_measures_obey_their_bounds(growth: np.ndarray) -> None:
    lost = measures.max_drawdown(growth)
    value = measures.portfolio_values(growth)
    assert (lost >= 0).all() and (lost < 1).all()
    slow = max(1 - value[0, j] / value[0, i] for i in range(9) for j in range(i, 9))
    assert lost[0] == pytest.approx(slow, abs=1e-15)
    assert (1 + measures.annual_return(growth, days=8)) == pytest.approx(value[:, -1])
    assert measures.volatility(growth, days=4) == pytest.approx(2 * measures.volatility(growth, days=1))


def test_constant_growth_has_no_sharpe_ratio_and_no_days_are_rejected() -> None:
    assert np.isnan(measures.sharpe_ratio(np.full(100, 1.001))) and measures.volatility(np.full(100, 1.001)) < 1e-12
    assert np.isnan(measures.sharpe_ratio(np.array([1.1]))) and np.isnan(
        measures.volatility(np.array([[1.1]]))
    ).tolist() == [True]
    for name in ("annual_return", "sharpe_ratio", "volatility", "max_drawdown", "portfolio_values"):
        with pytest.raises(PartyError, match=r"at least one day\. Got growth of shape \(3, 0\)"):
            getattr(measures, name)(np.ones((3, 0)))
