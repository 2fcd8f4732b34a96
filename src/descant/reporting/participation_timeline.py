"""The time-line of who was there, who was stood in for, and how each party fared meanwhile."""

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

# From dark to light, so that they differ without colours, too: Okabe and Ito's blue and orange, then two greys.
STATE_STYLES = {
    PRESENT: ("#0072B2", "present"),
    PROXIED: ("#E69F00", "stood in for"),
    ABSENT: ("#D0D0D0", "absent"),
    NEVER_SEEN: ("#FFFFFF", "never seen yet"),
}
MAX_METHODS = 3  # methods side by side
MAX_LABELED_PARTIES = 8  # parties whose lines can be told apart by colour and marker


@dataclass(frozen=True)
class ParticipationTimeline:
    """Who was there in each round, and the centre's score by party where it was taken."""

    parties: Sequence[str]
    presence_codes: Sequence[str]  # a text a round, a letter a party
    scored_rounds: Numbers  # [points] rounds
    scores: Numbers  # [points, parties]


def draw_participation(file: Path, timelines: Mapping[str, ParticipationTimeline], metric: str) -> Path:
    """Parties by rounds, coloured by what they were; below it, each party's own test set judged by the centre.

    Where no scores were taken on the way, there is nothing below.
    """
    from matplotlib.figure import Figure  # here, because it takes a second
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
        panels[1, 0].set_ylabel(f"{label(metric, 40)}\nof the centre, by party")
    used_codes = {
        letter for presence in timelines.values() for letters in presence.presence_codes for letter in letters
    }
    patches = [
        Patch(facecolor=c, edgecolor="#999999", label=t)
        for letter, (c, t) in STATE_STYLES.items()
        if letter in used_codes
    ]
    lines = panels[-1, 0].get_legend_handles_labels()[0]
    figure.legend(handles=[*patches, *lines], loc="outside right upper", frameon=False)
    file.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # a party may be named in letters that the font lacks
        figure.savefig(file, format="png", backend="agg")
    return file


def _draw_presence_map(axes: Axes, presence: ParticipationTimeline, named: bool) -> None:
    from matplotlib.colors import ListedColormap
    from matplotlib.ticker import MaxNLocator

    codes = {letter: code for code, letter in enumerate(STATE_STYLES)}
    cells = np.array(
        [[codes[letter] for letter in letters] for letters in presence.presence_codes]
    ).T  # [parties, rounds]
    colors = ListedColormap([color for color, _ in STATE_STYLES.values()])
    rounds = cells.shape[1]
    count = len(presence.parties)
    grid = (np.arange(rounds + 1) + 0.5, np.arange(count + 1) - 0.5)
    mesh_style: dict[str, Any] = {
        "edgecolors": "#FFFFFF",
        "linewidth": 0.6 if rounds <= 60 and count <= MAX_NAMED_PARTIES else 0,
    }
    axes.pcolormesh(*grid, cells, cmap=colors, vmin=-0.5, vmax=3.5, **mesh_style)
    axes.set_ylim(count - 0.5, -0.5)  # the first party above
    if named and count <= MAX_NAMED_PARTIES:
        axes.set_yticks(range(count), [label(name, 18) for name in presence.parties])
    elif named:
        axes.set_ylabel(f"{count} parties")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.tick_params(length=0)
    axes.set_frame_on(False)


def _draw_score_curves(axes: Axes, presence: ParticipationTimeline) -> None:
    """A line a party, named as long as there are few; else all thin, and their mean."""
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
