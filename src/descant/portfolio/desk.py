"""Parties that are portfolio desks: each has assets of its own to trade, and what it makes up of them stays with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..core.seeds import stream
from ..core.settings import check, setting, unknown
from ..errors import PartyError, SettingError
from ..parties.data_files import locate
from ..parties.population import People, check_names
from ..rl.agent import Bare
from . import Market, generated, read
from .market import period
from .price_augmentation import AUGMENTERS
from .price_warnings import remarks

Array = NDArray[Any]


@dataclass(frozen=True, eq=False, repr=False)
class Desk:
    """One desk: the prices that it learns by, those that it is tested by, and how it makes up more of them."""

    name: str
    assets: tuple[str, ...]
    prices: Array  # [days, assets] to learn by
    test: Array  # [window + days, assets] to be tested by: the first `window` are the days before
    dates: Array  # [days] of the test
    window: int
    cost: float
    augment: str
    known: dict[Any, Any] = field(default_factory=dict)  # what was reckoned once

    @property
    def samples(self) -> int:
        """None to begin with: it learns by days in a row, not by samples."""
        return 0

    @property
    def form(self) -> str:
        """What the desks of a federation have in common."""
        return f"{len(self.assets)} assets, a window of {self.window} days"

    @property
    def tests(self) -> int:
        """How many days it is tested on."""
        return len(self.dates)

    @property
    def relatives(self) -> Array:
        """What the prices of each day of the test are over those of the day before, ``[days, assets]``."""
        found: Array = self.test[self.window :] / self.test[self.window - 1 : -1]
        return found

    @property
    def data(self) -> tuple[Tensor, ...]:
        """What tells it from another desk."""
        said = ",".join([*self.assets, str(self.window), repr(self.cost), self.augment]).encode()
        words = torch.frombuffer(bytearray(said), dtype=torch.uint8)
        return torch.from_numpy(self.prices), torch.from_numpy(self.test), words

    @property
    def x(self) -> Tensor:
        raise PartyError(
            f"Party {self.name!r} is a portfolio desk and has prices, not samples. Use Trader(...) as the solver, or "
            "parties that have data."
        )

    y = x_test = y_test = x

    def __str__(self) -> str:
        return f"{self.augment}, {', '.join(self.assets)}"

    def __repr__(self) -> str:
        return f"Desk({self.name!r}, {len(self.assets)} assets, {len(self.prices)} days, {self.tests} to test)"


@dataclass(frozen=True)
class _Settings:
    count: int = setting(10, "how many desks", least=1, whole=True)
    assets: int = setting(9, "how many assets each trades", least=1, whole=True)
    universe: int | None = setting(None, "of how many assets these are drawn; None: all", least=1, whole=True)
    window: int = setting(30, "l: how many closing prices a policy sees", least=2, whole=True)
    cost: float = setting(0.002, "c: the share that buying or selling costs", least=0, most=0.5)
    missing: str = setting(
        "exclude", "assets that begin late are left out, or all begin later", one_of=("exclude", "later")
    )


def desks(
    market: Market | str | Path = "sp500",
    count: int = 10,
    assets: int = 9,
    universe: int | None = None,
    train: Sequence[str] = ("2006", "2018"),
    test: Sequence[str] = ("2019", "2019"),
    window: int = 30,
    cost: float = 0.002,
    augment: Sequence[str] | str = ("gbm", "vom", "gan"),
    missing: Literal["exclude", "later"] = "exclude",
    seed: int = 0,
    data: str | Path | None = None,
    holdings: Mapping[str, Sequence[str]] | None = None,
) -> People:
    """Portfolio desks, each with assets of its own out of a market's (Fed+ v1 §4.2, v2 §8.2).

    `market` is "sp500" (a file of the data folder), "generated", the path of a file with prices, or a
    `portfolio.Market`. `train` and `test` are the first and the last day of each, or years. Desks take the kinds of
    `augment` in turn: each makes up prices of its own by one of them. `holdings` are the assets of each desk by its
    name; without them, `count`, `assets`, `universe` and `seed` say how they are drawn.

    >>> people = desks("generated", count=3, assets=4, universe=6)
    >>> people["2"]
    Desk('2', 4 assets, 3391 days, 261 to test)
    >>> desks("generated", holdings={"north": ["A01", "A07"], "south": ["A02", "A07"]})["south"].assets
    ('A02', 'A07')
    """
    settings = _Settings(count, assets, universe, window, cost, missing)
    check(settings, "desks")
    own = None if holdings is None else _held(holdings, settings)
    kinds = _kinds(augment)
    whole = _market(market, data)
    if own is not None:
        whole = whole.only(_all(own))
    learned, tested = _period("train", train), _period("test", test)
    for first, last in (learned, tested):
        whole.between(first, last)  # where there are no prices, that is told first
    used = whole.between(min(learned[0], tested[0]), max(learned[1], tested[1])).complete(missing)
    before, after = _parted(used, learned, tested, window)
    if own is None:
        names = _chosen(used.names, universe, assets, seed)
        own = {str(k): _drawn(names, assets, seed, k) for k in range(count)}
    _check_late(own, used)
    made = [
        _desk(name, used, before, after, held, window, cost, kinds[k % len(kinds)])
        for k, (name, held) in enumerate(own.items())
    ]
    said = [used.note, *remarks(used.only(_all(own)), learned, tested)]
    return People(made, note="; ".join(filter(None, said)))  # type: ignore[arg-type]


def _all(own: Mapping[str, Sequence[str]]) -> list[str]:
    """The assets of all desks, each once."""
    return list(dict.fromkeys(chain(*own.values())))


def _kinds(augment: Sequence[str] | str) -> list[str]:
    kinds = [augment] if isinstance(augment, str) else list(augment)
    for kind in kinds or ["(none is given)"]:
        if kind not in AUGMENTERS:
            raise unknown("augmentation", str(kind), AUGMENTERS)
    return kinds


def _held(holdings: Mapping[str, Sequence[str]], settings: _Settings) -> dict[str, tuple[str, ...]]:
    """The assets of each desk, as they were given."""
    drawn = [name for name in ("count", "assets", "universe") if getattr(settings, name) != getattr(_Settings, name)]
    if drawn:
        raise SettingError(f"Give desks 'holdings', or how they are drawn ({', '.join(map(repr, drawn))}), not both.")
    if not isinstance(holdings, Mapping) or not all(map(_are_names, holdings.values())):
        form = "give each desk a list of assets, such as {'north': ['AAPL', 'MSFT']}"
        raise SettingError(f"The 'holdings' of desks {form}. Got {holdings!r:.80}.")
    found = dict(zip(check_names(list(holdings)), map(tuple, holdings.values()), strict=True))
    for name, assets in found.items():
        twice = [asset for asset in assets if assets.count(asset) > 1]
        if twice:
            raise SettingError(f"Desk {name!r} holds {twice[0]} twice.")
    sizes = {len(assets): f"{len(assets)} in {name!r}" for name, assets in found.items()}
    if len(sizes) > 1:
        told = "A desk must hold as many assets as the others, because their models are computed as one stack"
        raise SettingError(f"{told}. Got {', '.join(sizes.values())}.")
    return found


def _check_late(own: Mapping[str, Sequence[str]], used: Market) -> None:
    for name, assets in own.items():
        late = [asset for asset in assets if asset not in used.names]
        if late:
            told = f"Desk {name!r} holds {', '.join(late)}, which begins after {used.dates[0]}"
            raise PartyError(f"{told}: let 'train' begin later, or set missing = 'later'.")


def _are_names(assets: Any) -> bool:
    listed = isinstance(assets, Sequence) and not isinstance(assets, str) and len(assets) > 0
    return listed and all(isinstance(asset, str) for asset in assets)


def _market(given: Market | str | Path, data: str | Path | None) -> Market:
    if isinstance(given, Market):
        return given
    if given == "generated":
        return generated()
    if not isinstance(given, str | Path) or not (given == "sp500" or Path(given).suffix):
        raise SettingError(
            "The 'market' of desks must be 'sp500', 'generated', the path of a .csv, .npz or .parquet file of daily "
            f"prices, or a portfolio.Market. Got {given!r}."
        )
    return read(locate("sp500", data)[0] if given == "sp500" else given)


def _parted(used: Market, learned: tuple[str, str], tested: tuple[str, str], window: int) -> tuple[Market, Market]:
    """The days to learn by, and those of the test."""
    after = used.between(*tested)
    if used.dates[0] > period(learned[1])[1] and used.note:
        raise PartyError(f"No day to learn by is left: {used.note}. Set missing = 'exclude' to do without that asset.")
    before = used.between(*learned)
    if before.dates[-1] >= after.dates[0]:
        raise SettingError(
            f"The test begins on {after.dates[0]}, and training ends on {before.dates[-1]}: it must end before."
        )
    if len(before.dates) < 2 * window:
        raise PartyError(f"{len(before.dates)} days to learn by are too few for a window of {window} days.")
    return before, after


def _period(name: str, days: Sequence[str]) -> tuple[str, str]:
    if not isinstance(days, Sequence) or isinstance(days, str) or len(days) != 2:
        raise SettingError(
            f"The '{name}' of desks is a first and a last day (or year), such as 2006, 2018. Got {days!r}."
        )
    return str(days[0]), str(days[1])


def _chosen(names: Sequence[str], universe: int | None, assets: int, seed: int) -> tuple[str, ...]:
    """The assets that desks draw theirs from."""
    wanted = len(names) if universe is None else universe
    if max(wanted, assets) > len(names):
        raise PartyError(
            f"There are {len(names)} assets with prices in all of that time, fewer than {max(wanted, assets)}."
        )
    if assets > wanted:
        raise SettingError(f"A desk cannot draw {assets} assets out of {wanted}.")
    return _some(names, wanted, stream(seed, 0, "", "universe"))


def _drawn(names: Sequence[str], assets: int, seed: int, k: int) -> tuple[str, ...]:
    return _some(names, assets, stream(seed, 0, str(k), "assets"))


def _some(names: Sequence[str], count: int, rng: np.random.Generator) -> tuple[str, ...]:
    return tuple(names[i] for i in sorted(rng.permutation(len(names))[:count]))


def _desk(
    name: str,
    used: Market,
    before: Market,
    after: Market,
    assets: Sequence[str],
    window: int,
    cost: float,
    augment: str,
) -> Bare:
    prices, first = used.only(assets).prices, int(np.searchsorted(used.dates, after.dates[0]))
    shown = prices[first - window : first + len(after.dates)]  # the days before a test are seen, learned by or not
    desk = Desk(name, tuple(assets), before.only(assets).prices, shown, after.dates, window, cost, augment)
    return Bare(desk)
