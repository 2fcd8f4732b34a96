"""Portfolio desks: assets, prices, studies, and errors."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from descant import Federation, Sgd, Study, Trader, algorithms, compare, models, parties
from descant.analysis import backtest_federation, compare_universes
from descant.analysis.desk_results import BacktestResults, backtest_paths
from descant.config import read_recipe
from descant.core.metrics import SHARPE_RATIO
from descant.errors import DescantWarning, ModelError, PartyError, SettingError
from descant.portfolio import Market, buy_and_hold, generate_market, performance_measures, uniform_rebalancing
from descant.reporting.portfolio_plots import draw_values, draw_weights
from descant.studies.portfolio_tables import portfolio_table
from descant.studies.run_versus_local import evaluate_run, study_from_run, write_report
from descant.studies.study_report import available_plots, study_page
from descant.studies.training_result import TrainingResult
from descant.tracking import Run

MARKET = generate_market(assets=6, years=3, seed=2)
GIVEN: dict[str, Any] = {"train": ("2006", "2007"), "test": ("2008", "2008-02"), "assets": 3, "window": 5}
TRADER = Trader(lr=1e-3, iterations=3, batch=6, synthetic_days=15)
NET = partial(models.eiie, "cnn", window=5)


def desks(count: int = 3, **rest: Any) -> parties.Population:
    return parties.desks(MARKET, count=count, **{**GIVEN, "augment": ("gbm", "vom"), **rest})


def test_the_assets_of_a_desk_do_not_depend_on_other_desks() -> None:
    few = desks(2, seed=4)
    many = desks(20, seed=4)
    assert few["1"].assets == many["1"].assets and len({desk.assets for desk in many.values()}) > 10  # type: ignore[attr-defined]
    assert {desk.augment for desk in many.values()} == {"gbm", "vom"}  # type: ignore[attr-defined]
    narrow = desks(30, universe=4)
    assert len({asset for desk in narrow.values() for asset in desk.assets}) == 4  # type: ignore[attr-defined]


HOLDINGS = {"north": ["A02", "A01"], "south": ["A02", "A06"]}


def test_desks_hold_the_given_assets() -> None:
    given = {name: value for name, value in GIVEN.items() if name != "assets"}
    population = parties.desks(MARKET, holdings=HOLDINGS, augment="none", **given)
    by_name: dict[str, Any] = dict(population.items())
    assert {name: list(desk.assets) for name, desk in by_name.items()} == HOLDINGS
    days = np.isin(MARKET.dates, by_name["north"].test_dates)
    np.testing.assert_array_equal(by_name["north"].test_prices[5:], MARKET.prices[days][:, [1, 0]])
    text = (
        "[parties]\npopulation = 'desks'\nmarket = 'generated'\n[parties.holdings]\nnorth = ['A02']\nsouth = ['A01']\n"
    )
    desks_of_recipe: Any = read_recipe(read_recipe(text).text).population()()  # type: ignore[operator]
    assert [desks_of_recipe[name].assets for name in desks_of_recipe] == [("A02",), ("A01",)]
    fed = Federation(NET, population, algorithms.FedAvg(), solver=TRADER).fit(1, progress=False)
    assert fed.population.names == ("north", "south") and "north" in str(fed.table())


def test_the_recipe_in_the_docs_runs(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "portfolio.md").read_text(encoding="utf-8")
    names = page.partition("\ndate,")[2].split("\n")[0]
    market = generate_market(assets=6)
    rows = [f"{day},{','.join(map(str, row))}\n" for day, row in zip(market.dates, market.prices.tolist(), strict=True)]
    (tmp_path / "prices.csv").write_text(f"date,{names}\n{''.join(rows)}")
    (tmp_path / "desks.toml").write_text(page.partition("```toml\n")[2].partition("```")[0])
    fed = read_recipe(tmp_path / "desks.toml").with_values("training.iterations=2").federation().fit(1, progress=False)
    assert fed.population.names == ("north", "south", "west") and not fed.population.note


def test_assets_that_begin_late_matter_only_to_their_desks() -> None:
    prices = MARKET.prices.copy()
    prices[:30, 5] = np.nan  # A06
    late = Market.create(MARKET.dates, MARKET.names, prices)
    given = {name: value for name, value in GIVEN.items() if name != "assets"}
    with pytest.raises(PartyError, match=r"Desk 'south' holds A06, which begins after 2006-01-02: .*missing = 'later'"):
        parties.desks(late, holdings=HOLDINGS, **given)
    assert "when A06 begins" in parties.desks(late, holdings=HOLDINGS, missing="later", **given).note
    assert not parties.desks(late, holdings={"north": HOLDINGS["north"]}, missing="later", **given).note


@pytest.mark.parametrize(
    ("holdings", "message"),
    [
        ({}, "at least one party"),
        (["A01"], r"The 'holdings' of desks must give each desk a list of assets, such as .* Got \['A01'\]"),
        ({"north": "A01"}, "give each desk a list of assets"),
        ({"north": []}, "give each desk a list of assets"),
        ({"north": ["A01", "A01"]}, "Desk 'north' holds A01 twice"),
        ({"north": ["a1", "A02"]}, "no asset 'a1' in the generated market: it has 6, similar: A01"),
        ({"north": ["A01"], "south": ["A01", "A02"]}, "the same number of assets.* Got 1 in 'north', 2 in 'south'"),
    ],
)
def test_invalid_holdings_are_rejected(holdings: Any, message: str) -> None:
    with pytest.raises((PartyError, SettingError), match=message):
        parties.desks(MARKET, holdings=holdings)


def test_the_test_begins_right_after_the_last_training_day() -> None:
    desk: Any = desks()["0"]
    prices = MARKET.select(desk.assets)
    first = int(np.searchsorted(prices.dates, np.datetime64("2008-01-01")))
    assert desk.test_count == len(desk.test_dates) == len(desk.relatives) and str(desk.test_dates[0]).startswith(
        "2008-01"
    )
    np.testing.assert_array_equal(desk.relatives[0], prices.prices[first] / prices.prices[first - 1])
    np.testing.assert_array_equal(desk.prices[-1], prices.prices[first - 1])
    assert "3 assets" in desks().describe()


def test_days_between_training_and_test_are_seen_but_not_trained_on() -> None:
    """The first test day starts from the close before it, not from the last training day."""
    near = desks()["0"]
    far = desks(train=("2006", "2006"))["0"]
    np.testing.assert_array_equal(near.test_prices, far.test_prices)  # type: ignore[attr-defined]
    assert len(far.prices) < 0.6 * len(near.prices)  # type: ignore[attr-defined]
    assert np.abs(np.log(far.relatives)).max() < 0.2  # type: ignore[attr-defined]


def test_other_seeds_draw_other_assets() -> None:
    one, other, again = ([desk.assets for desk in desks(6, seed=seed).values()] for seed in (1, 2, 1))  # type: ignore[attr-defined]
    assert one != other and one == again


def test_measures_of_given_paths() -> None:
    growth = np.array([[1.1, 0.5, 1.2], [1.0, 1.0, 1.0]])
    half = np.array([0.1, 0.3])
    results = BacktestResults(
        ("a", "b"),
        ("1", "2", "3"),
        growth,
        turnover=half,
        cash=half / 2,
        largest=half * 2,
        uniform=growth * 0.9,
        hold=growth,
    )
    measures = results.measures()
    assert measures["drawdown"].tolist() == [0.5, 0.0] and measures["turnover"].tolist() == [0.1, 0.3]
    assert measures["cash"].tolist() == [0.05, 0.15] and measures["largest"].tolist() == [0.2, 0.6]
    np.testing.assert_allclose(results.mean_values(), [1, 1.05, 0.775, 0.83])
    again = BacktestResults.from_json(results.to_json())
    for name in ("growth", "cash", "uniform", "hold"):
        np.testing.assert_allclose(getattr(again, name), getattr(results, name), atol=1e-6)


def test_shares_and_turnover_are_those_of_the_backtest() -> None:
    fed = Federation(NET, desks(), algorithms.Local(), solver=TRADER).fit(1, progress=False)
    results = backtest_federation(fed)
    path = backtest_paths(fed, fed.population.names)
    assert results is not None
    np.testing.assert_allclose(results.cash, path.weights[..., 0].mean(1))
    np.testing.assert_allclose(results.largest, path.weights[..., 1:].max(2).mean(1))
    np.testing.assert_allclose(results.turnover, path.turnover.mean(1))
    uniform = [uniform_rebalancing(desk.relatives, 0.002).growth for desk in fed.population.values()]  # type: ignore[attr-defined]
    np.testing.assert_allclose(fed.scores().majority.values, performance_measures.annual_return(np.array(uniform)))


def test_a_study_of_desks_shows_trivial_strategies_and_every_measure(tmp_path: Path) -> None:
    study = compare([algorithms.FedAvg()], NET, desks(), rounds=2, solver=TRADER, progress=False, seeds=2)
    assert [row["method"] for row in study.table().rows] == ["uniform rebalancing", "Local", "FedAvg"]
    again = Study.load(study.save(tmp_path / "study"))
    rows = {row["method"]: row for row in portfolio_table(again).rows}
    assert list(rows) == ["uniform rebalancing", "buy and hold", "Local", "FedAvg"]
    strategies = {
        kind: [strategy(desk.relatives, 0.002) for desk in desks().values()]  # type: ignore[attr-defined]
        for kind, strategy in (("uniform rebalancing", uniform_rebalancing), ("buy and hold", buy_and_hold))
    }
    for kind, paths in strategies.items():
        growth = np.stack([path.growth for path in paths])
        assert rows[kind]["annual return"] == pytest.approx(performance_measures.annual_return(growth).mean(), abs=1e-5)
        assert rows[kind]["Sharpe ratio"] == pytest.approx(performance_measures.sharpe_ratio(growth).mean(), abs=1e-3)
        assert rows[kind]["turnover"] == pytest.approx(np.mean([path.turnover for path in paths]), abs=1e-5)
        largest = np.mean([path.weights[:, 1:].max(1) for path in paths])
        assert rows[kind]["largest"] == pytest.approx(largest, abs=1e-5) and rows[kind]["cash"] == 0
    days = len(desks()["0"].test_dates)  # type: ignore[attr-defined]
    assert rows["buy and hold"]["turnover"] == pytest.approx(1 / days, abs=1e-5)  # of the first day alone
    means = [f"{kind} {rows[kind]['annual return']:.3f}" for kind in strategies]
    assert again.verdict().endswith(f"Without training: {', '.join(means)}.")
    assert rows["FedAvg"]["annual return"] == pytest.approx(study.table().rows[2]["mean"], abs=1e-5)
    page = (tmp_path / "study" / "report.html").read_text()
    assert "buy and hold" in page and "Rewards of the desks" in page and "agent" not in page
    assert all((tmp_path / "study" / f"{kind}.png").stat().st_size > 10_000 for kind in ("portfolio", "weights"))


def test_an_old_study_without_shares_shows_none_for_trivial_strategies(tmp_path: Path) -> None:
    study = compare([algorithms.FedAvg()], NET, desks(), rounds=1, solver=TRADER, progress=False)
    stored = study.results[0].to_json()
    for name in ("uniform_shares", "hold_shares", "assets", "held"):
        del stored["backtest"][name]
    old = replace(study, results=(TrainingResult.from_json(stored), study.results[1]))
    assert "portfolio" in available_plots(old) and "weights" not in available_plots(old)
    assert [row.get("cash") is None for row in portfolio_table(old).rows] == [True, True, False, False]
    assert "–" in str(portfolio_table(old))


def test_a_constant_backtest_is_left_out_of_the_sharpe_ratio() -> None:
    study = compare([algorithms.FedAvg()], NET, desks(), rounds=1, solver=TRADER, progress=False)
    result = study.of("FedAvg")[0]
    assert result.backtest is not None
    growth = result.backtest.growth.copy()
    growth[1] = 1
    changed = replace(result, backtest=replace(result.backtest, growth=growth))
    still = replace(study, results=(study.results[0], changed))
    row = portfolio_table(still).rows[-1]
    assert row["Sharpe ratio"] == pytest.approx(performance_measures.sharpe_ratio(growth[[0, 2]]).mean())
    assert row["annual return"] == pytest.approx(performance_measures.annual_return(growth).mean())
    (note,) = portfolio_table(still).notes
    assert (
        note == "FedAvg: 1 of 3 back-tests had a constant value and has no Sharpe ratio; the mean is over the others."
    )
    assert note in study_page(still, {})


def test_a_federation_of_desks_draws_values_and_weights(tmp_path: Path) -> None:
    fed = Federation(NET, desks(), algorithms.FedAvgPlus(), solver=TRADER).fit(2, progress=False)
    for kind in ("portfolio", "weights", "rewards", "universes"):
        assert fed.plot(kind, tmp_path / f"{kind}.png").stat().st_size > 10_000
    results = backtest_federation(fed)
    assert results is not None and not results.uniform.size  # trivial strategies are stored with Local only
    scores = fed.scores()
    np.testing.assert_allclose(performance_measures.annual_return(results.growth), scores.personal.values, rtol=1e-9)
    assert "uniform" in str(fed.table())
    sharpe = Federation(NET, desks(), algorithms.FedAvgPlus(), solver=TRADER, metric=SHARPE_RATIO).fit(
        2, progress=False
    )
    np.testing.assert_allclose(
        performance_measures.sharpe_ratio(results.growth), sharpe.scores().personal.values, rtol=1e-9
    )


def test_sold_assets_are_labeled_and_twenty_assets_have_distinct_colors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.figure import Figure

    drawn: list[Any] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, file, **rest: drawn.append(figure))
    names = [f"A{k}" for k in range(20)]
    held = np.zeros((10, 21))
    held[:5, 3], held[5:, 8], held[:, 0] = 0.9, 0.9, 0.1
    draw_weights(tmp_path / "w.png", {"desk 0": held}, {"desk 0": names}, dates=[str(day) for day in range(10)])
    (axes,) = drawn[0].axes
    assert {text.get_text(): text.get_position()[0] >= 10 for text in axes.texts} == {
        "cash": True,
        "A2": False,
        "A7": True,
    }
    assert len({tuple(area.get_facecolor()[0]) for area in axes.collections}) == 21


def test_trivial_strategies_are_drawn_behind_the_methods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    drawn: list[Any] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, file, **rest: drawn.append(figure))
    values = dict.fromkeys(("FedAvg", "uniform rebalancing", "buy and hold"), np.linspace(1, 2, 11))
    draw_values(tmp_path / "v.png", values, [str(day) for day in range(10)])
    for axes in drawn[0].axes:
        method, *others = axes.lines
        assert all(line.get_zorder() < method.get_zorder() for line in others)
        assert all(line.get_linewidth() < method.get_linewidth() for line in others)


def test_a_recorded_run_of_desks_has_the_portfolio_table(tmp_path: Path) -> None:
    fed = Federation(NET, desks(), algorithms.FedAvg(), solver=TRADER)
    with Run.start(tmp_path / "run", fed) as run:
        for _ in run.rounds(2, 1):
            pass
        evaluate_run(run)
    rows = {row["method"]: row for row in portfolio_table(study_from_run(tmp_path / "run")).rows}
    expected = portfolio_table(
        compare([algorithms.FedAvg()], NET, desks(), rounds=2, solver=TRADER, progress=False)
    ).rows
    assert list(rows) == [row["method"] for row in expected]
    for row in expected:
        assert rows[row["method"]]["annual return"] == pytest.approx(row["annual return"], abs=1e-5)
    assert "buy and hold" in write_report(study_from_run(tmp_path / "run"), tmp_path / "run").read_text()


def test_parties_without_desks_have_no_portfolio_plot(tmp_path: Path) -> None:
    fed = Federation(partial(models.mlp, 64, 10, (8,)), parties.digits(count=2), algorithms.FedAvg()).fit(
        1, progress=False
    )
    assert backtest_federation(fed) is None
    with pytest.raises(SettingError, match="the parties are not desks"):
        fed.plot("portfolio", tmp_path / "p.png")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"assets": 9}, "Only 6 assets have prices for the whole period, fewer than 9"),
        ({"universe": 2}, "cannot draw 3 assets out of 2"),
        ({"test": ("2031", "2031")}, "2031"),
        ({"test": ("2005", "2005")}, "2005"),
        ({"train": None}, "first and a last day"),
        ({"test": ("2007", "2008")}, "must end before"),
        ({"test": "2008"}, "first and a last day"),
        ({"augment": ("garch",)}, "garch"),
        ({"augment": ()}, "none is given"),
        ({"cost": -0.1}, "cost"),
        ({"window": 400}, "too few for a window of 400"),
        ({"missing": "ignore"}, "missing"),
        ({"holdings": {"north": ["A01"]}}, "Give desks 'holdings', or settings to draw them .*'assets'.*, not both"),
    ],
)
def test_invalid_settings_of_desks_are_rejected(changed: dict[str, Any], message: str) -> None:
    with pytest.raises((PartyError, SettingError), match=message):
        desks(**changed)


def test_models_and_parties_that_do_not_fit_are_rejected_before_training() -> None:
    def start(net: Any, population: Any = None, solver: Any = TRADER) -> Federation:
        fed = Federation(net, population or desks(), algorithms.FedAvg(), solver=solver)
        fed.state  # noqa: B018
        return fed

    with pytest.raises(ModelError, match=r"needs outputs \[8, 4\]"):
        start(nn.Sequential(nn.Flatten(), nn.Linear(18, 3)))
    with pytest.raises(ModelError, match="fails on days of 3 assets"):
        start(partial(models.eiie, "cnn", window=9))
    with pytest.raises(PartyError, match="Trader trains desks"):
        start(NET, parties.digits(count=2))
    with pytest.raises(PartyError, match="portfolio desk and has prices"):
        start(NET, solver=Sgd())
    with pytest.raises(PartyError, match="too few for batches"):
        start(NET, solver=Trader(batch=2000))
    with pytest.raises(PartyError, match=r"no file .*nowhere.csv"):
        parties.desks("nowhere.csv")
    for market in ("sp50", None, 7):
        with pytest.raises(SettingError, match=f"must be 'sp500', 'generated', .* file .* Got {market!r}"):
            parties.desks(market)  # type: ignore[arg-type]


def test_an_asset_that_begins_in_the_test_leaves_no_training_day() -> None:
    prices = MARKET.prices.copy()
    prices[MARKET.dates < np.datetime64("2008-01-20"), 2] = np.nan
    with pytest.raises(PartyError, match=r"No training day is left: without .* when A03 begins\. Set missing = 'exc"):
        parties.desks(Market.create(MARKET.dates, MARKET.names, prices), missing="later", **GIVEN)


@pytest.fixture
def wild(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GBM augmenter draws infinite prices."""
    from descant.portfolio.price_augmentation import GeometricBrownianMotion

    def draw(self: Any, fitted: Any, prices: Any, days: int, rng: Any) -> Any:
        return np.full((days, prices.shape[1]), np.inf)

    monkeypatch.setattr(GeometricBrownianMotion, "draw", draw)


def test_a_diverging_augmenter_leaves_its_desk_on_real_prices(wild: None) -> None:
    population = desks(augment=("gbm", "vom", "vom"))
    fed = Federation(NET, population, algorithms.FedAvg(), solver=TRADER)
    asset = population["0"].assets[0]  # type: ignore[attr-defined]
    with pytest.warns(DescantWarning, match=rf"Party '0' trains on real prices alone for now: gbm fails \({asset} has"):
        fed.fit(1, progress=False)
    assert not fed.rejections_ and torch.isfinite(fed.state.global_model).all()
    plain = Federation(NET, desks(augment=("none", "vom", "vom")), algorithms.FedAvg(), solver=TRADER).fit(
        1, progress=False
    )
    torch.testing.assert_close(fed.state.global_model, plain.state.global_model)
    assert not plain.findings()


REAL_ONLY = "Trained on real prices alone: 0, 2 (the synthetic prices were unusable)"


@pytest.mark.filterwarnings("ignore:Party .* trains on real prices alone:descant.DescantWarning")
def test_a_failing_augmenter_is_reported_in_the_results(wild: None, tmp_path: Path) -> None:
    study = compare([algorithms.FedAvg()], NET, desks(), rounds=2, solver=TRADER, progress=False, seeds=2)
    finding = f"{REAL_ONLY}, in 2 of 2 rounds."
    assert study.findings().count(finding) == 1
    study.save(tmp_path / "study")
    assert all(finding in (tmp_path / "study" / file).read_text() for file in ("report.html", "study.json"))
    with Run.start(tmp_path / "run", Federation(NET, desks(), algorithms.FedAvg(), solver=TRADER)) as run:
        for _ in run.rounds(2, 1):
            pass
        evaluate_run(run)
    assert (tmp_path / "run" / "events.jsonl").read_text().count(REAL_ONLY) == 3  # one per round, and one for the run
    assert [text for text in study_from_run(tmp_path / "run").findings() if REAL_ONLY in text] == [finding]


def test_an_augmenter_that_cannot_be_fitted_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    from descant.portfolio.price_augmentation import VariableOrderMarkov

    def fit(self: Any, prices: Any, rng: Any) -> Any:
        raise np.linalg.LinAlgError("Singular matrix")

    monkeypatch.setattr(VariableOrderMarkov, "fit", fit)
    fed = Federation(NET, desks(), algorithms.FedAvg(), solver=TRADER)
    with pytest.warns(DescantWarning, match=r"Party '1' trains on real prices alone: vom fails \(LinAlgError"):
        fed.fit(2, progress=False)
    assert fed.findings() == ("Trained on real prices alone: 1 (no generator could be fitted), in 2 of 2 rounds.",)


def test_a_policy_of_nan_keeps_its_cash() -> None:
    """A NaN model does not trade and scores like its initial cash."""
    fed = Federation(NET, desks(), algorithms.FedAvg(), solver=TRADER)
    with torch.no_grad():
        fed.state.global_model.fill_(float("nan"))
    assert np.all(fed.scores().global_model.values == 0)


def test_assets_that_begin_late_are_in_the_note() -> None:
    prices = MARKET.prices.copy()
    prices[:30, 2] = np.nan
    population = parties.desks(Market.create(MARKET.dates, MARKET.names, prices), count=2, **GIVEN)
    assert MARKET.names[2] in population.note
    later = parties.desks(Market.create(MARKET.dates, MARKET.names, prices), count=2, missing="later", **GIVEN)
    assert len(later["0"].prices) == len(population["0"].prices) - 30  # type: ignore[attr-defined]


def test_missing_days_and_large_moves_are_in_the_note() -> None:
    def note(prices: Any = MARKET.prices, kept: Any = slice(None), **rest: Any) -> str:
        market = Market.create(MARKET.dates[kept], MARKET.names, prices[kept])
        return parties.desks(market, **{**GIVEN, "assets": 6, "count": 1, **rest}).note

    assert not note() and not note(train=("2006-01-01", "2007-12-31"))
    assert not note(kept=np.arange(len(MARKET.dates)) % 6 != 0)
    assert note(train=("2004", "2007")) == "trained on 2006-01-02 to 2007-12-31 only"
    assert note(test=("2008-07", "2009")) == "tested on 2008-07-01 to 2008-12-31 only"
    days = (MARKET.dates < np.datetime64("2007-03-01")) | (MARKET.dates > np.datetime64("2007-03-13"))
    assert note(kept=days) == "no prices between 2007-02-28 and 2007-03-14"
    split = MARKET.prices.copy()
    split[MARKET.dates >= np.datetime64("2006-05-03"), 3] /= 7
    assert note(split).startswith("A04 moves by × 0.14") and note(split).endswith(" on 2006-05-03 (a split?)")
    split[MARKET.dates >= np.datetime64("2007-05-03"), 1] *= 4
    assert note(split).endswith("(a split?), and 1 more")
    given = {name: value for name, value in GIVEN.items() if name != "assets"}
    whole = Market.create(MARKET.dates, MARKET.names, split)
    assert not parties.desks(
        whole, holdings={"north": ["A01", "A03"]}, **given
    ).note  # no desk trades the assets with large moves


def test_universes_with_fewer_common_assets_are_farther_apart() -> None:
    fed = Federation(NET, desks(6), algorithms.FedAvg(), solver=TRADER)
    universes = compare_universes(fed, day_step=2)
    shared = np.array(
        [[len({*a.assets} & {*b.assets}) for b in fed.population.values()] for a in fed.population.values()]
    )  # type: ignore[attr-defined]
    far, near = (universes.distances[shared == n] for n in (shared.min(), shared[shared < 3].max()))
    assert far.mean() > near.mean() > 0 and np.array_equal(universes.distances, universes.distances.T)
    assert [row["desk"] for row in universes.table().rows] == list("012345")
    assert f"{universes.mean_distance:.1f}" in str(universes.table())
