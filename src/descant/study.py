"""Methods side by side: the same parties, rounds, work and draws; local-only and the majority class stand beside."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from . import __version__
from .algorithms.baselines import Local
from .core import Algorithm, Attend
from .errors import SettingError
from .evaluate import Scores
from .federation import Federation, attending, bar
from .piece import Data, Model, parties_of
from .settings import describe
from .table import Table

MAJORITY = "majority class"
LOCAL = "Local"


@dataclass(frozen=True)
class Result:
    """One method with one seed: its scores at the end, and a curve of (round, mean own, mean centre) on the way."""

    method: str
    seed: int
    scores: Scores
    curve: tuple[tuple[int, float, float], ...]
    seconds: float
    refused: int
    beside: str = LOCAL  # the local-only run with the same attendance and work


@dataclass(frozen=True)
class Study:
    """What came of a comparison."""

    results: tuple[Result, ...]
    settings: dict[str, Any]

    @property
    def methods(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(result.method for result in self.results))

    def __repr__(self) -> str:
        return f"<Study of {', '.join(self.methods)}>"

    def of(self, method: str) -> list[Result]:
        """The results of one method, one a seed."""
        return [result for result in self.results if result.method == method]

    def alone(self, method: str) -> list[Result]:
        """Local-only training with the same attendance and work, one result a seed."""
        return self.of(self.of(method)[0].beside)

    def table(self) -> Table:
        """One row a method: mean (± over seeds), worst and spread over parties, centre, who gained against Local."""
        rows = [self._majority(self.of(LOCAL)), *(self._row(method, self.alone(method)) for method in self.methods)]
        columns = ("method", "mean", "± seeds", "worst", "spread", "centre", "gained", "lost")
        return Table(columns, rows, self.verdict(), {"gained": 1, "lost": 1})

    def verdict(self) -> str:
        """In two sentences: which method served the parties best, if any did, and how many gained and lost."""
        yardsticks = {result.beside for result in self.results}
        means = {method: _mean(self.of(method), "own") for method in self.methods if method not in yardsticks}
        means = {method: mean for method, mean in means.items() if mean == mean}
        if not means:
            return ""
        sign = 1 if self.results[0].scores.own.higher_is_better else -1
        best = max(means, key=lambda method: sign * means[method])
        alone, judged = self.alone(best), self._judged()
        row, local = self._row(best, alone), _mean(alone, "own")
        numbers = f"{means[best]:.3f} {alone[0].scores.metric} against {local:.3f} alone"
        if sign * (means[best] - local) > 0:
            first = f"{best} served the parties best: {numbers}."
        else:
            first = f"Nothing beat training alone; {best} came closest: {numbers}."
        over = ", on average over the seeds" if len(alone) > 1 else ""
        gained, lost = (f"{round(row[name], 1):g}" for name in ("gained", "lost"))
        refused = sum(result.refused for result in self.results)
        told = f" {refused} updates were refused on the way." if refused else ""
        return f"{first} {gained} of {judged} parties gained by joining, {lost} lost{over}.{told}"

    def plot(self, kind: str, file: str | Path) -> Path:
        """Draw "curves" (score by round) or "parties" (each party with each method) into a PNG file."""
        from .report import draw

        return draw(self, kind, Path(file))

    def save(self, folder: str | Path) -> Path:
        """Write study.json, the pictures and report.html."""
        from .report import write

        return write(self, Path(folder))

    def to_json(self) -> str:
        """Everything in it, for programs."""
        results = [
            {
                "method": r.method,
                "seed": r.seed,
                "metric": r.scores.metric,
                "parties": list(r.scores.names),
                "own": _plain(r.scores.own.values),
                "center": _plain(r.scores.center.values),
                "majority": _plain(r.scores.majority.values),
                "curve": [[point[0], *_plain(point[1:])] for point in r.curve],
                "seconds": r.seconds,
                "refused": r.refused,
            }
            for r in self.results
        ]
        table = [{key: None if value != value else value for key, value in row.items()} for row in self.table().rows]
        head = {"descant": __version__, "verdict": self.verdict(), "table": table}
        return json.dumps({**head, "settings": self.settings, "results": results})

    def _judged(self) -> int:
        return int((~np.isnan(self.results[0].scores.own.values)).sum())

    def _majority(self, alone: list[Result]) -> dict[str, Any]:
        columns = [result.scores.majority for result in alone]
        pairs = [(r.scores.majority, r.scores.own) for r in alone]
        return {
            "method": MAJORITY,
            "mean": float(np.mean([c.mean for c in columns])),
            "± seeds": float("nan"),
            "worst": float(np.mean([c.worst for c in columns])),
            "spread": float(np.mean([c.spread for c in columns])),
            "centre": float("nan"),
            "gained": float(np.mean([m.gained(own) for m, own in pairs])),
            "lost": float(np.mean([own.gained(m) for m, own in pairs])),
        }

    def _row(self, method: str, alone: list[Result]) -> dict[str, Any]:
        results = self.of(method)
        pairs = [(r.scores.own, a.scores.own) for r, a in zip(results, alone, strict=True)]
        return {
            "method": method,
            "mean": _mean(results, "own"),
            "± seeds": float(np.std([r.scores.own.mean for r in results])) if len(results) > 1 else float("nan"),
            "worst": float(np.mean([r.scores.own.worst for r in results])),
            "spread": float(np.mean([r.scores.own.spread for r in results])),
            "centre": float("nan") if method == results[0].beside else _mean(results, "center"),  # alone has none
            "gained": float(np.mean([own.gained(local) for own, local in pairs])),
            "lost": float(np.mean([local.gained(own) for own, local in pairs])),
        }


def compare(
    algorithms: Sequence[Algorithm],
    model: Model,
    people: Data,
    *,
    rounds: int,
    seeds: int | Sequence[int] = 1,
    points: int = 10,
    progress: bool = True,
    attend: Attend | int | None = None,
    **settings: Any,
) -> Study:
    """Run every algorithm with every seed, and local-only training beside. ``settings`` are Federation's.

    ``seeds`` is how many, or which; the curve is measured ``points`` times on the way.
    """
    chosen = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
    if isinstance(algorithms, Algorithm) or rounds < 1 or not chosen or "seed" in settings:
        raise SettingError(
            "compare needs a list of algorithms, at least one round and at least one seed (seeds=3, or seeds=[1, 2]). "
            f"Got {algorithms!r:.40}, rounds={rounds}, seeds={seeds}."
        )
    pairs = _beside([attending(algorithm, attend) for algorithm in algorithms])
    made = parties_of(people)
    results = []
    with bar(disable=not progress) as shown:
        for algorithm, beside in pairs:
            line = shown.add_task(algorithm.name, total=rounds * len(chosen), loss="–")
            for seed in chosen:
                federation = Federation(model, people, algorithm, seed=seed, **settings)
                federation.people = made
                tick = partial(shown.update, line, advance=1)
                results.append(replace(_one(federation, rounds, points, tick), beside=beside))
    about = {"rounds": rounds, "seeds": chosen, "parties": len(made), **describe(settings)}
    about["algorithms"] = [describe(algorithm) for algorithm, _ in pairs]
    return Study(tuple(results), about)


def _beside(algorithms: Sequence[Algorithm]) -> list[tuple[Algorithm, str]]:
    """Every algorithm with the name of its yardstick: training alone, with the same attendance and tuning."""
    yardsticks: list[Algorithm] = []
    others: list[tuple[Algorithm, str]] = []
    for algorithm in algorithms:
        same = (algorithm.attend, algorithm.tune)
        local = next((other for other in yardsticks if (other.attend, other.tune) == same), None)
        if local is None:
            name = f"{LOCAL}, as {algorithm.name}" if yardsticks else LOCAL
            local = replace(Local(), name=name, attend=algorithm.attend, tune=algorithm.tune)
            yardsticks.append(local)
        if algorithm.name != LOCAL:
            others.append((algorithm, local.name))
        elif algorithm != replace(local, name=LOCAL):
            raise SettingError(f"{LOCAL!r} is the name of training alone. Give your algorithm another one.")
    pairs = [(local, local.name) for local in yardsticks] + others
    names = [algorithm.name for algorithm, _ in pairs]
    if len(set(names)) < len(names):
        raise SettingError(f"Two algorithms have one name: {names}. Use dataclasses.replace(..., name=...).")
    return pairs


def _one(federation: Federation, rounds: int, points: int, tick: Callable[..., None]) -> Result:
    looked = {round(at) for at in np.linspace(1, rounds, min(points, rounds))}
    curve = []
    seconds = 0.0
    for scored in federation.rounds(rounds):
        tick(loss=f"{scored.round.loss:.4f}")
        seconds += scored.round.seconds
        if scored.index in looked:
            curve.append((scored.index, scored.scores.own.mean, scored.scores.center.mean))
    scores, refused = federation.scores(), len(federation.refusals_)
    return Result(federation.algorithm.name, federation.seed, scores, tuple(curve), seconds, refused)


def _mean(results: list[Result], column: str) -> float:
    return float(np.mean([getattr(result.scores, column).mean for result in results]))


def _plain(values: Any) -> list[float | None]:
    return [float(value) if np.isfinite(value) else None for value in values]
