"""A study as a folder to pass on: study.json, pictures, and one page that opens anywhere, without a network."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import __version__
from ..core.metrics import UNLEARNED, trivial
from ..core.settings import describe, unknown
from ..errors import SettingError
from ..reporting.captions import CAPTIONS, EARNED_BY_DESKS
from ..reporting.figure import Line, Numbers, noted
from ..reporting.html import figure, page_of, pairs, paragraph, phrase, scores, sentences
from ..reporting.participation_timeline import MOST, Presence, draw_presence
from ..reporting.plots import (
    AGENTS,
    DESKS,
    draw_collapse,
    draw_curves,
    draw_earned,
    draw_hyper,
    draw_parties,
    draw_spikes,
    draw_walk,
)
from ..rounds.state import STOOD_IN
from ..storage import replacing
from .portfolio_tables import LEGEND as TRADED
from .portfolio_tables import draw_held, draw_ledger, is_held, is_traded, ledger
from .result import mean_of_known

if TYPE_CHECKING:
    from ..reporting.table import Table
    from .study import Study

LEGEND = (
    "Mean (at the last round), best (of the rounds on the curve), worst, p10 (a tenth of the parties is no better) and "
    "spread (standard deviation) are over the parties, each with its own model on its own test set; ± is over the "
    "seeds. Learned: the mean over those that ever trained; others are judged by the centre, or alone by the model "
    "that all began with, and neither gain nor lose. Centre: the common model. Before, after: the parties' models "
    "before and after their local work of the rounds that were judged. Gained, lost: parties better and worse off than "
    "with Local, which is training alone with the same work. Trained: parties that ever trained."
)


# ── the pictures of a study ───────────────────────────────────────────────────────────────────────────────────────────


def draw(study: Study, kind: str, file: Path) -> Path:
    """Draw one of a study's pictures into a PNG file."""
    if kind not in _KINDS:
        raise unknown("picture", kind, _KINDS)
    if kind not in available(study):
        raise SettingError(
            f"This study has no numbers for the picture {kind!r}. It has: {', '.join(available(study))}."
        )
    with noted(study.note):
        return _KINDS[kind](study, file)


def available(study: Study) -> tuple[str, ...]:
    """The pictures that a study has numbers for."""
    have = {
        "curves": all(result.curve for result in study.results),
        "spikes": all(result.series for result in study.results),
        "collapse": all(result.series for result in study.results),
        "walk": any(result.walk is not None for result in study.results),
        "hyper": bool(_tuned(study)),
        "presence": bool(_coming(study)),
        "rewards": bool(_earning(study)),
        "portfolio": is_traded(study),
        "weights": is_held(study),
    }
    return tuple(kind for kind in _KINDS if have.get(kind, True))


def _curves(study: Study, file: Path) -> Path:
    lines = {}
    for method in study.methods:
        curves = np.array([result.curve for result in study.of(method)], dtype=float)  # [seeds, points, 3]
        lines[method] = Line.over(curves[0, :, 0], curves[:, :, 1])
    scores = study.of("Local")[0].scores
    return draw_curves(file, lines, _metric(study), scores.majority.mean, trivial(scores.metric))


def _parties(study: Study, file: Path) -> Path:
    scores = {m: mean_of_known(np.array([result.learned.values for result in study.of(m)])) for m in study.methods}
    return draw_parties(file, study.results[0].scores.names, scores, _metric(study), _higher(study))


def _series(study: Study, method: str, name: str) -> Numbers:
    """One number a round, the mean over seeds."""
    mean: Numbers = np.mean([result.series[name] for result in study.of(method)], axis=0)
    return mean


def _spikes(study: Study, file: Path) -> Path:
    lines = {}
    for method in study.methods:
        rounds, mean, sd = (_series(study, method, name) for name in ("round", "jump", "jump_sd"))
        lines[method] = Line(rounds, mean, mean - sd, mean + sd)
    return draw_spikes(file, lines)


def _collapse(study: Study, file: Path) -> Path:
    alone = {result.beside for result in study.results}  # whose centre never moves
    losses, norms = (
        {m: Line(_series(study, m, "round"), _series(study, m, what)) for m in study.methods if m not in without}
        for what, without in (("loss", set()), ("norm", alone))
    )
    if len(_earning(study)) < len(study.methods):
        return draw_collapse(file, losses, norms, study.collapses())
    leads = {method: Line(line.x, _lead(study, method)) for method, line in norms.items()}
    return draw_collapse(file, leads, norms, study.collapses(), "earned beyond training alone")


def _lead(study: Study, method: str) -> Numbers:
    """What a method earned beyond training alone, added up over the rounds, the mean over seeds."""
    pairs = zip(study.of(method), study.alone(method), strict=True)
    each = [np.nancumsum(one.series["reward"] - other.series["reward"]) for one, other in pairs]
    return np.asarray(np.mean(each, axis=0))


def _walk(study: Study, file: Path) -> Path:
    walks = {method: [r.walk for r in study.of(method) if r.walk is not None] for method in study.methods}
    walks = {method: found for method, found in walks.items() if found}
    lines = {method: Line.over(found[0].shares, [walk.mean for walk in found]) for method, found in walks.items()}
    previous = {method: float(np.mean([walk.mean_previous for walk in found])) for method, found in walks.items()}
    return draw_walk(file, lines, previous, _metric(study))


def _tuned(study: Study) -> dict[str, list[Mapping[str, Numbers]]]:
    """The numbers by round of the methods that were tuned; training alone only repeats their work."""
    found = {method: study.of(method) for method in study.methods}
    return {m: [r.series for r in each] for m, each in found.items() if each[0].beside != m and "lr" in each[0].series}


def _hyper(study: Study, file: Path) -> Path:
    return draw_hyper(file, _tuned(study))


def _coming(study: Study) -> list[str]:
    """Methods whose parties came and went; those with stand-ins first, because they show most."""
    found = {method: study.of(method)[0] for method in study.methods}
    moving = [m for m, one in found.items() if one.beside != m and one.comes_and_goes and one.centers]
    return sorted(moving, key=lambda m: not any(STOOD_IN in letters for letters in found[m].presence))


def _presence(study: Study, file: Path) -> Path:
    """Of the first seed: with others, others come."""
    shown = {}
    for method in _coming(study)[:MOST]:
        one = study.of(method)[0]
        at, scores = (np.array(values) for values in zip(*one.centers, strict=True))
        shown[method] = Presence(one.scores.names, one.presence, at, scores)
    return draw_presence(file, shown, _metric(study))


def _earning(study: Study) -> list[str]:
    """Methods of agents or desks: their rewards by round are known."""
    return [method for method in study.methods if all("steps" in result.series for result in study.of(method))]


def _rewards(study: Study, file: Path) -> Path:
    lines = {}
    for method in _earning(study):
        taken = _series(study, method, "steps")
        known = taken[np.isfinite(taken)]
        steps = np.cumsum(np.where(np.isfinite(taken), taken, known[0] if len(known) else 0))  # no episode had ended
        lines[method] = Line.over(steps, np.array([result.series["reward"] for result in study.of(method)]))
    merging = [line.x for method, line in lines.items() if method not in {r.beside for r in study.results}]
    return draw_earned(file, lines, merging[0] if merging else np.empty(0), DESKS if is_traded(study) else AGENTS)


_KINDS: dict[str, Callable[[Study, Path], Path]] = {
    "curves": _curves,
    "parties": _parties,
    "spikes": _spikes,
    "collapse": _collapse,
    "walk": _walk,
    "hyper": _hyper,
    "presence": _presence,
    "rewards": _rewards,
    "portfolio": draw_ledger,
    "weights": draw_held,
}
FILES = ("study.json", *(f"{kind}.png" for kind in _KINDS), "report.html")


def _higher(study: Study) -> bool:
    return study.results[0].scores.own.higher_is_better


def _metric(study: Study) -> str:
    return f"{study.results[0].scores.metric} ({'higher' if _higher(study) else 'lower'} is better)"


# ── the folder and the page of a study ────────────────────────────────────────────────────────────────────────────────


def write(study: Study, folder: Path) -> Path:
    """Write study.json, the pictures and report.html, whole or not at all; an older study there is replaced."""
    with replacing(folder, FILES) as new:
        (new / "study.json").write_text(study.to_json(), encoding="utf-8")
        pictures = {kind: draw(study, kind, new / f"{kind}.png").read_bytes() for kind in available(study)}
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
    side = "above" if _higher(study) else "below"
    captions = {**CAPTIONS, "rewards": EARNED_BY_DESKS} if is_traded(study) else CAPTIONS
    beside = trivial(study.results[0].scores.metric)
    majority = f"{beside.capitalize()}: {UNLEARNED[beside]}; a method below it is worse than no learning."
    return page_of(
        "Did joining help?",
        study.verdict() or "Only local training was run: there is nothing to compare it with.",
        paragraph(study.note),
        scores("Method by method", study.table(), f"Scores are {_metric(study)}. {LEGEND} {majority}"),
        *([_traded(ledger(study))] if is_traded(study) else []),
        *(figure(*captions[kind], pictures[kind], side) for kind in captions if kind in pictures),
        sentences("What else was found", (told for told in study.findings() if told != study.note)),
        pairs("Settings and seeds", ((key, phrase(value)) for key, value in settings.items())),
        pairs(
            "The methods, by what they change against FedAvg",
            (_changes(record) for record in study.settings.get("algorithms", ())),
        ),
    )


def _traded(table: Table) -> str:
    return scores("What the portfolios made of it", table, " ".join([TRADED, *table.notes]))


def _changes(record: dict[str, Any]) -> tuple[str, str]:
    """A method's name, and what it changes: FedAvg is the base."""
    from ..algorithms import FedAvg

    base = describe(FedAvg())
    changed = {key: value for key, value in record.items() if key not in ("is", "name") and value != base.get(key)}
    return str(record.get("name")), ", ".join(f"{key}: {phrase(value)}" for key, value in changed.items()) or "nothing"
