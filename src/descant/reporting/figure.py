"""The common parts of all pictures: lines by label, colors, legend, footnote on the data, PNG file."""

from __future__ import annotations

import textwrap
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..core.metrics import TRIVIAL_BASELINES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Numbers = NDArray[np.float64]
Styles: TypeAlias = dict[str, dict[str, Any]]
LOCAL_LABEL = "Local"

# Okabe and Ito's palette for color-blind readers, without yellow, which is invisible on white; then two of Tol's
# colors, for comparisons of eight methods.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#882255", "#999933")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_DASHES = ("-", (0, (6, 1.5)), (0, (4, 1, 1, 1)), (0, (2, 1)), (0, (8, 2, 2, 2)))


@dataclass(frozen=True)
class BandLine:
    """A line with an optional band around it."""

    x: Numbers
    y: Numbers
    low: Numbers | None = None
    high: Numbers | None = None

    @classmethod
    def from_repeats(cls, x: Any, repeats: Any) -> BandLine:
        """Return the mean of lines ``[n, points]`` with the band that they span."""
        values = np.asarray(repeats, dtype=float)
        band = (values.min(0), values.max(0)) if len(values) > 1 else (None, None)
        return cls(np.asarray(x, dtype=float), values.mean(0), *band)


FOOTNOTE: ContextVar[str] = ContextVar("footnote", default="")


@contextmanager
def with_footnote(note: str) -> Iterator[None]:
    """Put a note on the data at the foot of every picture drawn inside the context."""
    token = FOOTNOTE.set(note)
    try:
        yield
    finally:
        FOOTNOTE.reset(token)


def draw_lines(axes: Axes, lines: Mapping[str, BandLine], styles: Styles, markersize: float) -> None:
    """Draw lines, each with its band."""
    for index, (method, line) in enumerate(lines.items()):
        marker_step = max(1, len(line.x) // 12)
        first_marker = index * marker_step // len(lines)  # so that the markers of equal lines do not hide each other
        style = {**styles[method], "markevery": (first_marker, marker_step)}
        if line.low is not None and line.high is not None:
            axes.fill_between(line.x, line.low, line.high, color=style["color"], alpha=0.15, linewidth=0)
        axes.plot(line.x, line.y, label=label(method), markersize=markersize, **{"linewidth": 1.8, **style})


@contextmanager
def open_figure(
    file: Path, labels: Mapping[str, Any], rows: int = 1, integer_rounds: bool = True
) -> Iterator[tuple[list[Axes], Styles]]:
    """Yield axes and a style per label; on exit, add the legend and write the file.

    With ``integer_rounds``, the x-axis counts rounds."""
    from matplotlib.figure import Figure  # here, because it is slow to import
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.ticker import MaxNLocator

    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12)
    figure = Figure(figsize=(9.6, (5.0, 6.4, 8.4)[rows - 1]), dpi=150, layout=layout)
    panels = [figure.add_subplot(rows, 1, row + 1) for row in range(rows)]
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        if integer_rounds:
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.set_xlabel("round")
    yield panels, label_styles(labels)
    for axes in panels:  # a long title would run into the legend
        axes.set_title(textwrap.fill(axes.get_title(loc="left"), 66), loc="left")
    if FOOTNOTE.get():
        footnote = textwrap.fill(label(FOOTNOTE.get(), 400), 120)
        figure.supxlabel(footnote, x=0.01, ha="left", fontsize=8, color="#555555")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper", frameon=False)
    file.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # party names may contain characters that the font lacks
        figure.savefig(file, format="png", backend="agg")


def label_styles(labels: Collection[str]) -> Styles:
    """Return a color, a marker and a line style for each label."""
    parts = {"color": _COLORS, "linestyle": _DASHES, "marker": _MARKERS}
    styles: Styles = {LOCAL_LABEL: {"color": "black", "linestyle": "--", "marker": "|"}}
    styles |= {
        method: {**styles[LOCAL_LABEL], "color": "#777777"}
        for method in labels
        if method.startswith(f"{LOCAL_LABEL}, ")
    }
    styles |= {
        name: {"color": "#999999", "linestyle": ":", "marker": "_"} for name in labels if name in TRIVIAL_BASELINES
    }
    for index, method in enumerate(method for method in labels if method not in styles):
        styles[method] = {name: choices[index % len(choices)] for name, choices in parts.items()}
    return styles


def label(text: str, max_length: int = 28) -> str:
    r"""Return text that matplotlib shows literally: no formulas, no line breaks, at most ``max_length`` long.

    >>> print(label("costs $5\nand $6"), label("_hidden"), label("party number 17", max_length=8))
    costs \$5 and \$6  _hidden part… 17
    """
    line = " ".join(text.split())
    if len(line) > max_length:  # cut in the middle, because names often differ at their ends
        line = line[: max_length // 2] + "…" + line[1 - max_length // 2 :]
    return (" " if line.startswith("_") else "") + line.replace("$", r"\$")
