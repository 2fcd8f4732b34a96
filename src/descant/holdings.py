"""Pictures of portfolios: what became of their value, and what they held."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from .canvas import Line, Numbers, label, lines_on, picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

UNIFORM, HOLD = "uniform rebalancing", "buy and hold"
MOST = 3  # desks whose holdings are shown
_SEEN = 0.03  # a share whose name is written beside it
MANY = 30  # desks whose names fit below a picture


def draw_values(file: Path, values: Mapping[str, Numbers], dates: Sequence[str]) -> Path:
    """Values by day, ``[days + 1]`` each, and below how far each stands under its peak."""
    days = np.arange(len(dates) + 1, dtype=float)
    with picture(file, values, rows=2, whole=False) as ((above, below), styles):
        for name, dash in ((UNIFORM, ":"), (HOLD, "-.")):
            if name in styles:
                styles[name] = {"color": "#777777", "linestyle": dash, "marker": ""}
        fallen = {name: 100 * (value / np.maximum.accumulate(value) - 1) for name, value in values.items()}
        for axes, lines in ((above, values), (below, fallen)):
            lines_on(axes, {name: Line(days, line) for name, line in lines.items()}, styles, markersize=4)
            _dated(axes, dates)
        above.set_xlabel("")
        below.set_xlabel("")
        above.set_ylabel("value, mean of the desks")
        below.set_ylabel("% below its peak")
        above.set_title("What became of 1, fees paid", loc="left")
    return file


def _dated(axes: Axes, dates: Sequence[str]) -> None:
    places = np.linspace(1, len(dates), min(7, len(dates))).astype(int)
    axes.set_xticks(places, [label(dates[place - 1]) for place in places])


def draw_weights(
    file: Path, weights: Mapping[str, Numbers], assets: Mapping[str, Sequence[str]], dates: Sequence[str]
) -> Path:
    """What some desks hold by day, one panel each: cash at the bottom, and every asset above it."""
    with picture(file, {}, rows=len(weights), whole=False) as (panels, _):
        for axes, (name, held) in zip(panels, weights.items(), strict=True):
            colors = ["#dddddd", *(f"C{i}" for i in range(held.shape[1] - 1))]
            axes.stackplot(np.arange(1, len(held) + 1), held.T, colors=colors)
            for asset, share, top in zip(["cash", *assets[name]], held[-1], held[-1].cumsum(), strict=True):
                if share >= _SEEN:
                    axes.text(len(held) * 1.005, top - share / 2, label(asset, 10), fontsize=8, va="center")
            axes.set_ylim(0, 1)
            axes.set_xlim(1, len(held))
            axes.set_xlabel("")
            axes.set_ylabel(f"desk {label(name)}: share")
            _dated(axes, dates)
        panels[0].set_title("What is held, day by day", loc="left")
    return file


def draw_universes(file: Path, days: Numbers, apart: Numbers, means: Mapping[str, float]) -> Path:
    """How the distance of two desks grows by the day (v1 fig. 5), and how far each is from the others."""
    first, second, *_ = means
    with picture(file, {}, rows=3, whole=False) as ((top, middle, bottom), _):
        top.plot(days[:, 0], apart, color="#0072B2", linewidth=1.8)
        top.set_ylabel(f"distance of {label(first, 12)} and {label(second, 12)}")
        top.set_title("How unlike the returns of two desks are, time warped, day by day", loc="left")
        middle.plot(days[:, 0], days[:, 1] - days[:, 0], color="#D55E00", linewidth=1.2)
        middle.set_ylabel("days apart")
        middle.set_xlabel(f"day of desk {label(first, 12)}")
        bottom.bar(range(len(means)), list(means.values()), color="#56B4E9")
        names = [label(name, 12) for name in means] if len(means) <= MANY else []
        bottom.set_xticks(range(len(names)), names)
        bottom.set_xlabel("desk")
        bottom.set_ylabel("mean distance")
    return file
