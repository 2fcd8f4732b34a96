"""The map of a population: the share of every class in every party."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from .population import Population

MAX_LABELED_PARTIES = 30  # more names and numbers do not fit


def plot_population(population: Population, file: str | Path) -> Path:
    """Draw parties (columns) by classes (rows): a cell is the share of the party's rows; bars on top show sizes.

    Up to 30 parties keep their order and show names and numbers. More parties are sorted by their classes.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure  # slow to import
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    labels, counts = population.label_counts()  # counts [parties, classes]
    names = list(population.names)
    labeled = len(population) <= MAX_LABELED_PARTIES
    if not labeled:
        order = _sort_order(counts)
        counts = counts[order]
        names = [names[k] for k in order]
    shares = (counts / counts.sum(1, keepdims=True)).T  # [classes, parties]
    width = min(12.0, max(6.0, 0.55 * len(population) + 2.2)) if labeled else 12.0
    height = min(9.0, max(2.2, 0.34 * len(labels))) + 2.6
    figure = Figure(figsize=(width, height), dpi=150, layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1))
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[1.3, height - 2.6])
    _draw_sizes(above, counts.sum(1), labeled)
    colors = colormaps["viridis_r"].with_extremes(under="white")
    image = below.imshow(shares, cmap=colors, vmin=1e-9, vmax=1, aspect="auto", interpolation="nearest")
    _label_axes(below, [str(label) for label in labels], names)
    if labeled:
        _draw_counts(below, counts.T, shares)
    figure.colorbar(image, ax=below, label="share of the party's rows", ticks=[0.25, 0.5, 0.75, 1], pad=0.01)
    title = f"{len(population)} parties, {int(counts.sum()):,} rows, {len(labels)} classes"
    figure.suptitle(f"{title}\n{population.note}" if population.note else title, fontsize=11)
    file = Path(file)
    file.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # the font may lack characters of a party's name
        figure.savefig(file, format="png", backend="agg")
    return file


def _sort_order(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return an order that groups parties with the same classes, or else with the same main class."""
    shares = counts / counts.sum(1, keepdims=True)
    patterns, pattern_index = np.unique(counts == 0, axis=0, return_inverse=True)
    primary_key = pattern_index if len(patterns) <= len(counts) // 10 else np.zeros(len(counts))
    return np.lexsort((-counts.sum(1), -shares.max(1).round(1), shares.argmax(1), primary_key))


def _draw_sizes(axes: Axes, sizes: NDArray[np.int64], labeled: bool) -> None:
    positions = np.arange(len(sizes))
    if labeled:
        axes.bar(positions, sizes, width=0.8, color="#555555")
    else:  # bars one pixel wide would not show
        axes.fill_between(positions, sizes, step="mid", color="#555555", linewidth=0)
    if sizes.max() > 20 * sizes.min():
        axes.set_yscale("log")
    axes.set_ylabel("rows")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="x", length=0, labelbottom=False)


def _label_axes(axes: Axes, labels: list[str], names: list[str]) -> None:
    step = -(-len(labels) // 40)
    axes.set_yticks(range(0, len(labels), step), labels[::step])
    axes.set_ylabel("class")
    if len(names) > MAX_LABELED_PARTIES:
        axes.set_xticks([])
        axes.set_xlabel(f"{len(names)} parties, sorted by their classes; white is none")
        return
    shown = [name if len(name) <= 14 else f"{name[:13]}…" for name in names]
    rotated = max(map(len, shown)) * len(shown) > 60
    axes.set_xticks(range(len(shown)), [name.replace("$", r"\$") for name in shown], rotation=90 if rotated else 0)
    axes.set_xlabel("party; white is none")


def _draw_counts(axes: Axes, counts: NDArray[np.int64], shares: NDArray[np.float64]) -> None:
    if counts.shape[0] > 40:
        return
    size = 8 if counts.shape[1] <= 16 else 6
    for (row, column), count in np.ndenumerate(counts):
        if count:
            color = "white" if shares[row, column] > 0.45 else "black"
            axes.text(column, row, str(count), ha="center", va="center", fontsize=size, color=color)
