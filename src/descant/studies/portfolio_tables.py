"""What portfolio desks made of their tests: a table and a picture of a study."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..analysis.desk_results import MEASURES, Traded, measured
from ..reporting.figure import Numbers
from ..reporting.portfolio_plots import HOLD, MOST, UNIFORM, draw_values, draw_weights
from ..reporting.table import Table
from .result import LOCAL, mean_of_known

if TYPE_CHECKING:
    from .study import Study

LEGEND = (
    "Annual return, Sharpe ratio (of a year) and largest drawdown are of the value after fees, a mean over the desks; "
    "turnover is the share bought and sold on a day; cash and largest are shares held, a mean over days. Uniform "
    "rebalancing holds the same share of every asset, and buy and hold has bought it once: a policy that is below them "
    "has earned nothing by its skill. A desk whose value never varies has no Sharpe ratio, and is left out of its mean."
)


def is_traded(study: Study) -> bool:
    """Whether its parties are portfolio desks."""
    return all(result.traded is not None for result in study.results)


def is_held(study: Study) -> bool:
    """Whether it is known what a desk held; older studies have not kept it."""
    return all(result.traded is not None and result.traded.assets for result in study.results)


def ledger(study: Study) -> Table:
    """One row a method, and what needs no skill first; a mean over desks and seeds."""
    still = _of(study, LOCAL)[0]
    rows = [{"method": name, **_means([still.measured(of)])} for name, of in ((UNIFORM, "uniform"), (HOLD, "hold"))]
    notes = list[str]()
    for method in study.methods:
        each = [one.measured() for one in _of(study, method)]
        notes += _without_ratio(method, np.array([one["Sharpe ratio"] for one in each]))
        seeds = [float(np.mean(one["annual return"])) for one in each]
        above = np.mean([one["annual return"] for one in each], 0) > measured(still.uniform)["annual return"]
        more = {"± seeds": float(np.std(seeds)) if len(seeds) > 1 else float("nan"), "above uniform": int(above.sum())}
        rows.append({"method": method, **_means(each), **more})
    columns = ("method", "annual return", "± seeds", *MEASURES[1:], "above uniform")
    return Table(columns, rows, places={"above uniform": 0, "Sharpe ratio": 2}, notes=tuple(notes))


def _of(study: Study, method: str) -> list[Traded]:
    return [result.traded for result in study.of(method) if result.traded is not None]


def _means(each: list[dict[str, Numbers]]) -> dict[str, float]:
    return {name: float(mean_of_known(np.concatenate([one[name] for one in each]))) for name in each[0]}


def _without_ratio(method: str, ratios: Numbers) -> list[str]:
    still = int(np.isnan(ratios).sum())
    if not still:
        return []
    told = f"{method}: {still} of {ratios.size} back-tests stood still and {'has' if still == 1 else 'have'} no Sharpe"
    return [f"{told} ratio; the mean is over the others."]


def draw_held(study: Study, file: Path) -> Path:
    """What the first desk holds by day, by method, with the first seed."""
    some = {method: _of(study, method)[0] for method in study.methods[:MOST]}
    held, assets = ({method: getattr(one, part) for method, one in some.items()} for part in ("held", "assets"))
    first = _of(study, LOCAL)[0]
    return draw_weights(file, held, assets, first.dates, f"What desk {first.names[0]} holds, day by day")


def draw_ledger(study: Study, file: Path) -> Path:
    """The mean value of the desks by day, and below how far it stands under its peak."""
    still = _of(study, LOCAL)[0]
    values = {method: np.mean([one.values() for one in _of(study, method)], 0) for method in study.methods}
    beside = {UNIFORM: still.values("uniform"), HOLD: still.values("hold")}
    return draw_values(file, {**values, **beside}, still.dates)
