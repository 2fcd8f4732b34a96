"""Pictures of plain numbers: lines by label, parties by place. Whoever has the numbers can draw them, stored or live.

Labels are methods; "Local" is training alone, and is black. Every picture is one PNG file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .figure import ALONE, Line, Numbers, Styles, label, lines_on, picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Earners:
    """How a picture calls those who earn, how far they are, and what they earn."""

    name: str
    steps: str
    reward: str


AGENTS = Earners("agent", "steps of an agent", "reward, mean of a round's episodes")
DESKS = Earners("desk", "days that a desk has learned by", "log return of a day, mean of a round")

MANY = 30  # parties: beyond this their names and markers do not fit, and sorted gains are drawn instead
MANY_LINES = 8  # lines that can be told apart by colour and marker


def draw_curves(
    file: Path, lines: Mapping[str, Line], metric: str, trivial: float = float("nan"), name: str = "majority class"
) -> Path:
    """Score by round, one line a method, and what is reached without learning."""
    with picture(file, lines) as ((axes,), styles):
        lines_on(axes, lines, styles, markersize=5)
        if trivial == trivial:
            axes.axhline(trivial, color="#555555", linestyle=":", linewidth=1.8, label=name)
        axes.set_ylabel(f"{label(metric, 40)}, mean over parties")
        axes.set_title("Mean score of the parties' own models, round by round", loc="left")
    return file


def draw_sweep(
    file: Path,
    lines: Mapping[str, Line],
    at: Sequence[str],
    metric: str,
    printed: Sequence[tuple[int, float]],
    title: str,
) -> Path:
    """Score by what was gone through, one line a method; stars are what a paper prints, by their place."""
    with picture(file, lines, whole=False) as ((axes,), styles):
        lines_on(axes, lines, styles, markersize=5)
        if printed:
            axes.plot(*zip(*printed, strict=True), "k*", markersize=12, label="the paper")
        axes.set_xticks(range(len(at)), [label(text) for text in at])
        axes.set_ylabel(f"{label(metric, 40)}, mean over parties")
        axes.set_title(label(title, 90), loc="left")
    return file


def draw_cells(
    file: Path,
    lines: Mapping[str, Line],
    cells: Sequence[str],
    metric: str,
    printed: Mapping[tuple[str, int], float],
    title: str,
) -> Path:
    """A table as a picture: score by cell, a marker a method over the span of its seeds, a star for what a paper
    prints of it."""
    with picture(file, lines, whole=False) as ((axes,), styles):
        for place in range(0, len(cells), 2):
            axes.axvspan(place - 0.5, place + 0.5, color="#f2f2f2", linewidth=0)
        for aside, (method, line) in zip(np.linspace(-0.45, 0.45, len(lines) + 2)[1:-1], lines.items(), strict=True):
            style = {**styles[method], "linestyle": "none", "markersize": 5}
            if style["marker"] in "|_":  # of training alone, which would be lost in its own span, and of no learning
                style |= {"marker": "_", "markersize": 12, "markeredgewidth": 2.2}
            axes.plot(line.x + aside, line.y, label=label(method), **style)
            if line.low is not None and line.high is not None:
                axes.vlines(line.x + aside, line.low, line.high, color=style["color"], linewidth=1.2)
            stars = [(place + aside, value) for (of, place), value in printed.items() if of == method]
            for x, y in stars:
                axes.plot(x, y, "*", color=style["color"], markersize=11, markeredgecolor="black", markeredgewidth=0.6)
        if printed:
            axes.plot([], [], "*", color="white", markersize=11, markeredgecolor="black", label="the paper")
        axes.set_xlim(-0.5, len(cells) - 0.5)
        under = ["\n".join(map(label, text.split(", "))) for text in cells]  # one below the other, so that many fit
        axes.set_xticks(range(len(cells)), under, fontsize=10 if len(cells) <= 6 else 7)
        axes.set_ylabel(f"{label(metric, 40)}, mean over parties")
        axes.set_title(label(title, 90), loc="left")
    return file


def draw_spikes(file: Path, lines: Mapping[str, Line]) -> Path:
    """The change at aggregation by round (Fed+ v2, fig. 1a): mean over parties, the band one standard deviation."""
    with picture(file, lines) as ((axes,), styles):
        lines_on(axes, lines, styles, markersize=4)
        axes.set_ylim(bottom=-0.03 * axes.get_ylim()[1])  # so that a line at 0 is seen
        axes.set_ylabel("‖change at aggregation‖, mean ± sd over parties")
        axes.set_title("How far an aggregation throws the parties' models", loc="left")
    return file


def draw_rewards(
    file: Path, rewards: Mapping[str, Numbers], steps: Numbers, method: str, merged: bool, who: Earners
) -> Path:
    """What agents or desks earned in each round, by the steps that one took; a tick where they merged."""
    few = len(rewards) <= MANY_LINES
    with picture(file, rewards, whole=False) as ((axes,), styles):
        for name, earned in rewards.items():
            style = styles[name] if few else {"color": "#999999"}
            told = {"label": f"{who.name} {label(name)}", "markersize": 3} if few else {}
            axes.plot(steps, earned, **{**style, "linewidth": 1.2 if few else 0.6, **told})
        mean = np.ma.masked_invalid(np.stack(list(rewards.values()))).mean(0)
        axes.plot(steps, mean, color="black", linewidth=2.4, label=f"mean of the {who.name}s")
        if merged:
            tick: dict[str, Any] = {"marker": "|", "markersize": 9, "color": "black", "linestyle": "none"}
            low = np.full(len(steps), 0.012)
            axes.plot(steps, low, **tick, transform=axes.get_xaxis_transform(), label="merges")
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
        axes.set_xlabel(who.steps)
        axes.set_ylabel(who.reward)
        axes.set_title(f"{label(method, 60)}: what the {who.name}s earned", loc="left")
    return file


def draw_earned(file: Path, lines: Mapping[str, Line], merges: Numbers, who: Earners) -> Path:
    """What they earned, the mean over them, by the steps that one took, a line a method; a tick where they merged."""
    with picture(file, lines) as ((axes,), styles):
        lines_on(axes, lines, styles, markersize=3)
        low = np.full(len(merges), 0.012)
        tick: dict[str, Any] = {"marker": "|", "markersize": 9, "color": "black", "linestyle": "none"}
        axes.plot(merges, low, **tick, transform=axes.get_xaxis_transform(), label="merges" if len(merges) else "")
        axes.set_xlabel(who.steps)
        axes.set_ylabel(who.reward)
        axes.set_title(f"What the {who.name}s earned", loc="left")
    return file


def draw_collapse(
    file: Path,
    learned: Mapping[str, Line],
    norms: Mapping[str, Line],
    marks: Mapping[str, int] | None = None,
    measure: str = "training loss",
) -> Path:
    """What is learned and the centre's length by round (after Fed+ v2 fig. 1b), collapses marked."""
    with picture(file, learned, rows=2) as ((above, below), styles):
        for axes, lines in ((above, learned), (below, norms)):
            lines_on(axes, lines, styles, markersize=4)
            _log_if_wide(axes, lines)
        for method, at in (marks or {}).items():
            for axes in (above, below):
                axes.axvline(at, color=styles[method]["color"], linewidth=1.0, linestyle=":")
            text = {"color": styles[method]["color"], "rotation": 90, "va": "top", "ha": "right", "fontsize": 8}
            above.text(at, 0.98, f"{label(method)} collapses ", transform=above.get_xaxis_transform(), **text)
        above.set_xlabel("")
        above.set_ylabel(measure)
        below.set_ylabel("length of the centre")
        above.set_title("Does what was learned stay learned?", loc="left")
    return file


def draw_hyper(file: Path, tuned: Mapping[str, Sequence[Mapping[str, Numbers]]]) -> Path:
    """The path of the mean of every hyper-parameter (representation matching, fig. 3), and what was drawn as dots.

    ``tuned`` has numbers by round, one mapping a seed: "round", "lr", "work", and, where they are known, "lr_mean",
    "work_mean", a loss of the centre ("validation" or "received_loss") and "went_back". Dots are of the first seed.
    """
    losses = [name for name in ("validation", "received_loss") if any(name in each[0] for each in tuned.values())]
    with picture(file, tuned, rows=2 + bool(losses)) as (panels, styles):
        for axes, name in zip(panels, ("lr", "work", *losses), strict=False):
            lines = {}
            for method, each in tuned.items():
                shown = f"{name}_mean" if f"{name}_mean" in each[0] else name
                if shown in each[0]:
                    lines[method] = Line.over(each[0]["round"], [series[shown] for series in each])
                if shown != name:
                    axes.plot(each[0]["round"], each[0][name], ".", color=styles[method]["color"], alpha=0.35, zorder=1)
                _mark_returns(axes, each[0], styles[method]["color"], named=name == "lr")
            lines_on(axes, lines, styles, markersize=0)  # dots are what was drawn
            _log_if_wide(axes, lines)
            if name == "lr":
                axes.set_yscale("log")
            axes.set_ylabel({"lr": "learning rate", "work": "work a round"}.get(name, "loss of the centre"))
            axes.set_xlabel("round" if axes is panels[-1] else "")
        panels[0].set_title("What the tuner tried (dots) and where its mean went (lines)", loc="left")
    return file


def _log_if_wide(axes: Axes, lines: Mapping[str, Line]) -> None:
    finite = np.concatenate([line.y[np.isfinite(line.y)] for line in lines.values()] or [np.ones(1)])
    if len(finite) and finite.min() > 0 and finite.max() > 50 * np.median(finite):
        axes.set_yscale("log")


def _mark_returns(axes: Axes, series: Mapping[str, Numbers], color: str, named: bool) -> None:
    """The rounds before which a tuner went back to an earlier centre."""
    if "went_back" not in series:
        return
    at = series["round"][np.isfinite(series["went_back"])]
    for round in at:
        axes.axvline(round, color=color, linewidth=1.0, linestyle=":", zorder=0)
    if named and len(at):
        top = axes.get_xaxis_transform()
        axes.plot(at, np.full(len(at), 0.97), "v", color=color, transform=top, clip_on=False, label="went back")


def draw_walk(file: Path, lines: Mapping[str, Line], previous: Mapping[str, float], metric: str) -> Path:
    """The score from the party's own model to the new centre (Fed+ v2, fig. 1c), a dotted line for the last centre."""
    with picture(file, lines, whole=False) as ((axes,), styles):
        lines_on(axes, lines, styles, markersize=5)
        for method, score in previous.items():
            if np.isfinite(score):
                axes.axhline(score, color=styles[method]["color"], linestyle=":", linewidth=1.2)
        axes.set_xlabel("λ: from the party's model after its local work (0) to the new centre (1)")
        axes.set_ylabel(f"{label(metric, 40)}, mean over parties")
        axes.set_title("Before and after aggregation; dotted: the centre of the round before", loc="left")
    return file


def draw_parties(
    file: Path, names: Sequence[str], scores: Mapping[str, Numbers], metric: str, higher_is_better: bool = True
) -> Path:
    """Who gained and who lost against training alone, which is ``scores["Local"]``."""
    sign = 1 if higher_is_better else -1
    alone = scores[ALONE]
    judged = np.count_nonzero(~np.isnan(alone))
    order = np.argsort(sign * alone, kind="stable")[:judged]  # nan sorts last
    with picture(file, scores, whole=False) as ((axes,), styles):
        others = {method: values[order] for method, values in scores.items() if method != ALONE}
        side = label(metric, 40)
        if len(order) > MANY:
            _gains(axes, others, alone[order], sign, styles)
            axes.set_ylabel(f"gain over training alone, {side}")
        else:
            _markers(axes, others, alone[order], [names[i] for i in order], styles)
            axes.set_ylabel(side)
            better = "above" if sign > 0 else "below"
            axes.set_title(f"Who gained by joining: a marker {better} the black bar beats training alone", loc="left")
    return file


def _markers(
    axes: Axes,
    others: Mapping[str, Numbers],
    alone: Numbers,
    names: Sequence[str],
    styles: Mapping[str, dict[str, Any]],
) -> None:
    places = np.arange(len(alone))
    for place in places[::2]:
        axes.axvspan(place - 0.5, place + 0.5, color="#f2f2f2", linewidth=0)
    axes.hlines(alone, places - 0.42, places + 0.42, color="black", linewidth=2.2, label=ALONE)
    for aside, (method, values) in zip(np.linspace(-0.45, 0.45, len(others) + 2)[1:-1], others.items(), strict=True):
        style = {**styles[method], "linestyle": "none", "markersize": 6 if len(alone) < 16 else 4}
        axes.plot(places + aside, values, label=label(method), **style)
    axes.set_xlim(-0.5, max(len(alone), 1) - 0.5)
    shown = [label(name, 18) for name in names]
    axes.set_xticks(places, shown, rotation=90 if max(map(len, shown), default=0) * len(shown) > 70 else 0)
    axes.set_xlabel("party, from worst to best alone")


def _gains(axes: Axes, others: Mapping[str, Numbers], alone: Numbers, sign: int, styles: Styles) -> None:
    share = 100 * (np.arange(len(alone)) + 0.5) / len(alone)
    axes.axhline(0, color="black", linewidth=1.8, linestyle="--", label=ALONE)
    for method, values in others.items():
        style = {**styles[method], "markevery": max(1, len(alone) // 12)}
        axes.plot(share, np.sort(sign * (values - alone)), markersize=5, linewidth=1.8, label=label(method), **style)
    axes.set_xlabel(f"% of the {len(alone)} parties, each line sorted from the greatest loss to the greatest gain")
    axes.set_title("Who gained by joining: where a line is above zero, parties beat training alone", loc="left")
