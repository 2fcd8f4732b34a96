"""Portfolio desks: their assets and prices, what comes of a study of them, and what can go wrong."""

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
from descant.analysis import asset_universes, desk_results
from descant.analysis.desk_results import BacktestResults, backtest_paths
from descant.config import read_recipe
from descant.core.metrics import SHARPE_RATIO
from descant.errors import DescantWarning, ModelError, PartyError, SettingError
from descant.portfolio import Market, buy_and_hold, generate_market, performance_measures, uniform_rebalancing
from descant.reporting.portfolio_plots import draw_values, draw_weights
from descant.studies.portfolio_tables import portfolio_table
from descant.studies.recorded_run import evaluate_run, study_from_run, write_report
from descant.studies.result import StudyResult
from descant.studies.study_report import available_plots, study_page
from descant.tracking import Run

MARKET = generate_market(assets=6, years=3, seed=2)
GIVEN: dict[str, Any] = {"train": ("2006", "2007"), "test": ("2008", "2008-02"), "assets": 3, "window": 5}
TRADER = Trader(lr=1e-3, iterations=3, batch=6, synthetic_days=15)
NET = partial(models.eiie, "cnn", window=5)


def desks(count: int = 3, **rest: Any) -> parties.Population:
    return parties.desks(MARKET, count=count, **{**GIVEN, "augment": ("gbm", "vom"), **rest})


def test_desks_draw_their_own_assets_and_keep_them_whoever_stands_beside() -> None:
    few = desks(2, seed=4)
    many = desks(20, seed=4)
    assert few["1"].assets == many["1"].assets and len({desk.assets for desk in many.values()}) > 10  # type: ignore[attr-defined]
    assert {desk.augment for desk in many.values()} == {"gbm", "vom"}  # type: ignore[attr-defined]
    narrow = desks(30, universe=4)
    assert len({asset for desk in narrow.values() for asset in desk.assets}) == 4  # type: ignore[attr-defined]


HELD = {"north": ["A02", "A01"], "south": ["A02", "A06"]}


def test_desks_hold_what_they_are_said_to_hold() -> None:
    given = {name: value for name, value in GIVEN.items() if name != "assets"}
    people = parties.desks(MARKET, holdings=HELD, augment="none", **given)
    found: dict[str, Any] = dict(people.items())
    assert {name: list(desk.assets) for name, desk in found.items()} == HELD
    days = np.isin(MARKET.dates, found["north"].dates)
    np.testing.assert_array_equal(found["north"].test[5:], MARKET.prices[days][:, [1, 0]])
    text = (
        "[parties]\npopulation = 'desks'\nmarket = 'generated'\n[parties.holdings]\nnorth = ['A02']\nsouth = ['A01']\n"
    )
    made: Any = read_recipe(read_recipe(text).text).population()()  # type: ignore[operator]
    assert [made[name].assets for name in made] == [("A02",), ("A01",)]
    fed = Federation(NET, people, algorithms.FedAvg(), solver=TRADER).fit(1, progress=False)
    assert fed.population.names == ("north", "south") and "north" in str(fed.table())


def test_the_recipe_of_the_page_on_desks_runs(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "portfolio.md").read_text(encoding="utf-8")
    names = page.partition("\ndate,")[2].split("\n")[0]
    made = generate_market(assets=6)
    rows = [f"{day},{','.join(map(str, row))}\n" for day, row in zip(made.dates, made.prices.tolist(), strict=True)]
    (tmp_path / "prices.csv").write_text(f"date,{names}\n{''.join(rows)}")
    (tmp_path / "desks.toml").write_text(page.partition("```toml\n")[2].partition("```")[0])
    fed = read_recipe(tmp_path / "desks.toml").with_values("work.iterations=2").federation().fit(1, progress=False)
    assert fed.population.names == ("north", "south", "west") and not fed.population.note


def test_late_assets_matter_where_they_are_held() -> None:
    prices = MARKET.prices.copy()
    prices[:30, 5] = np.nan  # A06
    late = Market.create(MARKET.dates, MARKET.names, prices)
    given = {name: value for name, value in GIVEN.items() if name != "assets"}
    with pytest.raises(PartyError, match=r"Desk 'south' holds A06, which begins after 2006-01-02: .*missing = 'later'"):
        parties.desks(late, holdings=HELD, **given)
    assert "when A06 begins" in parties.desks(late, holdings=HELD, missing="later", **given).note
    assert not parties.desks(late, holdings={"north": HELD["north"]}, missing="later", **given).note


@pytest.mark.parametrize(
    ("holdings", "told"),
    [
        ({}, "at least one party"),
        (["A01"], r"The 'holdings' of desks give each desk a list of assets, such as .* Got \['A01'\]"),
        ({"north": "A01"}, "give each desk a list of assets"),
        ({"north": []}, "give each desk a list of assets"),
        ({"north": ["A01", "A01"]}, "Desk 'north' holds A01 twice"),
        ({"north": ["a1", "A02"]}, "no asset 'a1' in the generated market: it has 6, near it A01"),
        ({"north": ["A01"], "south": ["A01", "A02"]}, "as many assets as the others.* Got 1 in 'north', 2 in 'south'"),
    ],
)
def test_what_cannot_be_held_is_told(holdings: Any, told: str) -> None:
    with pytest.raises((PartyError, SettingError), match=told):
        parties.desks(MARKET, holdings=holdings)


def test_a_test_begins_with_what_the_last_day_of_training_earns() -> None:
    desk: Any = desks()["0"]
    prices = MARKET.select(desk.assets)
    first = int(np.searchsorted(prices.dates, np.datetime64("2008-01-01")))
    assert desk.tests == len(desk.dates) == len(desk.relatives) and str(desk.dates[0]).startswith("2008-01")
    np.testing.assert_array_equal(desk.relatives[0], prices.prices[first] / prices.prices[first - 1])
    np.testing.assert_array_equal(desk.prices[-1], prices.prices[first - 1])
    assert "3 assets" in desks().describe()


def test_days_between_training_and_test_are_seen_but_not_learned_by() -> None:
    """The first day of a test is earned from the close before it, whatever the last day to learn by was."""
    near = desks()["0"]
    far = desks(train=("2006", "2006"))["0"]
    np.testing.assert_array_equal(near.test, far.test)  # type: ignore[attr-defined]
    assert len(far.prices) < 0.6 * len(near.prices)  # type: ignore[attr-defined]
    assert np.abs(np.log(far.relatives)).max() < 0.2  # type: ignore[attr-defined]


def test_other_seeds_draw_other_assets() -> None:
    one, other, again = ([desk.assets for desk in desks(6, seed=seed).values()] for seed in (1, 2, 1))  # type: ignore[attr-defined]
    assert one != other and one == again


def test_the_measures_of_made_up_paths() -> None:
    growth = np.array([[1.1, 0.5, 1.2], [1.0, 1.0, 1.0]])
    half = np.array([0.1, 0.3])
    made = BacktestResults(
        ("a", "b"),
        ("1", "2", "3"),
        growth,
        turnover=half,
        cash=half / 2,
        largest=half * 2,
        uniform=growth * 0.9,
        hold=growth,
    )
    found = made.measures()
    assert found["drawdown"].tolist() == [0.5, 0.0] and found["turnover"].tolist() == [0.1, 0.3]
    assert found["cash"].tolist() == [0.05, 0.15] and found["largest"].tolist() == [0.2, 0.6]
    np.testing.assert_allclose(made.mean_values(), [1, 1.05, 0.775, 0.83])
    again = BacktestResults.from_json(made.to_json())
    for name in ("growth", "cash", "uniform", "hold"):
        np.testing.assert_allclose(getattr(again, name), getattr(made, name), atol=1e-6)


def test_shares_and_turnover_are_those_of_the_walk() -> None:
    fed = Federation(NET, desks(), algorithms.Local(), solver=TRADER).fit(1, progress=False)
    found = desk_results(fed)
    path = backtest_paths(fed, fed.population.names)
    assert found is not None
    np.testing.assert_allclose(found.cash, path.weights[..., 0].mean(1))
    np.testing.assert_allclose(found.largest, path.weights[..., 1:].max(2).mean(1))
    np.testing.assert_allclose(found.turnover, path.turnover.mean(1))
    fee = [uniform_rebalancing(desk.relatives, 0.002).growth for desk in fed.population.values()]  # type: ignore[attr-defined]
    np.testing.assert_allclose(fed.scores().majority.values, performance_measures.annual_return(np.array(fee)))


def test_a_study_of_desks_shows_what_needs_no_skill_and_every_measure(tmp_path: Path) -> None:
    study = compare([algorithms.FedAvg()], NET, desks(), rounds=2, solver=TRADER, progress=False, seeds=2)
    assert [row["method"] for row in study.table().rows] == ["uniform rebalancing", "Local", "FedAvg"]
    again = Study.load(study.save(tmp_path / "study"))
    rows = {row["method"]: row for row in portfolio_table(again).rows}
    assert list(rows) == ["uniform rebalancing", "buy and hold", "Local", "FedAvg"]
    walks = {
        kind: [made(desk.relatives, 0.002) for desk in desks().values()]  # type: ignore[attr-defined]
        for kind, made in (("uniform rebalancing", uniform_rebalancing), ("buy and hold", buy_and_hold))
    }
    for kind, each in walks.items():
        growth = np.stack([walk.growth for walk in each])
        assert rows[kind]["annual return"] == pytest.approx(performance_measures.annual_return(growth).mean(), abs=1e-5)
        assert rows[kind]["Sharpe ratio"] == pytest.approx(performance_measures.sharpe_ratio(growth).mean(), abs=1e-3)
        assert rows[kind]["turnover"] == pytest.approx(np.mean([walk.turnover for walk in each]), abs=1e-5)
        largest = np.mean([walk.weights[:, 1:].max(1) for walk in each])
        assert rows[kind]["largest"] == pytest.approx(largest, abs=1e-5) and rows[kind]["cash"] == 0
    days = len(desks()["0"].dates)  # type: ignore[attr-defined]
    assert rows["buy and hold"]["turnover"] == pytest.approx(1 / days, abs=1e-5)  # of the first day alone
    means = [f"{kind} {rows[kind]['annual return']:.3f}" for kind in walks]
    assert again.verdict().endswith(f"Without learning: {', '.join(means)}.")
    assert rows["FedAvg"]["annual return"] == pytest.approx(study.table().rows[2]["mean"], abs=1e-5)
    page = (tmp_path / "study" / "report.html").read_text()
    assert "buy and hold" in page and "What the desks earned" in page and "agent" not in page
    assert all((tmp_path / "study" / f"{kind}.png").stat().st_size > 10_000 for kind in ("portfolio", "weights"))


def test_a_study_from_before_shares_were_kept_has_none_of_what_needs_no_skill(tmp_path: Path) -> None:
    study = compare([algorithms.FedAvg()], NET, desks(), rounds=1, solver=TRADER, progress=False)
    found = study.results[0].to_json()
    for name in ("uniform_shares", "hold_shares", "assets", "held"):
        del found["backtest"][name]
    old = replace(study, results=(StudyResult.from_json(found), study.results[1]))
    assert "portfolio" in available_plots(old) and "weights" not in available_plots(old)
    assert [row.get("cash") is None for row in portfolio_table(old).rows] == [True, True, False, False]
    assert "–" in str(portfolio_table(old))


def test_a_desk_that_stands_still_is_left_out_of_the_sharpe_ratio() -> None:
    study = compare([algorithms.FedAvg()], NET, desks(), rounds=1, solver=TRADER, progress=False)
    made = study.of("FedAvg")[0]
    assert made.backtest is not None
    growth = made.backtest.growth.copy()
    growth[1] = 1
    still = replace(study, results=(study.results[0], replace(made, traded=replace(made.backtest, growth=growth))))
    row = portfolio_table(still).rows[-1]
    assert row["Sharpe ratio"] == pytest.approx(performance_measures.sharpe_ratio(growth[[0, 2]]).mean())
    assert row["annual return"] == pytest.approx(performance_measures.annual_return(growth).mean())
    (note,) = portfolio_table(still).notes
    assert note == "FedAvg: 1 of 3 back-tests stood still and has no Sharpe ratio; the mean is over the others."
    assert note in study_page(still, {})


def test_a_federation_of_desks_draws_values_and_weights(tmp_path: Path) -> None:
    fed = Federation(NET, desks(), algorithms.FedAvgPlus(), solver=TRADER).fit(2, progress=False)
    for kind in ("portfolio", "weights", "rewards", "universes"):
        assert fed.plot(kind, tmp_path / f"{kind}.png").stat().st_size > 10_000
    found = desk_results(fed)
    assert found is not None and not found.uniform.size  # it merges: what needs no skill stands beside Local
    scores = fed.scores()
    np.testing.assert_allclose(performance_measures.annual_return(found.growth), scores.personal.values, rtol=1e-9)
    assert "uniform" in str(fed.table())
    sharpe = Federation(NET, desks(), algorithms.FedAvgPlus(), solver=TRADER, metric=SHARPE_RATIO).fit(
        2, progress=False
    )
    np.testing.assert_allclose(
        performance_measures.sharpe_ratio(found.growth), sharpe.scores().personal.values, rtol=1e-9
    )


def test_what_was_sold_has_a_name_and_twenty_assets_have_colours_of_their_own(
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


def test_what_needs_no_skill_is_drawn_behind_the_methods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    drawn: list[Any] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, file, **rest: drawn.append(figure))
    values = dict.fromkeys(("FedAvg", "uniform rebalancing", "buy and hold"), np.linspace(1, 2, 11))
    draw_values(tmp_path / "v.png", values, [str(day) for day in range(10)])
    for axes in drawn[0].axes:
        method, *others = axes.lines
        assert all(one.get_zorder() < method.get_zorder() for one in others)
        assert all(one.get_linewidth() < method.get_linewidth() for one in others)


def test_a_recorded_run_of_desks_has_their_ledger(tmp_path: Path) -> None:
    fed = Federation(NET, desks(), algorithms.FedAvg(), solver=TRADER)
    with Run.start(tmp_path / "run", fed) as run:
        for _ in run.rounds(2, 1):
            pass
        evaluate_run(run)
    rows = {row["method"]: row for row in portfolio_table(study_from_run(tmp_path / "run")).rows}
    beside = portfolio_table(compare([algorithms.FedAvg()], NET, desks(), rounds=2, solver=TRADER, progress=False)).rows
    assert list(rows) == [row["method"] for row in beside]
    for row in beside:
        assert rows[row["method"]]["annual return"] == pytest.approx(row["annual return"], abs=1e-5)
    assert "buy and hold" in write_report(study_from_run(tmp_path / "run"), tmp_path / "run").read_text()


def test_others_have_no_portfolio_to_draw(tmp_path: Path) -> None:
    fed = Federation(partial(models.mlp, 64, 10, (8,)), parties.digits(count=2), algorithms.FedAvg()).fit(
        1, progress=False
    )
    assert desk_results(fed) is None
    with pytest.raises(SettingError, match="no desks"):
        fed.plot("portfolio", tmp_path / "p.png")


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"assets": 9}, "6 assets with prices in all of that time, fewer than 9"),
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
        ({"holdings": {"north": ["A01"]}}, "Give desks 'holdings', or how they are drawn .*'assets'.*, not both"),
    ],
)
def test_what_cannot_be_a_desk_is_told(changed: dict[str, Any], told: str) -> None:
    with pytest.raises((PartyError, SettingError), match=told):
        desks(**changed)


def test_what_cannot_trade_is_told_before_the_work() -> None:
    def made(net: Any, people: Any = None, solver: Any = TRADER) -> Federation:
        fed = Federation(net, people or desks(), algorithms.FedAvg(), solver=solver)
        fed.state  # noqa: B018
        return fed

    with pytest.raises(ModelError, match=r"needs outputs \[8, 4\]"):
        made(nn.Sequential(nn.Flatten(), nn.Linear(18, 3)))
    with pytest.raises(ModelError, match="fails on days of 3 assets"):
        made(partial(models.eiie, "cnn", window=9))
    with pytest.raises(PartyError, match="Trader trains desks"):
        made(NET, parties.digits(count=2))
    with pytest.raises(PartyError, match="portfolio desk and has prices"):
        made(NET, solver=Sgd())
    with pytest.raises(PartyError, match="too few for batches"):
        made(NET, solver=Trader(batch=2000))
    with pytest.raises(PartyError, match=r"no file .*nowhere.csv"):
        parties.desks("nowhere.csv")
    for market in ("sp50", None, 7):
        with pytest.raises(SettingError, match=f"must be 'sp500', 'generated', .* file .* Got {market!r}"):
            parties.desks(market)  # type: ignore[arg-type]


def test_an_asset_that_begins_in_the_test_leaves_no_day_to_learn_by() -> None:
    prices = MARKET.prices.copy()
    prices[MARKET.dates < np.datetime64("2008-01-20"), 2] = np.nan
    with pytest.raises(
        PartyError, match=r"No day to learn by is left: without .* when A03 begins\. Set missing = 'exc"
    ):
        parties.desks(Market.create(MARKET.dates, MARKET.names, prices), missing="later", **GIVEN)


@pytest.fixture
def wild(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gbm makes up prices that are none."""
    from descant.portfolio.price_augmentation import GeometricBrownianMotion

    def draw(self: Any, fitted: Any, prices: Any, days: int, rng: Any) -> Any:
        return np.full((days, prices.shape[1]), np.inf)

    monkeypatch.setattr(GeometricBrownianMotion, "draw", draw)


def test_a_generator_that_blows_up_leaves_its_desk_on_real_prices(wild: None) -> None:
    people = desks(augment=("gbm", "vom", "vom"))
    fed = Federation(NET, people, algorithms.FedAvg(), solver=TRADER)
    asset = people["0"].assets[0]  # type: ignore[attr-defined]
    with pytest.warns(DescantWarning, match=rf"Party '0' trains on real prices alone for now: gbm fails \({asset} has"):
        fed.fit(1, progress=False)
    assert not fed.rejections_ and torch.isfinite(fed.state.global_model).all()
    plain = Federation(NET, desks(augment=("none", "vom", "vom")), algorithms.FedAvg(), solver=TRADER).fit(
        1, progress=False
    )
    torch.testing.assert_close(fed.state.global_model, plain.state.global_model)
    assert not plain.findings()


BARE = "Trained on real prices alone: 0, 2 (what was made up was of no use)"


@pytest.mark.filterwarnings("ignore:Party .* trains on real prices alone:descant.DescantWarning")
def test_a_generator_that_fails_is_told_of_in_the_results(wild: None, tmp_path: Path) -> None:
    study = compare([algorithms.FedAvg()], NET, desks(), rounds=2, solver=TRADER, progress=False, seeds=2)
    told = f"{BARE}, in 2 of 2 rounds."
    assert study.findings().count(told) == 1
    study.save(tmp_path / "study")
    assert all(told in (tmp_path / "study" / file).read_text() for file in ("report.html", "study.json"))
    with Run.start(tmp_path / "run", Federation(NET, desks(), algorithms.FedAvg(), solver=TRADER)) as run:
        for _ in run.rounds(2, 1):
            pass
        evaluate_run(run)
    assert (tmp_path / "run" / "events.jsonl").read_text().count(BARE) == 3  # of each round, and of all
    assert [one for one in study_from_run(tmp_path / "run").findings() if BARE in one] == [told]


def test_a_generator_that_cannot_be_fitted_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    from descant.portfolio.price_augmentation import VariableOrderMarkov

    def fit(self: Any, prices: Any, rng: Any) -> Any:
        raise np.linalg.LinAlgError("Singular matrix")

    monkeypatch.setattr(VariableOrderMarkov, "fit", fit)
    fed = Federation(NET, desks(), algorithms.FedAvg(), solver=TRADER)
    with pytest.warns(DescantWarning, match=r"Party '1' trains on real prices alone: vom fails \(LinAlgError"):
        fed.fit(2, progress=False)
    assert fed.findings() == ("Trained on real prices alone: 1 (no generator could be fitted), in 2 of 2 rounds.",)


def test_a_policy_that_is_not_a_number_holds_what_it_has() -> None:
    """A model that was ruined trades no more, and is judged as the cash that it began with."""
    fed = Federation(NET, desks(), algorithms.FedAvg(), solver=TRADER)
    with torch.no_grad():
        fed.state.global_model.fill_(float("nan"))
    assert np.all(fed.scores().global_model.values == 0)


def test_late_starters_are_told_of() -> None:
    prices = MARKET.prices.copy()
    prices[:30, 2] = np.nan
    people = parties.desks(Market.create(MARKET.dates, MARKET.names, prices), count=2, **GIVEN)
    assert MARKET.names[2] in people.note
    later = parties.desks(Market.create(MARKET.dates, MARKET.names, prices), count=2, missing="later", **GIVEN)
    assert len(later["0"].prices) == len(people["0"].prices) - 30  # type: ignore[attr-defined]


def test_days_and_moves_that_are_odd_are_told_of_in_few_words() -> None:
    def note(prices: Any = MARKET.prices, kept: Any = slice(None), **rest: Any) -> str:
        market = Market.create(MARKET.dates[kept], MARKET.names, prices[kept])
        return parties.desks(market, **{**GIVEN, "assets": 6, "count": 1, **rest}).note

    assert not note() and not note(train=("2006-01-01", "2007-12-31"))
    assert not note(kept=np.arange(len(MARKET.dates)) % 6 != 0)
    assert note(train=("2004", "2007")) == "learned by 2006-01-02 to 2007-12-31 only"
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
    assert not parties.desks(whole, holdings={"north": ["A01", "A03"]}, **given).note  # nobody trades those


def test_universes_are_the_further_apart_the_fewer_assets_they_share() -> None:
    fed = Federation(NET, desks(6), algorithms.FedAvg(), solver=TRADER)
    found = asset_universes(fed, every=2)
    shared = np.array(
        [[len({*a.assets} & {*b.assets}) for b in fed.population.values()] for a in fed.population.values()]
    )  # type: ignore[attr-defined]
    far, near = (found.distances[shared == n] for n in (shared.min(), shared[shared < 3].max()))
    assert far.mean() > near.mean() > 0 and np.array_equal(found.distances, found.distances.T)
    assert [row["desk"] for row in found.table().rows] == list("012345") and f"{found.mean:.1f}" in str(found.table())
