"""The picture: speed of every contestant relative to the plain loop, by workload."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from peer_comparison.results import WorkloadResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's palette for color-blind readers.
_OURS = "#0072B2"
_PLAIN = "#555555"
_PEERS = "#B8B8B8"
_CPU = "#D55E00"


class _Bar(NamedTuple):
    title: str
    color: str
    wall: float | None  # speed relative to the plain loop; None without a result or a plain loop
    cpu: float | None

    @property
    def text(self) -> str:
        if self.wall is None:
            return "no result"
        return f"{self.wall:.{2 if self.wall < 1 else 1 if self.wall < 10 else 0}f}×"


def draw(results: Sequence[WorkloadResult], file: Path) -> Path:
    """Draw horizontal bars by wall time and marks by processor time on one logarithmic axis."""
    from matplotlib.figure import Figure  # here, because it is slow to import
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    shown = [(result, _bars(result)) for result in results]
    heights = [max(1, len(bars)) + 1.3 for _, bars in shown]
    engine = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.08)
    figure = Figure(figsize=(9.6, 1.1 + 0.29 * sum(heights)), dpi=150, layout=engine)
    panels = figure.subplots(len(shown), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (result, bars) in zip(panels, shown, strict=True):
        _panel(axes, bars)
        axes.set_title(f"{result.work.name}, {result.work.method}: {result.work.title}", fontsize=9, loc="left")
    ratios = [ratio for _, bars in shown for bar in bars for ratio in (bar.wall, bar.cpu) if ratio]
    low = min([0.5, *ratios])
    high = max([2.0, *ratios])
    panels[-1].set_xlim(low / 1.6, high * 1.6)
    panels[-1].set_xlabel("times as fast as a plain torch loop on one thread (log scale; right is faster)")
    marks = [Patch(color=_OURS), Line2D([], [], color=_CPU, marker="d", linestyle="none")]
    names = ["by wall time", "by processor time of all its processes"]
    figure.legend(marks, names, loc="outside upper right", frameon=False, ncols=2, fontsize=9)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file)
    return file


def _bars(result: WorkloadResult) -> list[_Bar]:
    bars = []
    for m, row in zip(result.measured, result.rows(), strict=True):
        base = m.name.partition("@")[0]
        color = {"plain": _PLAIN, "descant": _OURS, "processes": _OURS}.get(base, _PEERS)
        ratios = (None, None) if m.reason else (row["× plain, wall"], row["× plain, CPU"])
        bars.append(_Bar(m.title, color, *ratios))
    return bars


def _panel(axes: Axes, bars: Sequence[_Bar]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_xscale("log")
    for place, bar in enumerate(bars):
        wall = bar.wall or 1.0
        ends = [ratio for ratio in (bar.wall, bar.cpu) if ratio] or [1.0]
        axes.barh(place, wall - 1, left=1, height=0.66, color=bar.color)
        at, side = (max(ends) * 1.06, "left") if wall >= 1 else (min(ends) / 1.06, "right")
        axes.text(at, place, bar.text, va="center", ha=side, fontsize=8.5, color="black" if bar.wall else _PLAIN)
        if bar.cpu:
            axes.plot(bar.cpu, place, "d", color=_CPU, markersize=5)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(range(len(bars)), [bar.title for bar in bars], fontsize=9)
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_minor_locator(NullLocator())
