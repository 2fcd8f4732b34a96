"""Pictures of portfolios: their value and their holdings by day."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from .figure import BandLine, Numbers, draw_lines, label, open_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

UNIFORM = "uniform rebalancing"
HOLD = "buy and hold"
MAX_PANELS = 3  # desks or methods with a panel of holdings
MIN_LABELED_SHARE = 0.03  # smallest share with its asset's name beside it
MAX_NAMED_DESKS = 30  # with more desks, their names do not fit below a picture


def draw_values(file: Path, values: Mapping[str, Numbers], dates: Sequence[str]) -> Path:
    """Draw values by day, ``[days + 1]`` each, and below the drawdown of each from its peak."""
    days = np.arange(len(dates) + 1, dtype=float)
    with open_figure(file, values, rows=2, integer_rounds=False) as ((above, below), styles):
        for name, dash in ((UNIFORM, ":"), (HOLD, "-.")):
            if name in styles:
                styles[name] = {"color": "#777777", "linestyle": dash, "marker": "", "linewidth": 1.0, "zorder": 1}
        drawdowns = {name: 100 * (value / np.maximum.accumulate(value) - 1) for name, value in values.items()}
        for axes, lines in ((above, values), (below, drawdowns)):
            draw_lines(axes, {name: BandLine(days, line) for name, line in lines.items()}, styles, markersize=4)
            _set_date_ticks(axes, dates)
        above.set_xlabel("")
        below.set_xlabel("")
        above.set_ylabel("value, mean of the desks")
        below.set_ylabel("% below its peak")
        above.set_title("Value of an initial 1, after fees", loc="left")
    return file


def _set_date_ticks(axes: Axes, dates: Sequence[str]) -> None:
    tick_indices = np.linspace(1, len(dates), min(7, len(dates))).astype(int)
    axes.set_xticks(tick_indices, [label(dates[place - 1]) for place in tick_indices])


def draw_weights(
    file: Path,
    weights: Mapping[str, Numbers],
    assets: Mapping[str, Sequence[str]],
    dates: Sequence[str],
    title: str = "Holdings by day",
) -> Path:
    """Draw the holdings by day, one panel per label: cash at the bottom, every asset above it."""
    with open_figure(file, {}, rows=len(weights), integer_rounds=False) as (panels, _):
        for axes, (name, shares) in zip(panels, weights.items(), strict=True):
            axes.stackplot(
                np.arange(1, len(shares) + 1), shares.T, colors=["#dddddd", *map(asset_color, range(len(shares.T) - 1))]
            )
            _label_assets(axes, ["cash", *assets[name]], shares)
            axes.set_ylim(0, 1)
            axes.set_xlim(1, len(shares))
            axes.set_xlabel("")
            axes.set_ylabel(f"{label(name)}: share")
            _set_date_ticks(axes, dates)
        panels[0].set_title(label(title, 90), loc="left")
    return file


def asset_color(asset: int) -> str:
    """Return one of twenty colors, the ten strong ones first."""
    from matplotlib import colormaps, colors  # here, because it is slow to import

    return colors.to_hex(colormaps["tab20"](2 * asset % 20 + asset // 10 % 2))


def _label_assets(axes: Axes, assets: Sequence[str], shares: Numbers) -> None:
    """Write each asset's name beside its share at the end or, if it was sold, beside its largest share."""
    tops = shares.cumsum(1)
    for k, asset in enumerate(assets):
        held_at_end = shares[-1, k] >= MIN_LABELED_SHARE
        day = len(shares) - 1 if held_at_end else int(shares[:, k].argmax())
        side = "left" if held_at_end or day < 0.04 * len(shares) else "right" if day > 0.96 * len(shares) else "center"
        if shares[day, k] >= MIN_LABELED_SHARE:
            at = len(shares) * 1.005 if held_at_end else day + 1
            axes.text(at, tops[day, k] - shares[day, k] / 2, label(asset, 10), fontsize=8, va="center", ha=side)


def draw_universes(file: Path, aligned_days: Numbers, cumulative_distance: Numbers, means: Mapping[str, float]) -> Path:
    """Draw the cumulative distance of two desks by day (v1 fig. 5), and each desk's mean distance."""
    first, second, *_ = means
    with open_figure(file, {}, rows=3, integer_rounds=False) as ((top, middle, bottom), _):
        top.plot(aligned_days[:, 0], cumulative_distance, color="#0072B2", linewidth=1.8)
        top.set_ylabel(f"distance of {label(first, 12)} and {label(second, 12)}")
        top.set_title("Distance of the returns of two desks, time warped, day by day", loc="left")
        middle.plot(aligned_days[:, 0], aligned_days[:, 1] - aligned_days[:, 0], color="#D55E00", linewidth=1.2)
        middle.set_ylabel("days apart")
        middle.set_xlabel(f"day of desk {label(first, 12)}")
        bottom.bar(range(len(means)), list(means.values()), color="#56B4E9")
        names = [label(name, 12) for name in means] if len(means) <= MAX_NAMED_DESKS else []
        bottom.set_xticks(range(len(names)), names)
        bottom.set_xlabel("desk")
        bottom.set_ylabel("mean distance")
    return file
