"""What a study says in a few sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..analysis.desk_results import MEASURES
from ..analysis.scores import Numbers
from ..core.metrics import trivial
from ..reporting.portfolio_plots import HOLD
from .result import LOCAL, Result, mean_of_known

if TYPE_CHECKING:
    from .study import Study


def verdict(study: Study) -> str:
    """In a few sentences: which method served the parties best, if any did, who gained and lost, what collapsed."""
    means, ahead = _means(study), _ahead(study)
    if not means:
        return ""
    scores = study.results[0].scores
    sign = 1 if scores.own.higher_is_better else -1
    alone = {method: learned(study.alone(method)) for method in means}
    served = helped(study)
    if served:
        best = max(served, key=lambda method: sign * means[method])
        first = f"{best} served the parties best"
    else:
        best = max(means, key=lambda method: sign * (means[method] - alone[method]))
        most = " for most parties" if ahead[best] > 0 else ""
        close = "is level with it" if ahead[best] == 0 else "came closest"
        first = f"Nothing beat training alone{most}; {best} {close}"
    told = f"{first}: {means[best]:.3f} {scores.metric} against {alone[best]:.3f} alone."
    return " ".join([told, *_who(study, best), *_events(study), *_unlearned(study)])


def helped(study: Study) -> list[str]:
    """The methods that serve parties better than training alone: in the mean, and more of them gained than lost."""
    number = {method: counts(study.gains(method)) for method in study.methods}
    ahead = _ahead(study)
    return [method for method in ahead if ahead[method] > 0 and number[method]["gained"] > number[method]["lost"]]


def _means(study: Study) -> dict[str, float]:
    """Of every method that is no yardstick, the mean over those who trained; who has none is left out."""
    yardsticks = {result.beside for result in study.results}
    means = {method: learned(study.of(method)) for method in study.methods if method not in yardsticks}
    return {method: mean for method, mean in means.items() if mean == mean}


def _ahead(study: Study) -> dict[str, float]:
    """How far above training alone each method is, as it is printed."""
    sign = 1 if study.results[0].scores.own.higher_is_better else -1
    return {method: round(sign * (mean - learned(study.alone(method))), 3) for method, mean in _means(study).items()}


def _who(study: Study, method: str) -> Iterator[str]:
    gains, scores = study.gains(method), study.results[0].scores
    number, judged = counts(gains), int((~np.isnan(scores.own.values)).sum())
    over = f", over {len(study.of(method))} seeds" if len(study.of(method)) > 1 else ""
    trained = int((~np.isnan(gains)).sum())
    who = f"{judged} parties" if trained == judged else f"the {trained} parties that ever trained"
    yield f"{number['gained']} of {who} gained by joining, {number['lost']} lost{over}."
    if number["lost"]:
        place = int(np.nanargmin(gains))
        lost = -float(gains[place])
        much = f"{100 * lost:.1f} points" if scores.metric == "accuracy" else f"{lost:.3g} in {scores.metric}"
        yield f"Party {scores.names[place]} lost most: {much}."


def _events(study: Study) -> Iterator[str]:
    """Collapses and refusals."""
    for method, at in study.collapses().items():
        seeds = study.collapsed(method)
        fell = sum(found is not None for found in seeds)
        some = "" if fell == len(seeds) else f" with {fell} of {len(seeds)} seeds"
        yield f"{method} collapsed at round {at}{some}."
    refused = sum(result.refused for result in study.results)
    if refused:
        yield f"{refused} updates were refused on the way."


def _unlearned(study: Study) -> Iterator[str]:
    """What is reached without learning, by those who trained."""
    alone, metric = study.of(LOCAL), study.results[0].scores.metric
    found = {trivial(metric): float(np.mean([result.of_trained(result.scores.majority).mean for result in alone]))}
    if alone[0].traded is not None and metric in MEASURES:
        found[HOLD] = float(mean_of_known(alone[0].traded.measured("hold")[metric]))
    told = [f"{name} {mean:.3f}" for name, mean in found.items() if mean == mean]
    if told:
        yield f"Without learning: {', '.join(told)}."


def counts(gains: Numbers) -> dict[str, int]:
    """How many parties gained, and how many lost."""
    return {"gained": int((gains > 0).sum()), "lost": int((gains < 0).sum())}


def learned(results: Sequence[Result]) -> float:
    """The mean over the parties that trained."""
    return float(np.mean([result.learned.mean for result in results]))
