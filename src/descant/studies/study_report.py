"""A study as a folder to share: study.json, pictures, and one HTML page that needs no network."""

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
    Section,
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
from .portfolio_tables import LEGEND as BACKTEST_LEGEND
from .portfolio_tables import draw_holdings, draw_portfolio_values, has_backtests, has_holdings, portfolio_table
from .training_result import nanmean

if TYPE_CHECKING:
    from ..reporting.table import Table
    from .study import Study

LEGEND = (
    "Mean (last round), best (over the scored rounds), worst, p10 (a tenth of the parties is no better) and spread "
    "(standard deviation) are over the parties, each with its personal model on its own test set; ± is over the seeds. "
    "Trained mean: the mean over parties that ever trained. The others are evaluated with the global model, or "
    "under Local with the initial model, and neither gain nor lose. Global: the global model. Before, after: "
    "the parties' models before and after local training in the evaluated rounds. Gained, lost: parties better and "
    "worse off than with Local, which is local training with the same work. Trained: parties that ever trained."
)


def draw_study_plot(study: Study, kind: str, file: Path) -> Path:
    """Draw one of the pictures of a study into a PNG file."""
    if kind not in _KINDS:
        raise unknown_name_error("picture", kind, _KINDS)
    if kind not in available_plots(study):
        raise SettingError(
            f"This study has no numbers for the picture {kind!r}. It has: {', '.join(available_plots(study))}."
        )
    with with_footnote(study.note):
        return _KINDS[kind](study, file)


def available_plots(study: Study) -> tuple[str, ...]:
    """Return the kinds of pictures for which a study has numbers."""
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
    """Return one number per round, the mean over seeds."""
    mean: Numbers = np.mean([result.series[name] for result in study.of(method)], axis=0)
    return mean


def _spikes(study: Study, file: Path) -> Path:
    lines = {}
    for method in study.methods:
        rounds, mean, sd = (mean_series(study, method, name) for name in ("round", "jump", "jump_sd"))
        lines[method] = BandLine(rounds, mean, mean - sd, high=mean + sd)
    return draw_spikes(file, lines)


def _collapse(study: Study, file: Path) -> Path:
    local_names = {result.baseline for result in study.results}  # their global model never moves
    losses, norms = (
        {
            method: BandLine(mean_series(study, method, "round"), mean_series(study, method, name))
            for method in study.methods
            if method not in omitted
        }
        for name, omitted in (("loss", set()), ("norm", local_names))
    )
    if len(reward_methods(study)) < len(study.methods):
        return draw_collapse(file, losses, norms, collapse_rounds=study.collapse_rounds())
    leads = {method: BandLine(line.x, cumulative_lead(study, method)) for method, line in norms.items()}
    return draw_collapse(
        file, leads, norms, collapse_rounds=study.collapse_rounds(), upper_label="reward beyond local training"
    )


def cumulative_lead(study: Study, method: str) -> Numbers:
    """Return a method's cumulative reward beyond local training by round, the mean over seeds."""
    pairs = zip(study.of(method), study.local_results(method), strict=True)
    each = [np.nancumsum(one.series["reward"] - other.series["reward"]) for one, other in pairs]
    return np.asarray(np.mean(each, axis=0))


def _interpolation(study: Study, file: Path) -> Path:
    interpolations = {
        method: [r.interpolation for r in study.of(method) if r.interpolation is not None] for method in study.methods
    }
    interpolations = {method: by_seed for method, by_seed in interpolations.items() if by_seed}
    lines = {
        method: BandLine.from_repeats(by_seed[0].shares, [each.mean for each in by_seed])
        for method, by_seed in interpolations.items()
    }
    previous = {
        method: float(np.mean([each.mean_previous for each in by_seed])) for method, by_seed in interpolations.items()
    }
    return draw_interpolation(file, lines, previous, metric=_metric(study))


def tuned_series(study: Study) -> dict[str, list[Mapping[str, Numbers]]]:
    """Return the series of the tuned methods; local baselines are left out, as they only repeat the work."""
    by_method = {method: study.of(method) for method in study.methods}
    return {
        method: [result.series for result in results]
        for method, results in by_method.items()
        if results[0].baseline != method and "lr" in results[0].series
    }


def _hyper(study: Study, file: Path) -> Path:
    return draw_hyperparameters(file, tuned_series(study))


def methods_with_absences(study: Study) -> list[str]:
    """Return the methods with absent parties, those with coreset proxies first."""
    first_results = {method: study.of(method)[0] for method in study.methods}
    with_absences = [
        method
        for method, result in first_results.items()
        if result.baseline != method and result.has_absences and result.global_model_scores
    ]
    return sorted(
        with_absences, key=lambda method: not any(PROXIED in codes for codes in first_results[method].presence)
    )


def _presence(study: Study, file: Path) -> Path:
    """Draw the participation with the first seed; other seeds select other parties."""
    timelines = {}
    for method in methods_with_absences(study)[:MAX_METHODS]:
        first_result = study.of(method)[0]
        at, scores = (np.array(values) for values in zip(*first_result.global_model_scores, strict=True))
        timelines[method] = ParticipationTimeline(first_result.scores.names, first_result.presence, at, scores=scores)
    return draw_participation(file, timelines, _metric(study))


def reward_methods(study: Study) -> list[str]:
    """Return the methods of agents or desks, which have rewards by round."""
    return [method for method in study.methods if all("steps" in result.series for result in study.of(method))]


def _rewards(study: Study, file: Path) -> Path:
    lines = {}
    for method in reward_methods(study):
        steps_per_round = mean_series(study, method, "steps")
        known = steps_per_round[np.isfinite(steps_per_round)]
        fill = known[0] if len(known) else 0  # for rounds in which no episode ended
        steps = np.cumsum(np.where(np.isfinite(steps_per_round), steps_per_round, fill))
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


def write_study(study: Study, folder: Path) -> Path:
    """Write study.json, the pictures and report.html, all or none; replace an older study."""
    with replace_folder(folder, STUDY_FILES) as new:
        (new / "study.json").write_text(study.to_json(), encoding="utf-8")
        pictures = {
            kind: draw_study_plot(study, kind, new / f"{kind}.png").read_bytes() for kind in available_plots(study)
        }
        (new / "report.html").write_text(study_page(study, pictures), encoding="utf-8")
    return folder


def study_page(study: Study, pictures: dict[str, bytes]) -> str:
    """Return the report as one HTML page with embedded pictures."""
    settings = {
        **{key: value for key, value in study.settings.items() if key != "algorithms"},
        "seeds": sorted({result.seed for result in study.results}),
        "rejected updates": sum(result.rejected for result in study.results),
        "made by": f"descant {__version__}",
    }
    better_side = "above" if higher_is_better(study) else "below"
    captions = {**CAPTIONS, "rewards": EARNED_BY_DESKS} if has_backtests(study) else CAPTIONS
    baseline_name = trivial_baseline(study.results[0].scores.metric)
    baseline_meaning = f"{baseline_name.capitalize()}: {TRIVIAL_BASELINES[baseline_name]}"
    baseline_note = f"{baseline_meaning}; a method below it is worse than no training."
    return render_page(
        "Did joining help?",
        study.verdict() or "Only local training was run: there is nothing to compare it with.",
        paragraph(study.note),
        score_table("Method by method", study.table(), f"Scores are {_metric(study)}. {LEGEND} {baseline_note}"),
        *([backtest_section(portfolio_table(study))] if has_backtests(study) else []),
        *(figure_section(*captions[kind], pictures[kind], better_side) for kind in captions if kind in pictures),
        sentence_list("Other findings", (sentence for sentence in study.findings() if sentence != study.note)),
        key_value_table("Settings and seeds", ((key, format_setting(value)) for key, value in settings.items())),
        key_value_table(
            "The methods and their changes to FedAvg",
            (describe_changes(record) for record in study.settings.get("algorithms", ())),
        ),
    )


def backtest_section(table: Table) -> Section:
    return score_table("Back-tests of the portfolios", table, " ".join([BACKTEST_LEGEND, *table.notes]))


def describe_changes(record: dict[str, Any]) -> tuple[str, str]:
    """Return a method's name and its changes to FedAvg, the base of all methods."""
    from ..algorithms import FedAvg

    base = to_json_values(FedAvg())
    changed_settings = {
        key: value for key, value in record.items() if key not in ("is", "name") and value != base.get(key)
    }
    changes = ", ".join(f"{key}: {format_setting(value)}" for key, value in changed_settings.items())
    return str(record.get("name")), changes or "none"
