"""The numbers that we keep of an experiment, with the spread over seeds: written by a run, never by hand.

They stand in expected.json beside the recipes, for the full and for the quick form of each.
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
from .experiment import Experiment, means
from .recipe_index import home

if TYPE_CHECKING:
    from ..studies.study import Study

CLOSE = 0.005  # half a point: other processors round otherwise, and a party judges itself on few samples
FORMAT = 1
ONCE = "one seed"  # so its `about` says, where an experiment is too large for more
BASELINES = ("FedAvg", "FedProx", "RFA", "CoordinateMedian")  # those that the papers hold Fed+ against


@dataclass(frozen=True)
class Kept:
    """What is kept of one form of an experiment."""

    digest: str  # of the settings that it was run with
    seeds: tuple[int, ...]
    seconds: float
    descant: str
    points: tuple[Mapping[str, Any], ...]
    """At each: "own" {method: one mean a seed}, "learned" (of those that trained), "majority", "parties", and how many
    of these are better off than alone, and than with each of BASELINES that was there {method: number}. Where parties
    are desks, the "ledger" of what they earned. Where they come and go also their "names", what each has "alone" in the
    end, and "courses": by method the "rounds", "mean" and "sd" over seeds of the centre's score, a list a party, and
    who "left" after which round."""


def kept(key: str, quick: bool, folder: Path | None = None) -> Kept | None:
    """What is kept of an experiment, if anything is."""
    found = _read(_file(key, folder)).get(key.partition("/")[2], {}).get(_form(quick))
    return (
        None if found is None else Kept(**{**found, "seeds": tuple(found["seeds"]), "points": tuple(found["points"])})
    )


def check_keepable(recipe: Recipe) -> None:
    """Raise unless the numbers of a recipe can be kept: to be asked before the work."""
    if len(recipe.seeds) < 2 and ONCE not in recipe.about:
        raise SettingError("Numbers are kept with their spread: give at least --seeds 2.")


def keep(key: str, done: Experiment, folder: Path | None = None) -> Path:
    """Put the numbers of an experiment into expected.json, in place of those that are there."""
    check_keepable(done.recipe)
    file = _file(key, folder)
    everything = _read(file)
    points = [{"at": dict(point.at), **_numbers(point.study)} for point in done.points]
    record = {
        "digest": done.recipe.digest,
        "seeds": done.recipe.seeds,
        "seconds": round(done.seconds, 1),
        "descant": __version__,
        "points": points,
    }
    everything.setdefault(key.partition("/")[2], {})[_form(done.quick)] = record
    text = json.dumps({"version": FORMAT, "experiments": dict(sorted(everything.items()))}, indent=1)
    try:
        file.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise StateError(f"{file} cannot be written: {error.strerror}. Keep numbers in a checkout.") from error
    return file


def _numbers(study: Study) -> dict[str, Any]:
    own = {method: [round(value, 6) for value in values] for method, values in means(study).items()}
    learned = {method: [round(r.learned.mean, 6) for r in study.of(method)] for method in study.methods}
    majority = study.results[0].scores.majority
    better = {
        name: {method: int((study.gains(method, over) > 0).sum()) for method in study.methods}
        for name, over in (("above alone", None), *((f"above {name}", name) for name in BASELINES))
        if over is None or over in study.methods
    }
    return {
        "own": own,
        "learned": learned,
        "majority": round(majority.mean, 6),
        "parties": len(majority.values),
        **better,
        **_courses(study),
        **_ledger(study),
    }


def _ledger(study: Study) -> dict[str, Any]:
    """Of portfolio desks: every measure of what they made of it, a mean over desks and seeds, by method."""
    from ..studies.portfolio_tables import is_traded, ledger
    from ..studies.result import plain

    if not is_traded(study):
        return {}
    rows = {
        row["method"]: {name: value for name, value in row.items() if name != "method"} for row in ledger(study).rows
    }
    return {
        "ledger": {
            method: {name: plain(round(value, 6)) for name, value in row.items()} for method, row in rows.items()
        }
    }


def _courses(study: Study) -> dict[str, Any]:
    """Where parties come and go: the centre's score by party on the way, the mean over seeds and its deviation."""
    import numpy as np

    from ..studies.result import LOCAL, plain

    if not any(result.comes_and_goes for result in study.results):
        return {}
    names, courses = study.results[0].scores.names, {}
    yardsticks = {result.beside for result in study.results}  # alone there is no centre
    for method in (method for method in study.methods if method not in yardsticks):
        results = study.of(method)
        scores = np.array([[values for _, values in one.centers] for one in results])  # [seeds, points, parties]
        mean, deviation = (plain(np.round(part, 4).T) for part in (scores.mean(0), scores.std(0)))
        last = {name: _last_seen([letters[k] for letters in results[0].presence]) for k, name in enumerate(names)}
        left = {name: at for name, at in last.items() if at < len(results[0].presence)}
        courses[method] = {"rounds": [at for at, _ in results[0].centers], "mean": mean, "sd": deviation, "left": left}
    alone = np.array([one.scores.own.values for one in study.of(LOCAL)]).mean(0)
    return {"names": list(names), "alone": plain(np.round(alone, 4)), "courses": courses}


def _last_seen(letters: list[str]) -> int:
    """The last round in which a party was there."""
    from ..rounds.state import PRESENT

    return max((round for round, letter in enumerate(letters, 1) if letter == PRESENT), default=0)


def differences(done: Experiment, before: Kept | None) -> list[str]:
    """In sentences, where an experiment came out otherwise than what is kept: outside of what the kept seeds span."""
    if before is None:
        return ["No numbers of this experiment are kept to compare with."]
    if before.digest != done.recipe.digest:
        return ["The numbers that are kept are of other settings, and are not compared."]
    found, compared = [], 0
    old = {json.dumps(point["at"], sort_keys=True): point["own"] for point in before.points}
    for point in done.points:
        own = old.get(json.dumps(dict(point.at), sort_keys=True), {})
        for method, values in means(point.study).items():
            mean = sum(values) / len(values)
            low, high = (min(own[method]), max(own[method])) if method in own else (mean, mean)
            compared += 1
            if not low - CLOSE <= mean <= high + CLOSE:
                at = f" at {point.name}" if point.at else ""
                span = f"{low:.3f} to {high:.3f} over {len(before.seeds)} seeds"
                found.append(f"{method}{at} came to {mean:.3f}; kept are {span}.")
    within = f"All {compared} means are within what the kept runs span ({len(before.seeds)} seeds, ± {CLOSE})."
    return found or [within]


def _file(key: str, folder: Path | None) -> Path:
    return (folder or home() / key.partition("/")[0]) / "expected.json"


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
