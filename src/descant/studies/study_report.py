"""A study as a folder to pass on: study.json, pictures, and one page that opens anywhere, without a network."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import __version__
from ..core.metrics import TRIVIAL_BASELINES, trivial_baseline
from ..core.settings import to_json_values, unknown_name_error
from ..errors import SettingError
from ..reporting.captions import CAPTIONS, EARNED_BY_DESKS
from ..reporting.figure import BandLine, Numbers, with_footnote
from ..reporting.html import (
    figure_section,
    format_setting,
    key_value_table,
    paragraph,
    render_page,
    score_table,
    sentence_list,
)
from ..reporting.participation_timeline import MAX_METHODS, ParticipationTimeline, draw_participation
from ..reporting.plots import (
    AGENT_LABELS,
    DESK_LABELS,
    draw_collapse,
    draw_curves,
    draw_hyperparameters,
    draw_interpolation,
    draw_party_scores,
    draw_reward_lines,
    draw_spikes,
)
from ..rounds.state import PROXIED
from ..storage import replace_folder
from .portfolio_tables import LEGEND as TRADED
from .portfolio_tables import draw_holdings, draw_portfolio_values, has_backtests, has_holdings, portfolio_table
from .result import nanmean

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


def draw_study_plot(study: Study, kind: str, file: Path) -> Path:
    """Draw one of a study's pictures into a PNG file."""
    if kind not in _KINDS:
        raise unknown_name_error("picture", kind, _KINDS)
    if kind not in available_plots(study):
        raise SettingError(
            f"This study has no numbers for the picture {kind!r}. It has: {', '.join(available_plots(study))}."
        )
    with with_footnote(study.note):
        return _KINDS[kind](study, file)


def available_plots(study: Study) -> tuple[str, ...]:
    """The pictures that a study has numbers for."""
    has_numbers = {
        "curves": all(result.curve for result in study.results),
        "spikes": all(result.series for result in study.results),
        "collapse": all(result.series for result in study.results),
        "interpolation": any(result.interpolation is not None for result in study.results),
        "hyperparameters": bool(tuned_series(study)),
        "presence": bool(methods_with_absences(study)),
        "rewards": bool(reward_methods(study)),
        "portfolio": has_backtests(study),
        "weights": has_holdings(study),
    }
    return tuple(kind for kind in _KINDS if has_numbers.get(kind, True))


def _curves(study: Study, file: Path) -> Path:
    lines = {}
    for method in study.methods:
        curves = np.array([result.curve for result in study.of(method)], dtype=float)  # [seeds, points, 3]
        lines[method] = BandLine.from_repeats(curves[0, :, 0], curves[:, :, 1])
    scores = study.of("Local")[0].scores
    return draw_curves(file, lines, _metric(study), trivial=scores.majority.mean, name=trivial_baseline(scores.metric))


def _parties(study: Study, file: Path) -> Path:
    scores = {m: nanmean(np.array([result.trained_scores.values for result in study.of(m)])) for m in study.methods}
    return draw_party_scores(
        file, study.results[0].scores.names, scores, metric=_metric(study), higher_is_better=higher_is_better(study)
    )


def mean_series(study: Study, method: str, name: str) -> Numbers:
    """One number a round, the mean over seeds."""
    mean: Numbers = np.mean([result.series[name] for result in study.of(method)], axis=0)
    return mean


def _spikes(study: Study, file: Path) -> Path:
    lines = {}
    for method in study.methods:
        rounds, mean, sd = (mean_series(study, method, name) for name in ("round", "jump", "jump_sd"))
        lines[method] = BandLine(rounds, mean, mean - sd, high=mean + sd)
    return draw_spikes(file, lines)


def _collapse(study: Study, file: Path) -> Path:
    local_names = {result.baseline for result in study.results}  # whose centre never moves
    losses, norms = (
        {
            m: BandLine(mean_series(study, m, "round"), mean_series(study, m, what))
            for m in study.methods
            if m not in without
        }
        for what, without in (("loss", set()), ("norm", local_names))
    )
    if len(reward_methods(study)) < len(study.methods):
        return draw_collapse(file, losses, norms, collapse_rounds=study.collapse_rounds())
    leads = {method: BandLine(line.x, cumulative_lead(study, method)) for method, line in norms.items()}
    return draw_collapse(
        file, leads, norms, collapse_rounds=study.collapse_rounds(), upper_label="earned beyond training alone"
    )


def cumulative_lead(study: Study, method: str) -> Numbers:
    """What a method earned beyond training alone, added up over the rounds, the mean over seeds."""
    pairs = zip(study.of(method), study.local_results(method), strict=True)
    each = [np.nancumsum(one.series["reward"] - other.series["reward"]) for one, other in pairs]
    return np.asarray(np.mean(each, axis=0))


def _interpolation(study: Study, file: Path) -> Path:
    interpolations = {
        method: [r.interpolation for r in study.of(method) if r.interpolation is not None] for method in study.methods
    }
    interpolations = {method: found for method, found in interpolations.items() if found}
    lines = {
        method: BandLine.from_repeats(found[0].shares, [walk.mean for walk in found])
        for method, found in interpolations.items()
    }
    previous = {
        method: float(np.mean([walk.mean_previous for walk in found])) for method, found in interpolations.items()
    }
    return draw_interpolation(file, lines, previous, metric=_metric(study))


def tuned_series(study: Study) -> dict[str, list[Mapping[str, Numbers]]]:
    """The numbers by round of the methods that were tuned; training alone only repeats their work."""
    found = {method: study.of(method) for method in study.methods}
    return {
        m: [r.series for r in each] for m, each in found.items() if each[0].baseline != m and "lr" in each[0].series
    }


def _hyper(study: Study, file: Path) -> Path:
    return draw_hyperparameters(file, tuned_series(study))


def methods_with_absences(study: Study) -> list[str]:
    """Methods whose parties came and went; those with stand-ins first, because they show most."""
    found = {method: study.of(method)[0] for method in study.methods}
    with_absences = [
        m for m, one in found.items() if one.baseline != m and one.has_absences and one.global_model_scores
    ]
    return sorted(with_absences, key=lambda m: not any(PROXIED in letters for letters in found[m].presence))


def _presence(study: Study, file: Path) -> Path:
    """Of the first seed: with others, others come."""
    timelines = {}
    for method in methods_with_absences(study)[:MAX_METHODS]:
        first_result = study.of(method)[0]
        at, scores = (np.array(values) for values in zip(*first_result.global_model_scores, strict=True))
        timelines[method] = ParticipationTimeline(first_result.scores.names, first_result.presence, at, scores=scores)
    return draw_participation(file, timelines, _metric(study))


def reward_methods(study: Study) -> list[str]:
    """Methods of agents or desks: their rewards by round are known."""
    return [method for method in study.methods if all("steps" in result.series for result in study.of(method))]


def _rewards(study: Study, file: Path) -> Path:
    lines = {}
    for method in reward_methods(study):
        steps_per_round = mean_series(study, method, "steps")
        known = steps_per_round[np.isfinite(steps_per_round)]
        steps = np.cumsum(
            np.where(np.isfinite(steps_per_round), steps_per_round, known[0] if len(known) else 0)
        )  # no episode had ended
        lines[method] = BandLine.from_repeats(steps, np.array([result.series["reward"] for result in study.of(method)]))
    federated_x = [line.x for method, line in lines.items() if method not in {r.baseline for r in study.results}]
    return draw_reward_lines(
        file,
        lines,
        federated_x[0] if federated_x else np.empty(0),
        labels=DESK_LABELS if has_backtests(study) else AGENT_LABELS,
    )


_KINDS: dict[str, Callable[[Study, Path], Path]] = {
    "curves": _curves,
    "parties": _parties,
    "spikes": _spikes,
    "collapse": _collapse,
    "interpolation": _interpolation,
    "hyperparameters": _hyper,
    "presence": _presence,
    "rewards": _rewards,
    "portfolio": draw_portfolio_values,
    "weights": draw_holdings,
}
STUDY_FILES = ("study.json", *(f"{kind}.png" for kind in _KINDS), "report.html")


def higher_is_better(study: Study) -> bool:
    return study.results[0].scores.personal.higher_is_better


def _metric(study: Study) -> str:
    return f"{study.results[0].scores.metric} ({'higher' if higher_is_better(study) else 'lower'} is better)"


# ── the folder and the page of a study ────────────────────────────────────────────────────────────────────────────────


def write_study(study: Study, folder: Path) -> Path:
    """Write study.json, the pictures and report.html, whole or not at all; an older study there is replaced."""
    with replace_folder(folder, STUDY_FILES) as new:
        (new / "study.json").write_text(study.to_json(), encoding="utf-8")
        pictures = {
            kind: draw_study_plot(study, kind, new / f"{kind}.png").read_bytes() for kind in available_plots(study)
        }
        (new / "report.html").write_text(study_page(study, pictures), encoding="utf-8")
    return folder


def study_page(study: Study, pictures: dict[str, bytes]) -> str:
    """The report as one HTML page that needs nothing else: the pictures are in it."""
    settings = {
        **{key: value for key, value in study.settings.items() if key != "algorithms"},
        "seeds": sorted({result.seed for result in study.results}),
        "rejected updates": sum(result.rejected for result in study.results),
        "made by": f"descant {__version__}",
    }
    better_side = "above" if higher_is_better(study) else "below"
    captions = {**CAPTIONS, "rewards": EARNED_BY_DESKS} if has_backtests(study) else CAPTIONS
    baseline_name = trivial_baseline(study.results[0].scores.metric)
    baseline_note = f"{baseline_name.capitalize()}: {TRIVIAL_BASELINES[baseline_name]}; a method below it is worse than no learning."
    return render_page(
        "Did joining help?",
        study.verdict() or "Only local training was run: there is nothing to compare it with.",
        paragraph(study.note),
        score_table("Method by method", study.table(), f"Scores are {_metric(study)}. {LEGEND} {baseline_note}"),
        *([backtest_section(portfolio_table(study))] if has_backtests(study) else []),
        *(figure_section(*captions[kind], pictures[kind], better_side) for kind in captions if kind in pictures),
        sentence_list("What else was found", (told for told in study.findings() if told != study.note)),
        key_value_table("Settings and seeds", ((key, format_setting(value)) for key, value in settings.items())),
        key_value_table(
            "The methods, by what they change against FedAvg",
            (describe_changes(record) for record in study.settings.get("algorithms", ())),
        ),
    )


def backtest_section(table: Table) -> str:
    return score_table("What the portfolios made of it", table, " ".join([TRADED, *table.notes]))


def describe_changes(record: dict[str, Any]) -> tuple[str, str]:
    """A method's name, and what it changes: FedAvg is the base."""
    from ..algorithms import FedAvg

    base = to_json_values(FedAvg())
    changed_settings = {
        key: value for key, value in record.items() if key not in ("is", "name") and value != base.get(key)
    }
    return str(record.get("name")), ", ".join(
        f"{key}: {format_setting(value)}" for key, value in changed_settings.items()
    ) or "nothing"
