"""Pictures of plain numbers, from a live federation or a stored study; each is one PNG file.

Labels are methods; "Local" is local training and is drawn in black.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .figure import LOCAL_LABEL, BandLine, Numbers, Styles, draw_lines, label, open_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class RewardLabels:
    """The words for the earners, their progress and their reward on a picture."""

    name: str
    steps: str
    reward: str


AGENT_LABELS = RewardLabels("agent", "steps of an agent", "reward, mean of a round's episodes")
DESK_LABELS = RewardLabels("desk", "days that a desk has trained on", "log return per day, mean of a round")

MAX_NAMED_PARTIES = 30  # with more parties, sorted gains are drawn without names
MAX_DISTINCT_LINES = 8  # lines that differ in color and marker


def draw_curves(
    file: Path, lines: Mapping[str, BandLine], metric: str, trivial: float = float("nan"), name: str = "majority class"
) -> Path:
    """Draw the score by round, one line per method, and the trivial baseline."""
    with open_figure(file, lines) as ((axes,), styles):
        draw_lines(axes, lines, styles, markersize=5)
        if trivial == trivial:
            axes.axhline(trivial, color="#555555", linestyle=":", linewidth=1.8, label=name)
        axes.set_ylabel(f"{label(metric, 40)}, mean over parties")
        axes.set_title("Mean score of the parties' personal models, round by round", loc="left")
    return file


def draw_sweep(
    file: Path,
    lines: Mapping[str, BandLine],
    value_labels: Sequence[str],
    metric: str,
    paper_values: Sequence[tuple[int, float]],
    title: str,
) -> Path:
    """Draw the score by swept value, one line per method; stars are the paper's values by index."""
    with open_figure(file, lines, integer_rounds=False) as ((axes,), styles):
        draw_lines(axes, lines, styles, markersize=5)
        if paper_values:
            axes.plot(*zip(*paper_values, strict=True), "k*", markersize=12, label="the paper")
        axes.set_xticks(range(len(value_labels)), [label(text) for text in value_labels])
        axes.set_ylabel(f"{label(metric, 40)}, mean over parties")
        axes.set_title(label(title, 90), loc="left")
    return file


def draw_cells(
    file: Path,
    lines: Mapping[str, BandLine],
    cells: Sequence[str],
    metric: str,
    paper_values: Mapping[tuple[str, int], float],
    title: str,
) -> Path:
    """Draw a table: score by cell, one marker per method with the span of its seeds, stars for the paper's values."""
    with open_figure(file, lines, integer_rounds=False) as ((axes,), styles):
        for position in range(0, len(cells), 2):
            axes.axvspan(position - 0.5, position + 0.5, color="#f2f2f2", linewidth=0)
        for offset, (method, line) in zip(np.linspace(-0.45, 0.45, len(lines) + 2)[1:-1], lines.items(), strict=True):
            style = {**styles[method], "linestyle": "none", "markersize": 5}
            if style["marker"] in "|_":  # of Local, which would hide in its own span, and of the baseline
                style |= {"marker": "_", "markersize": 12, "markeredgewidth": 2.2}
            axes.plot(line.x + offset, line.y, label=label(method), **style)
            if line.low is not None and line.high is not None:
                axes.vlines(line.x + offset, line.low, line.high, color=style["color"], linewidth=1.2)
            stars = [(place + offset, value) for (of, place), value in paper_values.items() if of == method]
            for x, y in stars:
                axes.plot(x, y, "*", color=style["color"], markersize=11, markeredgecolor="black", markeredgewidth=0.6)
        if paper_values:
            axes.plot([], [], "*", color="white", markersize=11, markeredgecolor="black", label="the paper")
        axes.set_xlim(-0.5, len(cells) - 0.5)
        tick_labels = ["\n".join(map(label, text.split(", "))) for text in cells]  # stacked, so that many fit
        axes.set_xticks(range(len(cells)), tick_labels, fontsize=10 if len(cells) <= 6 else 7)
        axes.set_ylabel(f"{label(metric, 40)}, mean over parties")
        axes.set_title(label(title, 90), loc="left")
    return file


def draw_spikes(file: Path, lines: Mapping[str, BandLine]) -> Path:
    """Draw by round how far aggregation moves the parties' models (Fed+ v2, fig. 1a): mean and standard deviation."""
    with open_figure(file, lines) as ((axes,), styles):
        draw_lines(axes, lines, styles, markersize=4)
        axes.set_ylim(bottom=-0.03 * axes.get_ylim()[1])  # so that a line at 0 is visible
        axes.set_ylabel("‖change at aggregation‖, mean ± sd over parties")
        axes.set_title("Change of the parties' models at aggregation", loc="left")
    return file


def draw_rewards(
    file: Path, rewards: Mapping[str, Numbers], steps: Numbers, method: str, aggregates: bool, labels: RewardLabels
) -> Path:
    """Draw the reward of each agent or desk by its steps; ticks mark aggregations."""
    distinct = len(rewards) <= MAX_DISTINCT_LINES
    with open_figure(file, rewards, integer_rounds=False) as ((axes,), styles):
        for name, earned in rewards.items():
            style = styles[name] if distinct else {"color": "#999999"}
            line_style = {"label": f"{labels.name} {label(name)}", "markersize": 3} if distinct else {}
            axes.plot(steps, earned, **{**style, "linewidth": 1.2 if distinct else 0.6, **line_style})
        mean = np.ma.masked_invalid(np.stack(list(rewards.values()))).mean(0)
        axes.plot(steps, mean, color="black", linewidth=2.4, label=f"mean of the {labels.name}s")
        if aggregates:
            tick: dict[str, Any] = {"marker": "|", "markersize": 9, "color": "black", "linestyle": "none"}
            tick_height = np.full(len(steps), 0.012)
            axes.plot(steps, tick_height, **tick, transform=axes.get_xaxis_transform(), label="aggregations")
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
        axes.set_xlabel(labels.steps)
        axes.set_ylabel(labels.reward)
        axes.set_title(f"{label(method, 60)}: rewards of the {labels.name}s", loc="left")
    return file


def draw_reward_lines(
    file: Path, lines: Mapping[str, BandLine], aggregation_steps: Numbers, labels: RewardLabels
) -> Path:
    """Draw the mean reward by steps, one line per method; ticks mark aggregations."""
    with open_figure(file, lines) as ((axes,), styles):
        draw_lines(axes, lines, styles, markersize=3)
        tick_height = np.full(len(aggregation_steps), 0.012)
        tick: dict[str, Any] = {"marker": "|", "markersize": 9, "color": "black", "linestyle": "none"}
        axes.plot(
            aggregation_steps,
            tick_height,
            **tick,
            transform=axes.get_xaxis_transform(),
            label="aggregations" if len(aggregation_steps) else "",
        )
        axes.set_xlabel(labels.steps)
        axes.set_ylabel(labels.reward)
        axes.set_title(f"Mean reward of the {labels.name}s", loc="left")
    return file


def draw_collapse(
    file: Path,
    upper_lines: Mapping[str, BandLine],
    norms: Mapping[str, BandLine],
    collapse_rounds: Mapping[str, int] | None = None,
    upper_label: str = "training loss",
) -> Path:
    """Draw the loss and the norm of the global model by round (after Fed+ v2 fig. 1b), with collapses marked."""
    with open_figure(file, upper_lines, rows=2) as ((above, below), styles):
        for axes, lines in ((above, upper_lines), (below, norms)):
            draw_lines(axes, lines, styles, markersize=4)
            _log_if_wide(axes, lines)
        for method, at in (collapse_rounds or {}).items():
            for axes in (above, below):
                axes.axvline(at, color=styles[method]["color"], linewidth=1.0, linestyle=":")
            text = {"color": styles[method]["color"], "rotation": 90, "va": "top", "ha": "right", "fontsize": 8}
            above.text(at, 0.98, f"{label(method)} collapses ", transform=above.get_xaxis_transform(), **text)
        above.set_xlabel("")
        above.set_ylabel(upper_label)
        below.set_ylabel("norm of the global model")
        above.set_title("Does training stay stable?", loc="left")
    return file


def draw_hyperparameters(file: Path, tuned: Mapping[str, Sequence[Mapping[str, Numbers]]]) -> Path:
    """Draw the mean of every hyperparameter by round (representation matching, fig. 3); dots are the drawn values.

    ``tuned`` has one mapping per seed, with numbers by round: "round", "lr", "work" and, where they are known,
    "lr_mean", "work_mean", a loss of the global model ("validation" or "received_loss") and "rolled_back". Dots are of
    the first seed.
    """
    losses = [name for name in ("validation", "received_loss") if any(name in each[0] for each in tuned.values())]
    with open_figure(file, tuned, rows=2 + bool(losses)) as (panels, styles):
        for axes, name in zip(panels, ("lr", "work", *losses), strict=False):
            lines = {}
            for method, each in tuned.items():
                series_name = f"{name}_mean" if f"{name}_mean" in each[0] else name
                if series_name in each[0]:
                    lines[method] = BandLine.from_repeats(each[0]["round"], [series[series_name] for series in each])
                if series_name != name:
                    axes.plot(each[0]["round"], each[0][name], ".", color=styles[method]["color"], alpha=0.35, zorder=1)
                _mark_rollbacks(axes, each[0], styles[method]["color"], named=name == "lr")
            draw_lines(axes, lines, styles, markersize=0)  # no markers: dots are the drawn values
            _log_if_wide(axes, lines)
            if name == "lr":
                axes.set_yscale("log")
            axes.set_ylabel({"lr": "learning rate", "work": "work per round"}.get(name, "loss of the global model"))
            axes.set_xlabel("round" if axes is panels[-1] else "")
        panels[0].set_title("Values drawn by the tuner (dots) and the mean of its distribution (lines)", loc="left")
    return file


def _log_if_wide(axes: Axes, lines: Mapping[str, BandLine]) -> None:
    finite = np.concatenate([line.y[np.isfinite(line.y)] for line in lines.values()] or [np.ones(1)])
    if len(finite) and finite.min() > 0 and finite.max() > 50 * np.median(finite):
        axes.set_yscale("log")


def _mark_rollbacks(axes: Axes, series: Mapping[str, Numbers], color: str, named: bool) -> None:
    """Mark the rounds before which the tuner rolled back to an earlier global model."""
    if "rolled_back" not in series:
        return
    rollback_rounds = series["round"][np.isfinite(series["rolled_back"])]
    for round in rollback_rounds:
        axes.axvline(round, color=color, linewidth=1.0, linestyle=":", zorder=0)
    if named and len(rollback_rounds):
        top = axes.get_xaxis_transform()
        axes.plot(
            rollback_rounds,
            np.full(len(rollback_rounds), 0.97),
            "v",
            color=color,
            transform=top,
            clip_on=False,
            label="rollback",
        )


def draw_interpolation(
    file: Path, lines: Mapping[str, BandLine], previous_scores: Mapping[str, float], metric: str
) -> Path:
    """Draw the score from personal to new global model (Fed+ v2, fig. 1c), dotted for the old global model."""
    with open_figure(file, lines, integer_rounds=False) as ((axes,), styles):
        draw_lines(axes, lines, styles, markersize=5)
        for method, score in previous_scores.items():
            if np.isfinite(score):
                axes.axhline(score, color=styles[method]["color"], linestyle=":", linewidth=1.2)
        axes.set_xlabel("λ: from the party's model after local training (0) to the new global model (1)")
        axes.set_ylabel(f"{label(metric, 40)}, mean over parties")
        axes.set_title("Before and after aggregation; dotted: the global model of the round before", loc="left")
    return file


def draw_party_scores(
    file: Path, names: Sequence[str], scores: Mapping[str, Numbers], metric: str, higher_is_better: bool = True
) -> Path:
    """Draw each party's gain or loss against local training, which is ``scores["Local"]``."""
    sign = 1 if higher_is_better else -1
    local = scores[LOCAL_LABEL]
    evaluated_count = np.count_nonzero(~np.isnan(local))
    order = np.argsort(sign * local, kind="stable")[:evaluated_count]  # nan sorts last
    with open_figure(file, scores, integer_rounds=False) as ((axes,), styles):
        others = {method: values[order] for method, values in scores.items() if method != LOCAL_LABEL}
        metric_label = label(metric, 40)
        if len(order) > MAX_NAMED_PARTIES:
            _draw_sorted_gains(axes, others, local[order], sign=sign, styles=styles)
            axes.set_ylabel(f"gain over local training, {metric_label}")
        else:
            _draw_party_markers(axes, others, local[order], names=[names[i] for i in order], styles=styles)
            axes.set_ylabel(metric_label)
            better = "above" if sign > 0 else "below"
            axes.set_title(f"Gain by joining: a marker {better} the black bar beats local training", loc="left")
    return file


def _draw_party_markers(
    axes: Axes,
    others: Mapping[str, Numbers],
    local: Numbers,
    names: Sequence[str],
    styles: Mapping[str, dict[str, Any]],
) -> None:
    positions = np.arange(len(local))
    for position in positions[::2]:
        axes.axvspan(position - 0.5, position + 0.5, color="#f2f2f2", linewidth=0)
    axes.hlines(local, positions - 0.42, positions + 0.42, color="black", linewidth=2.2, label=LOCAL_LABEL)
    for offset, (method, values) in zip(np.linspace(-0.45, 0.45, len(others) + 2)[1:-1], others.items(), strict=True):
        style = {**styles[method], "linestyle": "none", "markersize": 6 if len(local) < 16 else 4}
        axes.plot(positions + offset, values, label=label(method), **style)
    axes.set_xlim(-0.5, max(len(local), 1) - 0.5)
    shown = [label(name, 18) for name in names]
    axes.set_xticks(positions, shown, rotation=90 if max(map(len, shown), default=0) * len(shown) > 70 else 0)
    axes.set_xlabel("party, from worst to best under local training")


def _draw_sorted_gains(axes: Axes, others: Mapping[str, Numbers], local: Numbers, sign: int, styles: Styles) -> None:
    share = 100 * (np.arange(len(local)) + 0.5) / len(local)
    axes.axhline(0, color="black", linewidth=1.8, linestyle="--", label=LOCAL_LABEL)
    for method, values in others.items():
        style = {**styles[method], "markevery": max(1, len(local) // 12)}
        axes.plot(share, np.sort(sign * (values - local)), markersize=5, linewidth=1.8, label=label(method), **style)
    axes.set_xlabel(f"% of the {len(local)} parties, each line sorted from largest loss to largest gain")
    axes.set_title("Gain by joining: where a line is above zero, parties beat local training", loc="left")
