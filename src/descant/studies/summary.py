"""The verdict of a study in a few sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..analysis.desk_results import MEASURES
from ..analysis.scores import Numbers
from ..core.metrics import trivial_baseline
from ..reporting.portfolio_plots import HOLD
from .training_result import LOCAL, TrainingResult, nanmean

if TYPE_CHECKING:
    from .study import Study


def verdict(study: Study) -> str:
    """Return a few sentences: the best method, the parties that gained and lost, collapses, baselines."""
    means = mean_scores(study)
    leads = leads_over_local(study)
    if not means:
        return ""
    scores = study.results[0].scores
    sign = 1 if scores.personal.higher_is_better else -1
    local_means = {method: mean_over_trained(study.local_results(method)) for method in means}
    helpful = helpful_methods(study)
    if helpful:
        best = max(helpful, key=lambda method: sign * means[method])
        opening = f"{best} served the parties best"
    else:
        best = max(means, key=lambda method: sign * (means[method] - local_means[method]))
        most = " for most parties" if leads[best] > 0 else ""
        closeness = "is level with it" if leads[best] == 0 else "came closest"
        opening = f"No method beat local training{most}; {best} {closeness}"
    first_sentence = (
        f"{opening}: {means[best]:.3f} {scores.metric} against {local_means[best]:.3f} with local training."
    )
    return " ".join(
        [first_sentence, *gain_sentences(study, best), *incident_sentences(study), *trivial_sentences(study)]
    )


def helpful_methods(study: Study) -> list[str]:
    """Return the methods that beat local training: a better mean, and more parties gained than lost."""
    counts = {method: gain_counts(study.gains(method)) for method in study.methods}
    leads = leads_over_local(study)
    return [method for method in leads if leads[method] > 0 and counts[method]["gained"] > counts[method]["lost"]]


def mean_scores(study: Study) -> dict[str, float]:
    """Return each federated method's mean over the parties that trained; methods without a mean are left out."""
    baselines = {result.baseline for result in study.results}
    means = {method: mean_over_trained(study.of(method)) for method in study.methods if method not in baselines}
    return {method: mean for method, mean in means.items() if mean == mean}


def leads_over_local(study: Study) -> dict[str, float]:
    """Return each method's lead over local training, rounded as it is printed."""
    sign = 1 if study.results[0].scores.personal.higher_is_better else -1
    return {
        method: round(sign * (mean - mean_over_trained(study.local_results(method))), 3)
        for method, mean in mean_scores(study).items()
    }


def gain_sentences(study: Study, method: str) -> Iterator[str]:
    gains = study.gains(method)
    scores = study.results[0].scores
    gained_and_lost = gain_counts(gains)
    evaluated_count = int((~np.isnan(scores.personal.values)).sum())
    seeds_suffix = f", over {len(study.of(method))} seeds" if len(study.of(method)) > 1 else ""
    trained = int((~np.isnan(gains)).sum())
    party_phrase = (
        f"{evaluated_count} parties" if trained == evaluated_count else f"the {trained} parties that ever trained"
    )
    gained, lost = gained_and_lost["gained"], gained_and_lost["lost"]
    yield f"{gained} of {party_phrase} gained by joining, {lost} lost{seeds_suffix}."
    if lost:
        worst_index = int(np.nanargmin(gains))
        largest_loss = -float(gains[worst_index])
        loss_phrase = (
            f"{100 * largest_loss:.1f} points"
            if scores.metric == "accuracy"
            else f"{largest_loss:.3g} in {scores.metric}"
        )
        yield f"Party {scores.names[worst_index]} lost most: {loss_phrase}."


def incident_sentences(study: Study) -> Iterator[str]:
    """Yield sentences on collapses and rejected updates."""
    for method, at in study.collapse_rounds().items():
        seeds = study.collapse_by_seed(method)
        collapsed_seeds = sum(collapse_round is not None for collapse_round in seeds)
        with_seeds = "" if collapsed_seeds == len(seeds) else f" with {collapsed_seeds} of {len(seeds)} seeds"
        yield f"{method} collapsed at round {at}{with_seeds}."
    rejected_count = sum(result.rejected for result in study.results)
    if rejected_count:
        yield f"{rejected_count} updates were rejected."


def trivial_sentences(study: Study) -> Iterator[str]:
    """Yield a sentence on the trivial baselines, over the parties that trained."""
    local_results = study.of(LOCAL)
    metric = study.results[0].scores.metric
    means = {
        trivial_baseline(metric): float(
            np.mean([result.mask_untrained(result.scores.majority).mean for result in local_results])
        )
    }
    if local_results[0].backtest is not None and metric in MEASURES:
        means[HOLD] = float(nanmean(local_results[0].backtest.measures("hold")[metric]))
    parts = [f"{name} {mean:.3f}" for name, mean in means.items() if mean == mean]
    if parts:
        yield f"Without training: {', '.join(parts)}."


def gain_counts(gains: Numbers) -> dict[str, int]:
    """Return the numbers of parties that gained and that lost."""
    return {"gained": int((gains > 0).sum()), "lost": int((gains < 0).sum())}


def mean_over_trained(results: Sequence[TrainingResult]) -> float:
    """Return the mean score of the parties that trained, over seeds."""
    return float(np.mean([result.trained_scores.mean for result in results]))
