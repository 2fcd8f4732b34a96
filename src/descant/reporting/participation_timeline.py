"""Timeline of participation, absence and coreset proxies, with the score of each party below."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..rounds.state import ABSENT, NEVER_SEEN, PRESENT, PROXIED
from .figure import Numbers, label, label_styles
from .plots import MAX_NAMED_PARTIES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# From dark to light, so that they differ without colors too: Okabe and Ito's blue and orange, then two grays.
STATE_STYLES = {
    PRESENT: ("#0072B2", "present"),
    PROXIED: ("#E69F00", "coreset proxy"),
    ABSENT: ("#D0D0D0", "absent"),
    NEVER_SEEN: ("#FFFFFF", "not seen yet"),
}
MAX_METHODS = 3  # methods side by side
MAX_LABELED_PARTIES = 8  # parties whose lines differ in color and marker


@dataclass(frozen=True)
class ParticipationTimeline:
    """Participation by round, and the global model's score by party where it was evaluated."""

    parties: Sequence[str]
    presence_codes: Sequence[str]  # one text per round, one character per party
    scored_rounds: Numbers  # [points]
    scores: Numbers  # [points, parties]


def draw_participation(file: Path, timelines: Mapping[str, ParticipationTimeline], metric: str) -> Path:
    """Draw a map of parties by rounds and, below it, the global model's score on each party's test set.

    Without scores, only the map is drawn.
    """
    from matplotlib.figure import Figure  # here, because it is slow to import
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.patches import Patch

    parties = next(iter(timelines.values())).parties
    map_height = 0.9 + min(0.28, 6 / len(parties)) * len(parties)
    heights = [map_height, 3.2] if any(len(presence.scored_rounds) for presence in timelines.values()) else [map_height]
    size = (1.8 + 7.8 * (1 if len(timelines) == 1 else 0.66 * len(timelines)), sum(heights) + 0.2)
    figure = Figure(figsize=size, dpi=150, layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12))
    rows = len(heights)
    panels = figure.subplots(rows, len(timelines), squeeze=False, sharex="col", sharey="row", height_ratios=heights)
    for column, (method, presence) in enumerate(timelines.items()):
        _draw_presence_map(panels[0, column], presence, named=column == 0)
        panels[0, column].set_title(label(method, 40), loc="left")
        if rows > 1:
            _draw_score_curves(panels[1, column], presence)
        panels[-1, column].set_xlabel("round")
    if rows > 1:
        panels[1, 0].set_ylabel(f"{label(metric, 40)}\nof the global model, by party")
    used_codes = {code for presence in timelines.values() for codes in presence.presence_codes for code in codes}
    patches = [
        Patch(facecolor=color, edgecolor="#999999", label=text)
        for code, (color, text) in STATE_STYLES.items()
        if code in used_codes
    ]
    lines = panels[-1, 0].get_legend_handles_labels()[0]
    figure.legend(handles=[*patches, *lines], loc="outside right upper", frameon=False)
    file.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # party names may contain characters that the font lacks
        figure.savefig(file, format="png", backend="agg")
    return file


def _draw_presence_map(axes: Axes, presence: ParticipationTimeline, named: bool) -> None:
    from matplotlib.colors import ListedColormap
    from matplotlib.ticker import MaxNLocator

    numbers = {code: number for number, code in enumerate(STATE_STYLES)}
    by_round = [[numbers[code] for code in codes] for codes in presence.presence_codes]
    cells = np.array(by_round).T  # [parties, rounds]
    colors = ListedColormap([color for color, _ in STATE_STYLES.values()])
    rounds = cells.shape[1]
    count = len(presence.parties)
    grid = (np.arange(rounds + 1) + 0.5, np.arange(count + 1) - 0.5)
    mesh_style: dict[str, Any] = {
        "edgecolors": "#FFFFFF",
        "linewidth": 0.6 if rounds <= 60 and count <= MAX_NAMED_PARTIES else 0,
    }
    axes.pcolormesh(*grid, cells, cmap=colors, vmin=-0.5, vmax=3.5, **mesh_style)
    axes.set_ylim(count - 0.5, -0.5)  # the first party at the top
    if named and count <= MAX_NAMED_PARTIES:
        axes.set_yticks(range(count), [label(name, 18) for name in presence.parties])
    elif named:
        axes.set_ylabel(f"{count} parties")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.tick_params(length=0)
    axes.set_frame_on(False)


def _draw_score_curves(axes: Axes, presence: ParticipationTimeline) -> None:
    """Draw one named line per party if there are few; else thin lines and their mean."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    if len(presence.parties) <= MAX_LABELED_PARTIES:
        named = label_styles(presence.parties)
        for k, party in enumerate(presence.parties):
            style = {**named[party], "markevery": max(1, len(presence.scored_rounds) // 12)}
            style |= {"label": f"party {label(party)}", "markersize": 4, "linewidth": 1.6}
            axes.plot(presence.scored_rounds, presence.scores[:, k], **style)
        return
    axes.plot(presence.scored_rounds, presence.scores, color="#999999", linewidth=0.6, alpha=0.7)
    known = np.ma.masked_invalid(presence.scores)
    axes.plot(presence.scored_rounds, known.mean(axis=1), color="black", linewidth=2.0, label="mean of the parties")
    axes.fill_between(
        presence.scored_rounds, known.min(axis=1), known.max(axis=1), color="#56B4E9", alpha=0.15, linewidth=0
    )
