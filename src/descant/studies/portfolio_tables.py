"""Back-tests of portfolio desks in a study: a table and pictures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..analysis.desk_results import MEASURES, BacktestResults, growth_measures
from ..reporting.figure import Numbers
from ..reporting.portfolio_plots import HOLD, MAX_PANELS, UNIFORM, draw_values, draw_weights
from ..reporting.table import Table
from .training_result import LOCAL, nanmean

if TYPE_CHECKING:
    from .study import Study

LEGEND = (
    "Annual return, annual Sharpe ratio and largest drawdown are of the value after fees, means over the desks. "
    "Turnover is the share traded per day; cash and largest are shares held; both are means over days. Uniform "
    "rebalancing holds the same share of every asset; buy and hold buys them once. A policy below these two has earned "
    "nothing by skill. A desk whose value never varies has no Sharpe ratio and is left out of its mean."
)


def has_backtests(study: Study) -> bool:
    """Return True if the parties of the study are portfolio desks."""
    return all(result.backtest is not None for result in study.results)


def has_holdings(study: Study) -> bool:
    """Return True if the holdings of a desk are on record; older studies lack them."""
    return all(result.backtest is not None and result.backtest.assets for result in study.results)


def portfolio_table(study: Study) -> Table:
    """Return one row per method, trivial strategies first; means over desks and seeds."""
    local_backtest = backtests_of(study, LOCAL)[0]
    rows = [
        {"method": name, **_means([local_backtest.measures(strategy)])}
        for name, strategy in ((UNIFORM, "uniform"), (HOLD, "hold"))
    ]
    notes = list[str]()
    for method in study.methods:
        measures = [one.measures() for one in backtests_of(study, method)]
        notes += missing_ratio_notes(method, np.array([one["Sharpe ratio"] for one in measures]))
        seeds = [float(np.mean(one["annual return"])) for one in measures]
        above = (
            np.mean([one["annual return"] for one in measures], 0)
            > growth_measures(local_backtest.uniform)["annual return"]
        )
        extra_columns = {
            "± seeds": float(np.std(seeds)) if len(seeds) > 1 else float("nan"),
            "above uniform": int(above.sum()),
        }
        rows.append({"method": method, **_means(measures), **extra_columns})
    columns = ("method", "annual return", "± seeds", *MEASURES[1:], "above uniform")
    return Table(columns, rows, decimals={"above uniform": 0, "Sharpe ratio": 2}, notes=tuple(notes))


def backtests_of(study: Study, method: str) -> list[BacktestResults]:
    return [result.backtest for result in study.of(method) if result.backtest is not None]


def _means(each: list[dict[str, Numbers]]) -> dict[str, float]:
    return {name: float(nanmean(np.concatenate([one[name] for one in each]))) for name in each[0]}


def missing_ratio_notes(method: str, ratios: Numbers) -> list[str]:
    constant_count = int(np.isnan(ratios).sum())
    if not constant_count:
        return []
    verb = "has" if constant_count == 1 else "have"
    constant = f"{constant_count} of {ratios.size} back-tests had a constant value"
    return [f"{method}: {constant} and {verb} no Sharpe ratio; the mean is over the others."]


def draw_holdings(study: Study, file: Path) -> Path:
    """Draw the first desk's holdings by day, one panel per method, with the first seed."""
    first_results = {method: backtests_of(study, method)[0] for method in study.methods[:MAX_PANELS]}
    held, assets = (
        {method: getattr(one, part) for method, one in first_results.items()} for part in ("held", "assets")
    )
    first = backtests_of(study, LOCAL)[0]
    return draw_weights(file, held, assets, dates=first.dates, title=f"Holdings of desk {first.names[0]} by day")


def draw_portfolio_values(study: Study, file: Path) -> Path:
    """Draw the mean value of the desks by day and its drawdown."""
    local_backtest = backtests_of(study, LOCAL)[0]
    values = {
        method: np.mean([one.mean_values() for one in backtests_of(study, method)], 0) for method in study.methods
    }
    baselines = {UNIFORM: local_backtest.mean_values("uniform"), HOLD: local_backtest.mean_values("hold")}
    return draw_values(file, {**values, **baselines}, local_backtest.dates)
