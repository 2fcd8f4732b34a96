"""A study as a folder to pass on: study.json, two pictures, and one page that opens anywhere, without a network."""

from __future__ import annotations

import base64
import html
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from . import __version__
from .evaluate import Numbers
from .parties.splits import Rows
from .settings import describe, unknown
from .store import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from .study import Study

FILES = ("study.json", "curves.png", "parties.png", "report.html")
MANY = 30  # parties: beyond this their names and markers do not fit, and sorted gains are drawn instead

# Okabe and Ito's colours, which the colour-blind can tell apart, without the yellow that white swallows.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_DASHES = ("-", (0, (6, 1.5)), (0, (4, 1, 1, 1)), (0, (2, 1)), (0, (8, 2, 2, 2)))


def draw(study: Study, kind: str, file: Path) -> Path:
    """Draw "curves" (score by round) or "parties" (who gained and who lost) into a PNG file."""
    if kind not in _KINDS:
        raise unknown("picture", kind, _KINDS)
    from matplotlib.figure import Figure  # here, because it takes a second
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure = Figure(figsize=(9.6, 5.0), dpi=150, layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12))
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    _KINDS[kind](study, axes)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper", frameon=False)
    file.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # a party may be named in letters that the font lacks
        figure.savefig(file, format="png", backend="agg")
    return file


def _curves(study: Study, axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    for method in study.methods:
        curves = np.array([result.curve for result in study.of(method)], dtype=float)  # [seeds, points, 3]
        rounds, own = curves[0, :, 0], curves[:, :, 1]
        style = _style(study, method)
        if len(own) > 1:
            axes.fill_between(rounds, own.min(0), own.max(0), color=style["color"], alpha=0.15, linewidth=0)
        axes.plot(rounds, own.mean(0), label=_label(method), markersize=5, linewidth=1.8, **style)
    majority = study.of("Local")[0].scores.majority.mean
    if majority == majority:
        axes.axhline(majority, color="#555555", linestyle=":", linewidth=1.8, label="majority class")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("round")
    axes.set_ylabel(f"{_label(_metric(study))}, mean over parties")
    axes.set_title("Mean score of the parties' own models, round by round", loc="left")


def _parties(study: Study, axes: Axes) -> None:
    alone = _own(study, "Local")
    judged = np.count_nonzero(~np.isnan(alone))
    order = np.argsort(_sign(study) * alone, kind="stable")[:judged]  # nan sorts last
    (_gains if len(order) > MANY else _markers)(study, axes, order, alone[order])


def _markers(study: Study, axes: Axes, order: Rows, alone: Numbers) -> None:
    others = [method for method in study.methods if method != "Local"]
    places = np.arange(len(order))
    for place in places[::2]:
        axes.axvspan(place - 0.5, place + 0.5, color="#f2f2f2", linewidth=0)
    axes.hlines(alone, places - 0.42, places + 0.42, color="black", linewidth=2.2, label="Local")
    for aside, method in zip(np.linspace(-0.45, 0.45, len(others) + 2)[1:-1], others, strict=True):
        style = {**_style(study, method), "linestyle": "none", "markersize": 6 if len(order) < 16 else 4}
        axes.plot(places + aside, _own(study, method)[order], label=_label(method), **style)
    axes.set_xlim(-0.5, max(len(order), 1) - 0.5)
    labels = [_label(study.results[0].scores.names[i], 18) for i in order]
    axes.set_xticks(places, labels, rotation=90 if max(map(len, labels), default=0) * len(labels) > 70 else 0)
    axes.set_xlabel("party, from worst to best alone")
    axes.set_ylabel(_label(_metric(study)))
    side = "above" if _sign(study) > 0 else "below"
    axes.set_title(f"Who gained by joining: a marker {side} the black bar beats training alone", loc="left")


def _gains(study: Study, axes: Axes, order: Rows, alone: Numbers) -> None:
    share = 100 * (np.arange(len(order)) + 0.5) / len(order)
    axes.axhline(0, color="black", linewidth=1.8, linestyle="--", label="Local")
    for method in study.methods:
        if method != "Local":
            gain = np.sort(_sign(study) * (_own(study, method)[order] - alone))
            style = {**_style(study, method), "markevery": max(1, len(order) // 12)}
            axes.plot(share, gain, markersize=5, linewidth=1.8, label=_label(method), **style)
    axes.set_xlabel(f"% of the {len(order)} parties, each line sorted from the greatest loss to the greatest gain")
    axes.set_ylabel(f"gain in {_label(study.results[0].scores.metric)} over training alone")
    axes.set_title("Who gained by joining: where a line is above zero, parties beat training alone", loc="left")


_KINDS: dict[str, Callable[[Study, Axes], None]] = {"curves": _curves, "parties": _parties}


def _style(study: Study, method: str) -> dict[str, Any]:
    """A colour, a marker and a line of its own for each method, the same in every picture."""
    if method == "Local":
        return {"color": "black", "linestyle": "--", "marker": "|"}
    at = [other for other in study.methods if other != "Local"].index(method)
    parts = {"color": _COLORS, "linestyle": _DASHES, "marker": _MARKERS}
    return {name: choices[at % len(choices)] for name, choices in parts.items()}


def _own(study: Study, method: str) -> Numbers:
    """Each party's score with a method, the mean over seeds."""
    mean: Numbers = np.mean([result.scores.own.values for result in study.of(method)], axis=0)
    return mean


def _sign(study: Study) -> int:
    return 1 if study.results[0].scores.own.higher_is_better else -1


def _metric(study: Study) -> str:
    return f"{study.results[0].scores.metric} ({'higher' if _sign(study) > 0 else 'lower'} is better)"


def _label(text: str, most: int = 28) -> str:
    r"""Text as matplotlib takes it literally: no formulas, no line breaks, not too long.

    >>> print(_label("costs $5\nand $6"), _label("_hidden"), _label("party number 17", most=8))
    costs \$5 and \$6  _hidden part… 17
    """
    line = " ".join(text.split())
    line = line if len(line) <= most else line[: most // 2] + "…" + line[1 - most // 2 :]  # ends tell names apart
    return (" " if line.startswith("_") else "") + line.replace("$", r"\$")


def write(study: Study, folder: Path) -> Path:
    """Write study.json, the pictures and report.html, whole or not at all; an older study there is replaced."""
    with replacing(folder, FILES) as new:
        (new / "study.json").write_text(study.to_json(), encoding="utf-8")
        pictures = {kind: draw(study, kind, new / f"{kind}.png").read_bytes() for kind in _KINDS}
        (new / "report.html").write_text(page(study, pictures), encoding="utf-8")
    return folder


def page(study: Study, pictures: dict[str, bytes]) -> str:
    """The report as one HTML page that needs nothing else: the pictures are in it."""
    settings = {
        **{key: value for key, value in study.settings.items() if key != "algorithms"},
        "seeds": sorted({result.seed for result in study.results}),
        "refused updates": sum(result.refused for result in study.results),
        "made by": f"descant {__version__}",
    }
    return _PAGE.format(
        style=_STYLE,
        table=replace(study.table(), verdict="")._repr_html_(),
        settings=_rows((key, _phrase(value)) for key, value in settings.items()),
        algorithms=_rows(_changes(record) for record in study.settings.get("algorithms", ())),
        verdict=html.escape(study.verdict() or "Only local training was run: there is nothing to compare it with."),
        metric=html.escape(_metric(study)),
        side="above" if _sign(study) > 0 else "below",
        **{kind: base64.b64encode(png).decode("ascii") for kind, png in pictures.items()},
    )


def _rows(pairs: Iterator[tuple[str, str]]) -> str:
    return "\n".join(f"<tr><th>{html.escape(key)}</th><td>{html.escape(text)}</td></tr>" for key, text in pairs)


def _changes(record: dict[str, Any]) -> tuple[str, str]:
    """A method's name, and what it changes: FedAvg is the base."""
    from .algorithms import FedAvg

    base = describe(FedAvg())
    changed = {key: value for key, value in record.items() if key not in ("is", "name") and value != base.get(key)}
    return str(record.get("name")), ", ".join(f"{key}: {_phrase(value)}" for key, value in changed.items()) or "nothing"


def _phrase(value: Any) -> str:
    """A described record as a person would write it.

    >>> _phrase({"is": "Sgd", "lr": 0.1, "steps": None, "options": {}})
    'Sgd(lr=0.1)'
    """
    if isinstance(value, dict):
        parts = [f"{key}={_phrase(part)}" for key, part in value.items() if key != "is" and part not in (None, {}, [])]
        return f"{value.get('is', '')}({', '.join(parts)})" if parts else str(value.get("is", "–"))
    if isinstance(value, list):
        return ", ".join(_phrase(part) for part in value) or "none"
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #59636e; --line: #d5dae0; --paper: #fff; --card: #f4f6f8 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ec; --soft: #a3adb8; --line: #3a424b; --paper: #14181c; --card: #1f252b } }
body { margin: 0 auto; max-width: 60rem; padding: 2rem 1.25rem 4rem; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif }
h1 { font-size: 1.9rem; margin: 0 0 .8rem } h2 { font-size: 1.2rem; margin: 2.2rem 0 .6rem; break-after: avoid }
p.verdict { font-size: 1.2rem; background: var(--card); border-left: 4px solid #0072B2; padding: .9rem 1.1rem;
  margin: 0; color: var(--ink) }
.wide { overflow-x: auto } table { border-collapse: collapse; font-size: .93rem; width: 100% }
th, td { padding: .4rem .7rem; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top }
th { font-weight: 600; white-space: nowrap } thead th { border-bottom-width: 2px } td { overflow-wrap: anywhere }
.scores th + th, .scores td + td { text-align: right; font-variant-numeric: tabular-nums }
.scores td { white-space: nowrap } .scores td:first-child { font-weight: 600 } figure { margin: 0; break-inside: avoid }
img { width: 100%; height: auto; background: #fff; border-radius: 6px }
p, figcaption { color: var(--soft) } tr { break-inside: avoid }
@media print { body { max-width: none; padding: 0; font-size: 11pt } }
"""

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Did joining help?</title><style>{style}</style></head><body>
<h1>Did joining help?</h1>
<p class="verdict">{verdict}</p>
<h2>Method by method</h2>
<div class="wide scores">{table}</div>
<p>Every party judges its own model on its own test set: {metric}. Mean, worst and spread (standard deviation) are over
the parties; ± is over the seeds; “centre” is the common model on the same test sets. “Gained” and “lost” count the
parties that are better and worse off than with Local, which is training alone with the same work. “Majority class” is
what a party reaches by always giving its most frequent answer: a method below it is worse than no learning.</p>
<h2>Score by round</h2>
<figure><img alt="The mean score of the parties by round, one line a method" src="data:image/png;base64,{curves}">
<figcaption>How to read it: where a line is {side} the dashed one of Local, joining helps on average. The shade spans
the seeds.</figcaption></figure>
<h2>Party by party</h2>
<figure><img alt="The score of every party with every method" src="data:image/png;base64,{parties}">
<figcaption>How to read it: the black line is training alone; on the side of it that the title names, a party gained by
joining, and on the other side it lost.</figcaption></figure>
<h2>Settings and seeds</h2>
<div class="wide"><table><tbody>{settings}</tbody></table></div>
<h2>The methods, by what they change against FedAvg</h2>
<div class="wide"><table><tbody>{algorithms}</tbody></table></div>
</body></html>
"""
