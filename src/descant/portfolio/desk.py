"""Portfolio desks as parties: each trades its own assets, and its synthetic prices never leave it."""

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
from ..core.settings import check_settings, setting, unknown_name_error
from ..errors import PartyError, SettingError
from ..parties.dataset_catalog import locate_files
from ..parties.population import Population, validate_names
from ..rl.agent_parties import DatalessSource
from . import Market, generate_market, read_market
from .market import parse_period
from .price_augmentation import AUGMENTERS
from .price_warnings import find_price_warnings

Array = NDArray[Any]


@dataclass(frozen=True, eq=False, repr=False)
class Desk:
    """One desk: its training prices, its test prices, and its kind of price augmentation."""

    name: str
    assets: tuple[str, ...]
    prices: Array  # [days, assets] for training
    test_prices: Array  # [window + days, assets] for the test; the first `window` days come before it
    test_dates: Array  # [days], without the window
    window: int
    cost: float
    augment: str
    cache: dict[Any, Any] = field(default_factory=dict)  # computed once: results of the trivial strategies, and similar

    @property
    def samples(self) -> int:
        """0: a desk trains on consecutive days, not on samples."""
        return 0

    @property
    def sample_spec(self) -> str:
        """The properties that all desks of a federation must share, in words."""
        return f"{len(self.assets)} assets, a window of {self.window} days"

    @property
    def test_count(self) -> int:
        """The number of test days."""
        return len(self.test_dates)

    @property
    def relatives(self) -> Array:
        """Test prices over the prices of the day before, ``[days, assets]``."""
        price_relatives: Array = self.test_prices[self.window :] / self.test_prices[self.window - 1 : -1]
        return price_relatives

    @property
    def data(self) -> tuple[Tensor, ...]:
        """The tensors that identify this desk's data, for fingerprints."""
        description = ",".join([*self.assets, str(self.window), repr(self.cost), self.augment]).encode()
        description_bytes = torch.frombuffer(bytearray(description), dtype=torch.uint8)
        return torch.from_numpy(self.prices), torch.from_numpy(self.test_prices), description_bytes

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
        return f"Desk({self.name!r}, {len(self.assets)} assets, {len(self.prices)} days, {self.test_count} to test)"


@dataclass(frozen=True)
class _DesksSettings:
    count: int = setting(10, "number of desks", least=1, whole=True)
    assets: int = setting(9, "number of assets that each desk trades", least=1, whole=True)
    universe: int | None = setting(
        None, "number of assets that desks draw from; None: all of the market", least=1, whole=True
    )
    window: int = setting(30, "l: number of closing prices that a policy sees", least=2, whole=True)
    cost: float = setting(0.002, "c: transaction costs, as a share of the value traded", least=0, most=0.5)
    missing: str = setting(
        "exclude", "leave out assets that begin late, or begin later with all of them", one_of=("exclude", "later")
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
) -> Population:
    """Portfolio desks that each trade their own assets of a market (Fed+ v1 §4.2, v2 §8.2).

    `market` is "sp500" (a file of the data folder), "generated", the path of a price file, or a `portfolio.Market`.
    `train` and `test` are the first and the last day of each period, or years. Desks take the kinds of `augment` in
    turn; each generates its own synthetic prices with its kind. `holdings` lists the assets of each desk by its name.
    Without it, assets are drawn by `count`, `assets`, `universe` and `seed`.

    >>> population = desks("generated", count=3, assets=4, universe=6)
    >>> population["2"]
    Desk('2', 4 assets, 3391 days, 261 to test)
    >>> desks("generated", holdings={"north": ["A01", "A07"], "south": ["A02", "A07"]})["south"].assets
    ('A02', 'A07')
    """
    settings = _DesksSettings(count, assets, universe, window, cost, missing)
    check_settings(settings, "desks")
    holdings_by_desk = None if holdings is None else _check_holdings(holdings, settings)
    kinds = _augmentation_kinds(augment)
    full_market = _load_market(market, data)
    if holdings_by_desk is not None:
        full_market = full_market.select(_all_assets(holdings_by_desk))
    train_period = _check_period("train", train)
    test_period = _check_period("test", test)
    for first, last in (train_period, test_period):
        full_market.between(first, last)  # raises if there are no prices, before any other check
    market_used = full_market.between(
        min(train_period[0], test_period[0]), max(train_period[1], test_period[1])
    ).complete(missing)
    train_market, test_market = _split_periods(market_used, train_period, test_period, window=window)
    if holdings_by_desk is None:
        universe_names = _draw_universe(market_used.names, universe, assets, seed=seed)
        holdings_by_desk = {str(k): _draw_assets(universe_names, assets, seed, k=k) for k in range(count)}
    _check_late(holdings_by_desk, market_used)
    sources = [
        _make_desk(
            name,
            market_used,
            train_market,
            test_market=test_market,
            assets=asset_names,
            window=window,
            cost=cost,
            augment=kinds[k % len(kinds)],
        )
        for k, (name, asset_names) in enumerate(holdings_by_desk.items())
    ]
    notes = [
        market_used.note,
        *find_price_warnings(market_used.select(_all_assets(holdings_by_desk)), train_period, test_period),
    ]
    return Population(sources, note="; ".join(filter(None, notes)))  # type: ignore[arg-type]


def _all_assets(holdings: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the assets of all desks, each once."""
    return list(dict.fromkeys(chain(*holdings.values())))


def _augmentation_kinds(augment: Sequence[str] | str) -> list[str]:
    kinds = [augment] if isinstance(augment, str) else list(augment)
    for kind in kinds or ["(none is given)"]:
        if kind not in AUGMENTERS:
            raise unknown_name_error("augmentation", str(kind), AUGMENTERS)
    return kinds


def _check_holdings(holdings: Mapping[str, Sequence[str]], settings: _DesksSettings) -> dict[str, tuple[str, ...]]:
    """Return the assets of each desk by its name; raise if they are invalid."""
    conflicting = [
        name for name in ("count", "assets", "universe") if getattr(settings, name) != getattr(_DesksSettings, name)
    ]
    if conflicting:
        raise SettingError(
            f"Give desks 'holdings', or settings to draw them ({', '.join(map(repr, conflicting))}), not both."
        )
    if not isinstance(holdings, Mapping) or not all(map(_is_name_list, holdings.values())):
        form = "must give each desk a list of assets, such as {'north': ['AAPL', 'MSFT']}"
        raise SettingError(f"The 'holdings' of desks {form}. Got {holdings!r:.80}.")
    holdings_by_desk = dict(zip(validate_names(list(holdings)), map(tuple, holdings.values()), strict=True))
    for name, assets in holdings_by_desk.items():
        repeated = [asset for asset in assets if assets.count(asset) > 1]
        if repeated:
            raise SettingError(f"Desk {name!r} holds {repeated[0]} twice.")
    sizes = {len(assets): f"{len(assets)} in {name!r}" for name, assets in holdings_by_desk.items()}
    if len(sizes) > 1:
        problem = "All desks must hold the same number of assets, because their models are computed as one stack"
        raise SettingError(f"{problem}. Got {', '.join(sizes.values())}.")
    return holdings_by_desk


def _check_late(holdings: Mapping[str, Sequence[str]], market: Market) -> None:
    for name, assets in holdings.items():
        late = [asset for asset in assets if asset not in market.names]
        if late:
            problem = f"Desk {name!r} holds {', '.join(late)}, which begins after {market.dates[0]}"
            raise PartyError(f"{problem}: use a later 'train' period, or set missing = 'later'.")


def _is_name_list(assets: Any) -> bool:
    listed = isinstance(assets, Sequence) and not isinstance(assets, str) and len(assets) > 0
    return listed and all(isinstance(asset, str) for asset in assets)


def _load_market(market: Market | str | Path, data: str | Path | None) -> Market:
    if isinstance(market, Market):
        return market
    if market == "generated":
        return generate_market()
    if not isinstance(market, str | Path) or not (market == "sp500" or Path(market).suffix):
        raise SettingError(
            "The 'market' of desks must be 'sp500', 'generated', the path of a .csv, .npz or .parquet file of daily "
            f"prices, or a portfolio.Market. Got {market!r}."
        )
    return read_market(locate_files("sp500", data)[0] if market == "sp500" else market)


def _split_periods(
    market: Market, train_period: tuple[str, str], test_period: tuple[str, str], window: int
) -> tuple[Market, Market]:
    """Return the training days and the test days of the market."""
    test_market = market.between(*test_period)
    if market.dates[0] > parse_period(train_period[1])[1] and market.note:
        raise PartyError(f"No training day is left: {market.note}. Set missing = 'exclude' to leave out that asset.")
    train_market = market.between(*train_period)
    if train_market.dates[-1] >= test_market.dates[0]:
        raise SettingError(
            f"Training ends on {train_market.dates[-1]} and the test begins on {test_market.dates[0]}: training must "
            "end before the test."
        )
    if len(train_market.dates) < 2 * window:
        raise PartyError(f"{len(train_market.dates)} training days are too few for a window of {window} days.")
    return train_market, test_market


def _check_period(name: str, days: Sequence[str]) -> tuple[str, str]:
    if not isinstance(days, Sequence) or isinstance(days, str) or len(days) != 2:
        raise SettingError(
            f"The '{name}' of desks must be a first and a last day (or year), such as 2006, 2018. Got {days!r}."
        )
    return str(days[0]), str(days[1])


def _draw_universe(names: Sequence[str], universe: int | None, assets: int, seed: int) -> tuple[str, ...]:
    """Return the assets that desks draw theirs from."""
    size = len(names) if universe is None else universe
    if max(size, assets) > len(names):
        raise PartyError(f"Only {len(names)} assets have prices for the whole period, fewer than {max(size, assets)}.")
    if assets > size:
        raise SettingError(f"A desk cannot draw {assets} assets out of {size}.")
    return _random_subset(names, size, stream(seed, 0, "", purpose="universe"))


def _draw_assets(names: Sequence[str], assets: int, seed: int, k: int) -> tuple[str, ...]:
    return _random_subset(names, assets, stream(seed, 0, str(k), purpose="assets"))


def _random_subset(names: Sequence[str], count: int, rng: np.random.Generator) -> tuple[str, ...]:
    return tuple(names[i] for i in sorted(rng.permutation(len(names))[:count]))


def _make_desk(
    name: str,
    market: Market,
    train_market: Market,
    test_market: Market,
    assets: Sequence[str],
    window: int,
    cost: float,
    augment: str,
) -> DatalessSource:
    prices = market.select(assets).prices
    first = int(np.searchsorted(market.dates, test_market.dates[0]))
    # the window before the test is visible to the policy, whether it was trained on or not
    test_prices = prices[first - window : first + len(test_market.dates)]
    desk = Desk(
        name,
        tuple(assets),
        train_market.select(assets).prices,
        test_prices=test_prices,
        test_dates=test_market.dates,
        window=window,
        cost=cost,
        augment=augment,
    )
    return DatalessSource(desk)
