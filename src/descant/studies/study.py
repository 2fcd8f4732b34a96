"""Methods side by side on the same parties, rounds, work and draws, with local training and the trivial baseline."""

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
from ..algorithms.fedavg_and_baselines import Local, local_baseline
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
from .result_cache import ResultCache
from .summary import gain_counts, mean_over_trained, verdict
from .training_result import LOCAL, TrainingResult, nanmean, run_and_score, score_spread, to_json_numbers

__all__ = ["LOCAL", "TrainingResult", "Study", "compare"]

SHOWN_COLUMNS = (
    "mean",
    "trained mean",
    "± seeds",
    "best",
    "worst",
    "p10",
    "spread",
    "global",
    "before",
    "after",
    "gained",
    "lost",
    "trained",
)
COLUMN_DECIMALS = {"gained": 0, "lost": 0, "trained": 0}
TIE_TOLERANCE = 1e-9  # a smaller difference in score is rounding noise
RunSeeds: TypeAlias = Callable[[Sequence[Algorithm]], tuple[list[TrainingResult], list[Algorithm]]]
"""A function from an algorithm (one per seed) to its results and its local baselines (one per seed each)."""

READ_ERRORS = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)


@dataclass(frozen=True)
class Study:
    """The results and settings of a comparison."""

    results: tuple[TrainingResult, ...]
    settings: dict[str, Any]

    @property
    def methods(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(result.method for result in self.results))

    @property
    def note(self) -> str:
        """The remark on the data as a sentence; "" without a remark."""
        return data_note_sentence(str(self.settings.get("note", "")))

    def __repr__(self) -> str:
        return f"<Study of {', '.join(self.methods)}>"

    def of(self, method: str) -> list[TrainingResult]:
        """Return the results of one method, one per seed."""
        return [result for result in self.results if result.method == method]

    def local_results(self, method: str) -> list[TrainingResult]:
        """Return the results of local training with the method's participation and work, one per seed."""
        return self.of(self.of(method)[0].baseline)

    def gains(self, method: str, other_method: str | None = None) -> Numbers:
        """Return each party's gain over local training or another method, ``[parties]``.

        Gains are paired by seed and averaged over seeds. A party that never trained did not influence its model: nan.
        """
        others = self.local_results(method) if other_method is None else self.of(other_method)
        return self._gains(
            [(r.trained_scores, other.trained_scores) for r, other in zip(self.of(method), others, strict=True)]
        )

    def _gains(self, pairs: Sequence[tuple[ScoreColumn, ScoreColumn]]) -> Numbers:
        sign = 1 if pairs[0][0].higher_is_better else -1
        with np.errstate(invalid="ignore"):  # two diverged models
            gains_by_seed = sign * np.array(
                [column.values - other.values for column, other in pairs]
            )  # [seeds, parties]
        gains = nanmean(gains_by_seed)
        return np.where(np.abs(gains) <= TIE_TOLERANCE, 0.0, gains)

    def table(self) -> Table:
        """Return one row per method; the rows also hold columns that are not printed (p50, p90, best round)."""
        rows = [self._trivial_row(self.of(LOCAL)), *(self._method_row(method) for method in self.methods)]
        all_trained = all(row["mean"] == row["trained mean"] or row["mean"] != row["mean"] for row in rows)
        shown = [name for name in SHOWN_COLUMNS if name != "trained mean" or not all_trained]
        return Table(("method", *shown), rows, self.verdict(), decimals=COLUMN_DECIMALS, notes=self.findings())

    def _method_row(self, method: str) -> dict[str, Any]:
        results = self.of(method)
        means = [result.scores.personal.mean for result in results]
        best = [result.best for result in results]
        return {
            "method": method,
            "mean": float(np.mean(means)),
            "trained mean": mean_over_trained(results),
            "± seeds": ScoreColumn(np.array(means)).spread if len(results) > 1 else float("nan"),
            "best": float(np.mean([score for _, score in best])),
            "best round": float(np.mean([at for at, _ in best])),
            **score_spread([result.scores.personal for result in results]),
            "global": float("nan") if method == results[0].baseline else _mean(results, "global_model"),
            "before": _mean(results, "before"),
            "after": _mean(results, "after"),
            **gain_counts(self.gains(method)),
            "trained": float(np.mean([result.trained_count for result in results])),
        }

    def _trivial_row(self, local_results: list[TrainingResult]) -> dict[str, Any]:
        columns = [result.scores.majority for result in local_results]
        missing = ("± seeds", "best", "best round", "global", "before", "after", "trained")
        return {
            "method": trivial_baseline(local_results[0].scores.metric),
            "mean": float(np.mean([column.mean for column in columns])),
            "trained mean": float(
                np.mean([result.mask_untrained(result.scores.majority).mean for result in local_results])
            ),
            **dict.fromkeys(missing, float("nan")),
            **score_spread(columns),
            **gain_counts(self._gains([(result.scores.majority, result.trained_scores) for result in local_results])),
        }

    def verdict(self) -> str:
        """Return a few sentences: the best method, the parties that gained and lost, collapses, baselines."""
        return verdict(self)

    def collapse_rounds(self) -> dict[str, int]:
        """Return the methods that collapsed, each with its first round of collapse over all seeds."""
        rounds = {method: [at for at in self.collapse_by_seed(method) if at is not None] for method in self.methods}
        return {method: min(each) for method, each in rounds.items() if each}

    def collapse_by_seed(self, method: str) -> list[int | None]:
        """Return the round of collapse or None, one per seed."""
        by_seed = self._findings_by_seed(method)
        rounds_by_seed = [[f.round for f in findings if f.kind == "collapse" and f.round] for findings in by_seed]
        return [min(rounds, default=None) for rounds in rounds_by_seed]

    def findings(self) -> tuple[str, ...]:
        """Return the findings of all methods as sentences, each once."""
        return tuple(
            dict.fromkeys(f.text for name in self.methods for f in merge_over_seeds(self._findings_by_seed(name)))
        )

    def _findings_by_seed(self, method: str) -> list[tuple[Finding, ...]]:
        """Return a method's findings, one tuple per seed, including those that compare with local training."""
        return [
            (*result.findings, *shortfall_findings(result, beside))
            for result, beside in zip(self.of(method), self.local_results(method), strict=True)
        ]

    def plot(self, kind: str, file: str | Path) -> Path:
        """Draw one kind of picture into a PNG file.

        The kinds are "curves", "parties", "spikes", "collapse", "interpolation", "hyperparameters", "presence",
        "rewards", "portfolio" and "weights".
        """
        from .study_report import draw_study_plot

        return draw_study_plot(self, kind, Path(file))

    def save(self, folder: str | Path) -> Path:
        """Write study.json, the pictures and report.html."""
        from .study_report import write_study

        return write_study(self, Path(folder))

    @classmethod
    def load(cls, folder: str | Path) -> Study:
        """Read a study that :meth:`save` wrote into a folder."""
        try:
            record = json.loads((Path(folder) / "study.json").read_text(encoding="utf-8"))
            return cls(tuple(map(TrainingResult.from_json, record["results"])), record["settings"])
        except READ_ERRORS as error:
            raise StateError(
                f"{folder} does not hold a study that this version can read ({type(error).__name__}: {error}). "
                "Give a folder that Study.save wrote."
            ) from error

    def to_json(self) -> str:
        """Return the whole study as JSON text."""
        table = [
            {k: to_json_numbers(v) if isinstance(v, float) else v for k, v in row.items()} for row in self.table().rows
        ]
        head = {"descant": __version__, "verdict": self.verdict(), "findings": self.findings(), "table": table}
        return json.dumps({**head, "settings": self.settings, "results": [r.to_json() for r in self.results]})


def shortfall_findings(result: TrainingResult, baseline: TrainingResult) -> Iterator[Finding]:
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
    """Run every algorithm with every seed, and local training with the same work.

    ``settings`` are those of :class:`Federation`. ``seeds`` is a number of seeds or a list of seeds; ``points`` rounds
    are scored for the curve. ``local`` is the baseline algorithm, for comparisons in which all algorithms share a loss
    term that it should have too. ``cache`` is a folder for finished trainings: an interrupted comparison continues from
    it.
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

        def run_seeds(seed_algorithms: Sequence[Algorithm]) -> tuple[list[TrainingResult], list[Algorithm]]:
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

        results, baselines = run_with_baselines(
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
        to_json_values(algorithm) for algorithm in [*baselines, *filter(is_federated, checked_algorithms)]
    ]
    return Study(tuple(results), study_settings)


def run_with_baselines(
    algorithms_by_seed: Sequence[list[Algorithm]], run_seeds: RunSeeds
) -> tuple[list[TrainingResult], list[Algorithm]]:
    """Run every algorithm (one per seed) and its baseline: local training with the same participation and work.

    The work is known only after the algorithm has run, because a tuner may have chosen it. Algorithms with equal work
    share one baseline. The results of baselines come first.
    """
    local_results: list[TrainingResult] = []
    other_results: list[TrainingResult] = []
    baselines: list[list[Algorithm]] = []
    for each in sorted(algorithms_by_seed, key=lambda each: is_federated(each[0])):
        results, local_algorithms = run_seeds(each)
        existing_baseline = next(
            (one for one in baselines if [replace(a, name=LOCAL) for a in one] == local_algorithms), None
        )
        if existing_baseline is None:
            name = f"{LOCAL}, as {each[0].name}" if baselines else LOCAL
            existing_baseline = [replace(algorithm, name=name) for algorithm in local_algorithms]
            baselines.append(existing_baseline)
            baseline_results = run_seeds(existing_baseline)[0] if is_federated(each[0]) else results
            local_results += [replace(result, baseline=name) for result in baseline_results]
        if is_federated(each[0]):
            other_results += [replace(result, baseline=existing_baseline[0].name) for result in results]
    return local_results + other_results, [known[0] for known in baselines]


def is_federated(algorithm: Algorithm) -> bool:
    """Return True for any algorithm except local training."""
    return algorithm.name != LOCAL


def check_names(algorithms: list[Algorithm], local: Algorithm) -> list[Algorithm]:
    """Return the algorithms; raise if their names are not distinct."""
    names = [algorithm.name for algorithm in algorithms]
    if len(set(names)) < len(names) or any(name.startswith(f"{LOCAL}, as ") for name in names):
        raise SettingError(f"Two algorithms have the same name: {names}. Use dataclasses.replace(..., name=...).")
    for algorithm in algorithms:
        untuned = replace(algorithm, tune=fixed_hyper)
        if algorithm.name == LOCAL and untuned != local_baseline(untuned, (), local):
            raise SettingError(f"{LOCAL!r} is the name of local training. Give your algorithm another name.")
    return algorithms


def _mean(results: list[TrainingResult], column: str) -> float:
    return float(np.mean([getattr(result.scores, column).mean for result in results]))
