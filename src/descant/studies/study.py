"""Methods side by side: the same parties, rounds, work and draws; local-only and the majority class stand beside."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from .. import __version__
from ..algorithms.components import fixed_hyper
from ..algorithms.fedavg import Local, local_baseline
from ..analysis.findings import Finding, data_note_sentence, detect_shortfall, merge_over_seeds
from ..analysis.scores import Numbers, ScoreColumn
from ..core.algorithm import Algorithm, Participation
from ..core.metrics import trivial_baseline
from ..core.progress import progress_bar
from ..core.settings import to_json_values
from ..errors import SettingError, StateError
from ..federation import Federation, with_participation
from ..reporting.table import Table
from ..rounds.plan import ModelSource, PopulationSource, make_population
from .result import LOCAL, StudyResult, nanmean, run_and_score, score_spread, to_json_numbers
from .result_cache import ResultCache
from .summary import gain_counts, mean_over_trained, verdict

__all__ = ["LOCAL", "StudyResult", "Study", "compare"]

SHOWN_COLUMNS = (
    "mean",
    "personal_trained",
    "± seeds",
    "best",
    "worst",
    "p10",
    "spread",
    "centre",
    "before",
    "after",
    "gained",
    "lost",
    "trained",
)
COLUMN_DECIMALS = {"gained": 0, "lost": 0, "trained": 0}
TIE_TOLERANCE = 1e-9  # a difference in score that is the noise of adding up
RunSeeds: TypeAlias = Callable[[Sequence[Algorithm]], tuple[list[StudyResult], list[Algorithm]]]
"""An algorithm, one a seed -> what came of it, and training alone beside it, one a seed."""

READ_ERRORS = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)


@dataclass(frozen=True)
class Study:
    """What came of a comparison."""

    results: tuple[StudyResult, ...]
    settings: dict[str, Any]

    @property
    def methods(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(result.method for result in self.results))

    @property
    def note(self) -> str:
        """What must be known of the data, in a sentence; "" if there is nothing."""
        return data_note_sentence(str(self.settings.get("note", "")))

    def __repr__(self) -> str:
        return f"<Study of {', '.join(self.methods)}>"

    def of(self, method: str) -> list[StudyResult]:
        """The results of one method, one a seed."""
        return [result for result in self.results if result.method == method]

    def local_results(self, method: str) -> list[StudyResult]:
        """Local-only training with the same attendance and work, one result a seed."""
        return self.of(self.of(method)[0].baseline)

    def gains(self, method: str, other_method: str | None = None) -> Numbers:
        """What each party gained over training alone, or over another method: paired by seed, the mean over the seeds.

        ``[parties]``; nan where it never trained, because then it is judged by a model that it had no part in.
        """
        others = self.local_results(method) if other_method is None else self.of(other_method)
        return self._gains(
            [(r.trained_scores, other.trained_scores) for r, other in zip(self.of(method), others, strict=True)]
        )

    def _gains(self, pairs: Sequence[tuple[ScoreColumn, ScoreColumn]]) -> Numbers:
        sign = 1 if pairs[0][0].higher_is_better else -1
        with np.errstate(invalid="ignore"):  # two models that failed
            gains_by_seed = sign * np.array([own.values - alone.values for own, alone in pairs])  # [seeds, parties]
        gains = nanmean(gains_by_seed)
        return np.where(np.abs(gains) <= TIE_TOLERANCE, 0.0, gains)

    def table(self) -> Table:
        """One row a method, over its parties and seeds; more is in the rows than is printed (p50, p90, best round)."""
        rows = [self._trivial_row(self.of(LOCAL)), *(self._method_row(method) for method in self.methods)]
        all_trained = all(row["mean"] == row["personal_trained"] or row["mean"] != row["mean"] for row in rows)
        shown = [name for name in SHOWN_COLUMNS if name != "personal_trained" or not all_trained]
        return Table(("method", *shown), rows, self.verdict(), decimals=COLUMN_DECIMALS, notes=self.findings())

    def _method_row(self, method: str) -> dict[str, Any]:
        results = self.of(method)
        means = [result.scores.personal.mean for result in results]
        best = [result.best for result in results]
        return {
            "method": method,
            "mean": float(np.mean(means)),
            "personal_trained": mean_over_trained(results),
            "± seeds": ScoreColumn(np.array(means)).spread if len(results) > 1 else float("nan"),
            "best": float(np.mean([score for _, score in best])),
            "best round": float(np.mean([at for at, _ in best])),
            **score_spread([result.scores.personal for result in results]),
            "centre": float("nan")
            if method == results[0].baseline
            else _mean(results, "global_model"),  # alone has none
            "before": _mean(results, "before"),
            "after": _mean(results, "after"),
            **gain_counts(self.gains(method)),
            "trained": float(np.mean([result.trained_count for result in results])),
        }

    def _trivial_row(self, local_results: list[StudyResult]) -> dict[str, Any]:
        columns = [result.scores.majority for result in local_results]
        unknown = dict.fromkeys(("± seeds", "best", "best round", "centre", "before", "after", "trained"), float("nan"))
        return {
            "method": trivial_baseline(local_results[0].scores.metric),
            "mean": float(np.mean([column.mean for column in columns])),
            "personal_trained": float(
                np.mean([result.mask_untrained(result.scores.majority).mean for result in local_results])
            ),
            **unknown,
            **score_spread(columns),
            **gain_counts(self._gains([(result.scores.majority, result.trained_scores) for result in local_results])),
        }

    def verdict(self) -> str:
        """In a few sentences: which method served the parties best, if any did, who gained and lost, what collapsed."""
        return verdict(self)

    def collapse_rounds(self) -> dict[str, int]:
        """The methods that collapsed, each with the first round at which it did, in any seed."""
        found = [(name, at) for name in self.methods for at in self.collapse_by_seed(name) if at is not None]
        return {method: min(at for name, at in found if name == method) for method, _ in found}

    def collapse_by_seed(self, method: str) -> list[int | None]:
        """The round at which a method collapsed, or None, one a seed."""
        each = [
            [f.round for f in found if f.kind == "collapse" and f.round] for found in self._findings_by_seed(method)
        ]
        return [min(rounds, default=None) for rounds in each]

    def findings(self) -> tuple[str, ...]:
        """What is wrong, in sentences, each once."""
        return tuple(
            dict.fromkeys(f.text for name in self.methods for f in merge_over_seeds(self._findings_by_seed(name)))
        )

    def _findings_by_seed(self, method: str) -> list[tuple[Finding, ...]]:
        """The findings of a method, one tuple a seed, with what only training alone beside it can tell."""
        return [
            (*result.findings, *shortfall_findings(result, beside))
            for result, beside in zip(self.of(method), self.local_results(method), strict=True)
        ]

    def plot(self, kind: str, file: str | Path) -> Path:
        """Draw "curves", "parties", "spikes", "collapse", "walk", "hyper", "presence", "rewards", "portfolio" or
        "weights"."""
        from .study_report import draw_study_plot

        return draw_study_plot(self, kind, Path(file))

    def save(self, folder: str | Path) -> Path:
        """Write study.json, the pictures and report.html."""
        from .study_report import write_study

        return write_study(self, Path(folder))

    @classmethod
    def load(cls, folder: str | Path) -> Study:
        """The study that :meth:`save` wrote into a folder."""
        try:
            record = json.loads((Path(folder) / "study.json").read_text(encoding="utf-8"))
            return cls(tuple(map(StudyResult.from_json, record["results"])), record["settings"])
        except READ_ERRORS as error:
            raise StateError(
                f"{folder} does not hold a study that this version can read ({type(error).__name__}: {error}). "
                "Give a folder that Study.save wrote."
            ) from error

    def to_json(self) -> str:
        """Everything in it, for programs."""
        table = [
            {k: to_json_numbers(v) if isinstance(v, float) else v for k, v in row.items()} for row in self.table().rows
        ]
        head = {"descant": __version__, "verdict": self.verdict(), "findings": self.findings(), "table": table}
        return json.dumps({**head, "settings": self.settings, "results": [r.to_json() for r in self.results]})


def shortfall_findings(result: StudyResult, baseline: StudyResult) -> Iterator[Finding]:
    if any(finding.kind == "collapse" for finding in result.findings):
        return
    if "reward" in result.series and "reward" in baseline.series:
        found = detect_shortfall(result.method, result.series, baseline.series["reward"])
        if found is not None:
            yield found


def compare(
    algorithms: Sequence[Algorithm],
    model: ModelSource,
    population: PopulationSource,
    *,
    rounds: int,
    seeds: int | Sequence[int] = 1,
    points: int = 10,
    progress: bool = True,
    participation: Participation | int | None = None,
    local: Algorithm = Local(),  # noqa: B008  a frozen value
    cache: str | Path | ResultCache | None = None,
    **settings: Any,
) -> Study:
    """Run every algorithm with every seed, and local-only training beside. ``settings`` are Federation's.

    ``seeds`` is how many, or which; the curve is measured ``points`` times on the way. ``local`` is how a party trains
    alone, where all algorithms have something in their loss that it should have, too. ``kept`` is a folder for the
    trainings that have finished: broken off, the same comparison goes on behind them.
    """
    chosen_seeds = list(range(seeds)) if isinstance(seeds, int) else list(map(int, seeds))
    if isinstance(algorithms, Algorithm) or rounds < 1 or not chosen_seeds or "seed" in settings:
        raise SettingError(
            "compare needs a list of algorithms, at least one round and at least one seed (seeds=3, or seeds=[1, 2]). "
            f"Got {algorithms!r:.40}, rounds={rounds}, seeds={seeds}."
        )
    if settings.get("vault") is not None:
        raise SettingError("compare runs many federations, and a vault is for one run: leave 'vault' out.")
    checked_algorithms = check_names([with_participation(algorithm, participation) for algorithm in algorithms], local)
    population_object = make_population(population)
    result_cache = ResultCache.from_path(cache)
    with progress_bar(disable=not progress) as shown:

        def run_seeds(seed_algorithms: Sequence[Algorithm]) -> tuple[list[StudyResult], list[Algorithm]]:
            progress_task = shown.add_task(seed_algorithms[0].name, total=rounds * len(chosen_seeds), summary="–")
            results = []
            local_algorithms = []
            for seed, algorithm in zip(chosen_seeds, seed_algorithms, strict=True):
                federation = Federation(model, population, algorithm, seed=seed, **settings)
                federation.population = population_object
                tick = partial(shown.update, progress_task, advance=1)
                train = partial(run_and_score, federation, rounds, points, tick)
                results.append(result_cache.get_or_train(federation, rounds, points, train))
                shown.update(progress_task, completed=rounds * len(results))
                local_algorithms.append(local_baseline(algorithm, results[-1].tuned_rounds, local))
            return results, local_algorithms

        results, yardsticks = run_with_baselines(
            [[algorithm] * len(chosen_seeds) for algorithm in checked_algorithms], run_seeds
        )
    study_settings = {
        "rounds": rounds,
        "seeds": chosen_seeds,
        "parties": len(population_object),
        **to_json_values(settings),
    }
    study_settings |= {"note": population_object.note} if population_object.note else {}
    study_settings["algorithms"] = [
        to_json_values(algorithm) for algorithm in [*yardsticks, *filter(is_federated, checked_algorithms)]
    ]
    return Study(tuple(results), study_settings)


def run_with_baselines(
    algorithms_by_seed: Sequence[list[Algorithm]], run_seeds: RunSeeds
) -> tuple[list[StudyResult], list[Algorithm]]:
    """Every algorithm (one a seed) and, before them, its yardstick: training alone with the same attendance and work.

    What work that was is known when the algorithm has run: a tuner may have chosen it. Those of like work share one.
    """
    local_results: list[StudyResult] = []
    other_results: list[StudyResult] = []
    yardsticks: list[list[Algorithm]] = []
    for each in sorted(algorithms_by_seed, key=lambda each: is_federated(each[0])):
        results, local_algorithms = run_seeds(each)
        existing_baseline = next(
            (one for one in yardsticks if [replace(a, name=LOCAL) for a in one] == local_algorithms), None
        )
        if existing_baseline is None:
            name = f"{LOCAL}, as {each[0].name}" if yardsticks else LOCAL
            existing_baseline = [replace(algorithm, name=name) for algorithm in local_algorithms]
            yardsticks.append(existing_baseline)
            baseline_results = run_seeds(existing_baseline)[0] if is_federated(each[0]) else results
            local_results += [replace(result, baseline=name) for result in baseline_results]
        if is_federated(each[0]):
            other_results += [replace(result, baseline=existing_baseline[0].name) for result in results]
    return local_results + other_results, [known[0] for known in yardsticks]


def is_federated(algorithm: Algorithm) -> bool:
    """Whether it is anything but training alone."""
    return algorithm.name != LOCAL


def check_names(algorithms: list[Algorithm], local: Algorithm) -> list[Algorithm]:
    """The algorithms, if they can be told apart by their names."""
    names = [algorithm.name for algorithm in algorithms]
    if len(set(names)) < len(names) or any(name.startswith(f"{LOCAL}, as ") for name in names):
        raise SettingError(f"Two algorithms have one name: {names}. Use dataclasses.replace(..., name=...).")
    for algorithm in algorithms:
        untuned = replace(algorithm, tune=fixed_hyper)
        if algorithm.name == LOCAL and untuned != local_baseline(untuned, (), local):
            raise SettingError(f"{LOCAL!r} is the name of training alone. Give your algorithm another one.")
    return algorithms


def _mean(results: list[StudyResult], column: str) -> float:
    return float(np.mean([getattr(result.scores, column).mean for result in results]))
