"""Back-tests of the desks' personal models, day by day: the papers' portfolio values (v2 fig. 3a, v1 fig. 11)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..algorithms.components import keep_global_model
from ..errors import SettingError
from ..parties import Desk, Population
from ..portfolio import BacktestResult, buy_and_hold, performance_measures, uniform_rebalancing
from ..training.backtest_evaluation import backtest_inputs, backtest_models
from .scores import Numbers, fetch_personal_model

if TYPE_CHECKING:
    from ..federation import Federation

BATCH_SIZE = 50  # models in one back-test
DECIMALS = 7  # stored decimals of a day's growth
MEASURES = ("annual return", "Sharpe ratio", "drawdown", "turnover", "cash", "largest")


def _empty_matrix() -> Numbers:
    return np.empty((0, 0))


@dataclass(frozen=True, eq=False)
class BacktestResults:
    """The test days of all desks, one row per desk."""

    names: tuple[str, ...]
    dates: tuple[str, ...]
    growth: Numbers  # [desks, days] value relative to the day before, after fees
    turnover: Numbers  # [desks] share of the value traded per day, mean over days
    cash: Numbers  # [desks] the share in cash
    largest: Numbers  # [desks] the largest share of an asset
    uniform: Numbers = field(default_factory=_empty_matrix)  # [desks, days] growth by uniform rebalancing
    hold: Numbers = field(default_factory=_empty_matrix)  # [desks, days] growth by buy and hold
    # [3, desks] turnover, cash and largest share of the trivial strategies, as above
    uniform_shares: Numbers = field(default_factory=_empty_matrix)
    hold_shares: Numbers = field(default_factory=_empty_matrix)
    assets: tuple[str, ...] = ()  # of the first desk
    held: Numbers = field(default_factory=_empty_matrix)  # [days, 1 + assets] holdings of the first desk, cash first

    def mean_values(self, strategy: str = "growth") -> Numbers:
        """Return the mean value of the desks, 1 before the first day, ``[days + 1]``."""
        mean: Numbers = performance_measures.portfolio_values(getattr(self, strategy)).mean(0)
        return mean

    def measures(self, strategy: str = "growth") -> dict[str, Numbers]:
        """Return the :data:`MEASURES` of every desk; older studies lack some of the trivial strategies."""
        policy = {"growth": np.stack([self.turnover, self.cash, self.largest])}
        shares = {**policy, "uniform": self.uniform_shares, "hold": self.hold_shares}[strategy]
        return {**growth_measures(getattr(self, strategy)), **dict(zip(MEASURES[3:], shares, strict=False))}

    def to_json(self) -> dict[str, Any]:
        arrays = {name: np.round(value, DECIMALS).tolist() for name, value in vars(self).items() if name in _ARRAYS}
        texts = {name: list(getattr(self, name)) for name in ("names", "dates", "assets")}
        return {**texts, **arrays}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> BacktestResults:
        arrays = {name: np.array(record[name], dtype=float) for name in _ARRAYS if name in record}
        return cls(tuple(record["names"]), tuple(record["dates"]), assets=tuple(record.get("assets", ())), **arrays)


_ARRAYS = ("growth", "turnover", "cash", "largest", "uniform", "hold", "uniform_shares", "hold_shares", "held")


def growth_measures(growth: Numbers) -> dict[str, Numbers]:
    """Return the annual return, Sharpe ratio and largest drawdown by desk."""
    return {
        "annual return": performance_measures.annual_return(growth),
        "Sharpe ratio": performance_measures.sharpe_ratio(growth),
        "drawdown": performance_measures.max_drawdown(growth),
    }


def backtest_paths(federation: Federation, names: Sequence[str]) -> BacktestResult:
    """Back-test the personal models of some desks, ``[desks, days, ...]``."""
    plan = federation.plan_
    batches = list[BacktestResult]()
    for first in range(0, len(names), BATCH_SIZE):
        batch = names[first : first + BATCH_SIZE]
        rows = [fetch_personal_model(plan, federation.engine_, federation.state, party=name) for name in batch]
        batches.append(backtest_models(plan.net, [plan.population[name] for name in batch], rows))  # type: ignore[misc]
    return BacktestResult(
        *(np.concatenate([getattr(one, part) for one in batches]) for part in ("growth", "weights", "turnover"))
    )


def desks_of(federation: Federation) -> list[Desk]:
    """Return the parties as desks; raise if they are not desks."""
    population = federation.population
    if not are_desks(population):
        raise SettingError("There are no portfolios: the parties are not desks (see parties.desks).")
    return [population[name] for name in population]  # type: ignore[misc]


def are_desks(population: Population) -> bool:
    """Return True if the parties are desks."""
    return isinstance(population[population.names[0]], Desk)


def backtest_federation(federation: Federation) -> BacktestResults | None:
    """Back-test every desk's personal model; None if the parties are not desks."""
    if not are_desks(federation.population):
        return None
    desks = desks_of(federation)
    names = federation.population.names
    paths = backtest_paths(federation, names)
    baselines: dict[str, Any] = {}
    if federation.algorithm.server_update is keep_global_model:
        terms = backtest_inputs(desks)
        uniform_path = uniform_rebalancing(*terms)
        hold_path = buy_and_hold(*terms)
        baselines = {"uniform": uniform_path.growth, "hold": hold_path.growth}
        baselines |= {"uniform_shares": _shares(uniform_path), "hold_shares": _shares(hold_path)}
    dates = tuple(str(day) for day in desks[0].test_dates)
    turnover, cash, largest = _shares(paths)
    results = BacktestResults(
        names,
        dates,
        paths.growth,
        turnover=turnover,
        cash=cash,
        largest=largest,
        assets=desks[0].assets,
        held=paths.weights[0],
    )
    return replace(results, **baselines)


def _shares(path: BacktestResult) -> Numbers:
    """Return turnover, cash and largest asset by desk, means over days, ``[3, desks]``."""
    cash = path.weights[..., 0]
    assets = path.weights[..., 1:]
    return np.stack([path.turnover.mean(1), cash.mean(1), assets.max(2).mean(1)])
