"""Expected results of the papers' experiments, with the spread over seeds: written by a run, never by hand.

The file is expected.json beside the recipes, with the full and the quick form of each.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..config import Recipe
from ..errors import SettingError, StateError
from .experiment import Experiment, method_means
from .recipe_index import papers_folder

if TYPE_CHECKING:
    from ..studies.study import Study

TOLERANCE = 0.005  # half a point: CPUs round differently, and parties have small test sets
FORMAT = 2
ONE_SEED_MARK = "one seed"  # the phrase in the `about` of an experiment that is too large for two seeds
BASELINES = ("FedAvg", "FedProx", "RFA", "CoordinateMedian")  # the methods that the papers compare Fed+ with


@dataclass(frozen=True)
class ExpectedResult:
    """The expected result of an experiment in one of its forms, quick or full."""

    digest: str  # of the recipe's settings
    seeds: tuple[int, ...]
    seconds: float
    descant: str
    points: tuple[Mapping[str, Any], ...]
    """One record a point: "personal" {method: a mean a seed}, "personal_trained" (parties that trained), "majority",
    "parties", and for Local and each of BASELINES the number of parties above it {method: number}. Portfolio desks add
    "portfolio". Where parties come and go it has their "names", the final "local" score of each, and
    "global_model_curves": by method the "rounds", the "mean" and "sd" over seeds of the global model's score (a list a
    party), and the parties that "left" with their last round."""


def read_expected(key: str, quick: bool, folder: Path | None = None) -> ExpectedResult | None:
    """Return the expected result of an experiment, or None."""
    found = _read(_file(key, folder)).get(key.partition("/")[2], {}).get(_form(quick))
    return (
        None
        if found is None
        else ExpectedResult(**{**found, "seeds": tuple(found["seeds"]), "points": tuple(found["points"])})
    )


def check_recordable(recipe: Recipe) -> None:
    """Raise if the results of a recipe could not be recorded; call it before the run."""
    if len(recipe.seeds) < 2 and ONE_SEED_MARK not in recipe.about:
        raise SettingError("Expected results need a spread over seeds: give at least --seeds 2.")


def write_expected(key: str, experiment: Experiment, folder: Path | None = None) -> Path:
    """Write the results of an experiment to expected.json, replacing earlier ones."""
    check_recordable(experiment.recipe)
    file = _file(key, folder)
    experiments = _read(file)
    points = [{"at": dict(point.at), **study_numbers(point.study)} for point in experiment.points]
    record = {
        "digest": experiment.recipe.digest,
        "seeds": experiment.recipe.seeds,
        "seconds": round(experiment.seconds, 1),
        "descant": __version__,
        "points": points,
    }
    experiments.setdefault(key.partition("/")[2], {})[_form(experiment.quick)] = record
    text = json.dumps({"version": FORMAT, "experiments": dict(sorted(experiments.items()))}, indent=1)
    try:
        file.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise StateError(f"{file} cannot be written: {error.strerror}. Record results in a checkout.") from error
    return file


def study_numbers(study: Study) -> dict[str, Any]:
    personal = {method: [round(value, 6) for value in values] for method, values in method_means(study).items()}
    trained_means = {method: [round(r.trained_scores.mean, 6) for r in study.of(method)] for method in study.methods}
    majority = study.results[0].scores.majority
    parties_above = {
        name: {method: int((study.gains(method, over) > 0).sum()) for method in study.methods}
        for name, over in (("above local", None), *((f"above {name}", name) for name in BASELINES))
        if over is None or over in study.methods
    }
    return {
        "personal": personal,
        "personal_trained": trained_means,
        "majority": round(majority.mean, 6),
        "parties": len(majority.values),
        **parties_above,
        **global_model_curves(study),
        **portfolio_numbers(study),
    }


def portfolio_numbers(study: Study) -> dict[str, Any]:
    """Return every portfolio measure by method, a mean over desks and seeds; empty without desks."""
    from ..studies.portfolio_tables import has_backtests, portfolio_table
    from ..studies.training_result import to_json_numbers

    if not has_backtests(study):
        return {}
    rows = {
        row["method"]: {name: value for name, value in row.items() if name != "method"}
        for row in portfolio_table(study).rows
    }
    return {
        "portfolio": {
            method: {name: to_json_numbers(round(value, 6)) for name, value in row.items()}
            for method, row in rows.items()
        }
    }


def global_model_curves(study: Study) -> dict[str, Any]:
    """Return the global model's score by party over rounds (mean and deviation), where parties come and go."""
    import numpy as np

    from ..studies.training_result import LOCAL, to_json_numbers

    if not any(result.has_absences for result in study.results):
        return {}
    names = study.results[0].scores.names
    curves = {}
    baselines = {result.baseline for result in study.results}  # local training has no global model
    for method in (method for method in study.methods if method not in baselines):
        results = study.of(method)
        by_seed = [[values for _, values in one.global_model_scores] for one in results]
        scores = np.array(by_seed)  # [seeds, points, parties]
        mean, deviation = (to_json_numbers(np.round(part, 4).T) for part in (scores.mean(0), scores.std(0)))
        last_seen = {
            name: last_round_present([codes[k] for codes in results[0].presence]) for k, name in enumerate(names)
        }
        departures = {name: at for name, at in last_seen.items() if at < len(results[0].presence)}
        curves[method] = {
            "rounds": [at for at, _ in results[0].global_model_scores],
            "mean": mean,
            "sd": deviation,
            "left": departures,
        }
    local_scores = np.array([one.scores.personal.values for one in study.of(LOCAL)]).mean(0)
    return {"names": list(names), "local": to_json_numbers(np.round(local_scores, 4)), "global_model_curves": curves}


def last_round_present(presence_codes: list[str]) -> int:
    """Return the last round in which a party trained."""
    from ..rounds.state import PRESENT

    return max((round for round, code in enumerate(presence_codes, 1) if code == PRESENT), default=0)


def compare_with_expected(experiment: Experiment, expected: ExpectedResult | None) -> list[str]:
    """Return one sentence for each mean outside the range of the expected seeds, or one that all agree."""
    if expected is None:
        return ["There are no expected results of this experiment to compare with."]
    if expected.digest != experiment.recipe.digest:
        return ["The expected results have other settings and are not compared."]
    deviations = []
    compared = 0
    expected_by_point = {json.dumps(point["at"], sort_keys=True): point["personal"] for point in expected.points}
    for point in experiment.points:
        expected_means = expected_by_point.get(json.dumps(dict(point.at), sort_keys=True), {})
        for method, values in method_means(point.study).items():
            mean = sum(values) / len(values)
            low, high = (
                (min(expected_means[method]), max(expected_means[method])) if method in expected_means else (mean, mean)
            )
            compared += 1
            if not low - TOLERANCE <= mean <= high + TOLERANCE:
                at = f" at {point.name}" if point.at else ""
                span = f"{low:.3f} to {high:.3f} over {len(expected.seeds)} seeds"
                deviations.append(f"{method}{at} came to {mean:.3f}; expected is {span}.")
    seeds = len(expected.seeds)
    return deviations or [
        f"All {compared} means are within the range of the expected results ({seeds} seeds, ± {TOLERANCE})."
    ]


def _file(key: str, folder: Path | None) -> Path:
    return (folder or papers_folder() / key.partition("/")[0]) / "expected.json"


def _form(quick: bool) -> str:
    return "quick" if quick else "full"


def _read(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        experiments: dict[str, Any] = found["experiments"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StateError(f"{file} is damaged: it should be JSON with the key 'experiments'.") from error
    if found.get("version") != FORMAT:
        raise StateError(f"{file} has version {found.get('version')!r}, and this Descant reads version {FORMAT}.")
    return experiments
