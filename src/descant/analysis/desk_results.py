"""What desks' own models made of their tests, day by day: the papers' portfolio values (v2 fig. 3a, v1 fig. 11)."""

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

BATCH_SIZE = 50  # models that are walked at once
DECIMALS = 7  # decimals of a day's growth that are kept
MEASURES = ("annual return", "Sharpe ratio", "drawdown", "turnover", "cash", "largest")


def _empty_matrix() -> Numbers:
    return np.empty((0, 0))


@dataclass(frozen=True, eq=False)
class BacktestResults:
    """The days of a test, a row a desk; what needs no skill stands beside, where nobody merges."""

    names: tuple[str, ...]
    dates: tuple[str, ...]
    growth: Numbers  # [desks, days] the value of a day over that of the day before, fees paid
    turnover: Numbers  # [desks] what was bought and sold on a day, as a share of the value; the mean over days
    cash: Numbers  # [desks] the share in cash
    largest: Numbers  # [desks] the largest share of an asset
    uniform: Numbers = field(default_factory=_empty_matrix)  # [desks, days] growth by uniform rebalancing
    hold: Numbers = field(default_factory=_empty_matrix)  # [desks, days] growth of what is bought once and kept
    uniform_shares: Numbers = field(
        default_factory=_empty_matrix
    )  # [3, desks] its turnover, cash and largest, as above
    hold_shares: Numbers = field(default_factory=_empty_matrix)
    assets: tuple[str, ...] = ()  # of the first desk
    held: Numbers = field(default_factory=_empty_matrix)  # [days, 1 + assets] what the first desk holds, cash first

    def mean_values(self, strategy: str = "growth") -> Numbers:
        """The mean value of the desks, 1 before the first day, ``[days + 1]``."""
        found: Numbers = performance_measures.portfolio_values(getattr(self, strategy)).mean(0)
        return found

    def measures(self, strategy: str = "growth") -> dict[str, Numbers]:
        """The :data:`MEASURES` of every desk; an older study has no shares of what needs no skill."""
        policy = {"growth": np.stack([self.turnover, self.cash, self.largest])}
        shares = {**policy, "uniform": self.uniform_shares, "hold": self.hold_shares}[strategy]
        return {**growth_measures(getattr(self, strategy)), **dict(zip(MEASURES[3:], shares, strict=False))}

    def to_json(self) -> dict[str, Any]:
        arrays = {name: np.round(value, DECIMALS).tolist() for name, value in vars(self).items() if name in _ARRAYS}
        texts = {name: list(getattr(self, name)) for name in ("names", "dates", "assets")}
        return {**texts, **arrays}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> BacktestResults:
        arrays = {name: np.array(found[name], dtype=float) for name in _ARRAYS if name in found}
        return cls(tuple(found["names"]), tuple(found["dates"]), assets=tuple(found.get("assets", ())), **arrays)


_ARRAYS = ("growth", "turnover", "cash", "largest", "uniform", "hold", "uniform_shares", "hold_shares", "held")


def growth_measures(growth: Numbers) -> dict[str, Numbers]:
    """Annual return, Sharpe ratio and largest drawdown by desk."""
    return {
        "annual return": performance_measures.annual_return(growth),
        "Sharpe ratio": performance_measures.sharpe_ratio(growth),
        "drawdown": performance_measures.max_drawdown(growth),
    }


def backtest_paths(federation: Federation, names: Sequence[str]) -> BacktestResult:
    """What the own models of some desks do in their tests, ``[desks, days, ...]``."""
    plan = federation.plan_
    found = list[BacktestResult]()
    for first in range(0, len(names), BATCH_SIZE):
        batch = names[first : first + BATCH_SIZE]
        rows = [fetch_personal_model(plan, federation.engine_, federation.state, party=name) for name in batch]
        found.append(backtest_models(plan.net, [plan.population[name] for name in batch], rows))  # type: ignore[misc]
    return BacktestResult(
        *(np.concatenate([getattr(one, part) for one in found]) for part in ("growth", "weights", "turnover"))
    )


def desks_of(federation: Federation) -> list[Desk]:
    """The parties, if they are desks."""
    population = federation.population
    if not are_desks(population):
        raise SettingError("There are no portfolios: the parties are no desks (see parties.desks).")
    return [population[name] for name in population]  # type: ignore[misc]


def are_desks(population: Population) -> bool:
    """Whether the parties are desks."""
    return isinstance(population[population.names[0]], Desk)


def backtest_federation(federation: Federation) -> BacktestResults | None:
    """What every desk's own model made of its test; None where parties are no desks."""
    if not are_desks(federation.population):
        return None
    desks = desks_of(federation)
    names = federation.population.names
    found = backtest_paths(federation, names)
    baselines: dict[str, Any] = {}
    if federation.algorithm.server_update is keep_global_model:
        terms = backtest_inputs(desks)
        uniform_path = uniform_rebalancing(*terms)
        hold_path = buy_and_hold(*terms)
        baselines = {"uniform": uniform_path.growth, "hold": hold_path.growth}
        baselines |= {"uniform_shares": _shares(uniform_path), "hold_shares": _shares(hold_path)}
    dates = tuple(str(day) for day in desks[0].test_dates)
    turnover, cash, largest = _shares(found)
    made = BacktestResults(
        names,
        dates,
        found.growth,
        turnover=turnover,
        cash=cash,
        largest=largest,
        assets=desks[0].assets,
        held=found.weights[0],
    )
    return replace(made, **baselines)


def _shares(path: BacktestResult) -> Numbers:
    """Turnover, cash and largest asset by desk, a mean over days, ``[3, desks]``."""
    cash = path.weights[..., 0]
    assets = path.weights[..., 1:]
    return np.stack([path.turnover.mean(1), cash.mean(1), assets.max(2).mean(1)])
