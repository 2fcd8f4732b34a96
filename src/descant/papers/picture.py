"""A picture of a sweep: what every method reaches at each value, and what the paper prints there."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from ..report import _style
from .experiment import means

if TYPE_CHECKING:
    from .experiment import Experiment


def draw_sweep(done: Experiment, file: Path) -> Path:
    """The mean over parties at every point; the shade spans the seeds, and stars are the paper's."""
    figure = Figure(figsize=(9.6, 5.0), dpi=150, layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12))
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    labels = [point.name for point in done.points]
    places = np.arange(len(labels))
    own = [means(point.study) for point in done.points]
    for method in done.points[0].study.methods:
        reached = np.array([found[method] for found in own])  # [points, seeds]
        style = _style(done.points[0].study, method)
        axes.fill_between(places, reached.min(1), reached.max(1), color=style["color"], alpha=0.12, linewidth=0)
        axes.plot(places, reached.mean(1), label=method, markersize=5, linewidth=1.8, **style)
    printed = [
        (place, figure.value)
        for figure in done.recipe.figures
        for place, point in enumerate(done.points)
        if figure.at and figure.at.items() <= dict(point.at).items()
    ]
    if printed:
        axes.plot(*zip(*printed, strict=True), "k*", markersize=12, label="the paper")
    axes.set_xticks(places, labels)
    axes.set_ylabel(f"{done.points[0].study.results[0].scores.metric}, mean over parties")
    axes.set_title(done.recipe.title, loc="left")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper", frameon=False)
    figure.savefig(file, format="png", backend="agg")
    return file
