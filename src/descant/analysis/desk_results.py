"""What desks' own models made of their tests, day by day: the papers' portfolio values (v2 fig. 3a, v1 fig. 11)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..algorithms.components import stay
from ..errors import SettingError
from ..parties import Desk, People
from ..portfolio import Path, hold, performance_measures, uniform
from ..training.backtest_evaluation import terms_of, walked
from .scores import Numbers, personal_row

if TYPE_CHECKING:
    from ..federation import Federation

_AT_ONCE = 50  # models that are walked at once
_PLACES = 7  # decimals of a day's growth that are kept
MEASURES = ("annual return", "Sharpe ratio", "drawdown", "turnover", "cash", "largest")


def _none() -> Numbers:
    return np.empty((0, 0))


@dataclass(frozen=True, eq=False)
class Traded:
    """The days of a test, a row a desk; what needs no skill stands beside, where nobody merges."""

    names: tuple[str, ...]
    dates: tuple[str, ...]
    growth: Numbers  # [desks, days] the value of a day over that of the day before, fees paid
    turnover: Numbers  # [desks] what was bought and sold on a day, as a share of the value; the mean over days
    cash: Numbers  # [desks] the share in cash
    largest: Numbers  # [desks] the largest share of an asset
    uniform: Numbers = field(default_factory=_none)  # [desks, days] growth by uniform rebalancing
    hold: Numbers = field(default_factory=_none)  # [desks, days] growth of what is bought once and kept
    uniform_shares: Numbers = field(default_factory=_none)  # [3, desks] its turnover, cash and largest, as above
    hold_shares: Numbers = field(default_factory=_none)
    assets: tuple[str, ...] = ()  # of the first desk
    held: Numbers = field(default_factory=_none)  # [days, 1 + assets] what the first desk holds, cash first

    def values(self, of: str = "growth") -> Numbers:
        """The mean value of the desks, 1 before the first day, ``[days + 1]``."""
        found: Numbers = performance_measures.values(getattr(self, of)).mean(0)
        return found

    def measured(self, of: str = "growth") -> dict[str, Numbers]:
        """The :data:`MEASURES` of every desk; an older study has no shares of what needs no skill."""
        own = {"growth": np.stack([self.turnover, self.cash, self.largest])}
        shares = {**own, "uniform": self.uniform_shares, "hold": self.hold_shares}[of]
        return {**measured(getattr(self, of)), **dict(zip(MEASURES[3:], shares, strict=False))}

    def to_json(self) -> dict[str, Any]:
        arrays = {name: np.round(value, _PLACES).tolist() for name, value in vars(self).items() if name in _ARRAYS}
        texts = {name: list(getattr(self, name)) for name in ("names", "dates", "assets")}
        return {**texts, **arrays}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Traded:
        arrays = {name: np.array(found[name], dtype=float) for name in _ARRAYS if name in found}
        return cls(tuple(found["names"]), tuple(found["dates"]), assets=tuple(found.get("assets", ())), **arrays)


_ARRAYS = ("growth", "turnover", "cash", "largest", "uniform", "hold", "uniform_shares", "hold_shares", "held")


def measured(growth: Numbers) -> dict[str, Numbers]:
    """Annual return, Sharpe ratio and largest drawdown by desk."""
    return {
        "annual return": performance_measures.annual(growth),
        "Sharpe ratio": performance_measures.sharpe(growth),
        "drawdown": performance_measures.drawdown(growth),
    }


def paths(federation: Federation, names: Sequence[str]) -> Path:
    """What the own models of some desks do in their tests, ``[desks, days, ...]``."""
    plan, found = federation.plan_, list[Path]()
    for first in range(0, len(names), _AT_ONCE):
        some = names[first : first + _AT_ONCE]
        rows = [personal_row(plan, federation.engine_, federation.state, name) for name in some]
        found.append(walked(plan.net, [plan.people[name] for name in some], rows))  # type: ignore[misc]
    return Path(*(np.concatenate([getattr(one, part) for one in found]) for part in ("growth", "weights", "turnover")))


def desks_of(federation: Federation) -> list[Desk]:
    """The parties, if they are desks."""
    people = federation.people
    if not are_desks(people):
        raise SettingError("There are no portfolios: the parties are no desks (see parties.desks).")
    return [people[name] for name in people]  # type: ignore[misc]


def are_desks(people: People) -> bool:
    """Whether the parties are desks."""
    return isinstance(people[people.names[0]], Desk)


def traded(federation: Federation) -> Traded | None:
    """What every desk's own model made of its test; None where parties are no desks."""
    if not are_desks(federation.people):
        return None
    desks, names = desks_of(federation), federation.people.names
    found = paths(federation, names)
    beside: dict[str, Any] = {}
    if federation.algorithm.advance is stay:
        terms = terms_of(desks)
        even, kept = uniform(*terms), hold(*terms)
        beside = {"uniform": even.growth, "hold": kept.growth}
        beside |= {"uniform_shares": _shares(even), "hold_shares": _shares(kept)}
    dates = tuple(str(day) for day in desks[0].dates)
    turnover, cash, largest = _shares(found)
    made = Traded(names, dates, found.growth, turnover, cash, largest, assets=desks[0].assets, held=found.weights[0])
    return replace(made, **beside)


def _shares(path: Path) -> Numbers:
    """Turnover, cash and largest asset by desk, a mean over days, ``[3, desks]``."""
    cash, assets = path.weights[..., 0], path.weights[..., 1:]
    return np.stack([path.turnover.mean(1), cash.mean(1), assets.max(2).mean(1)])
