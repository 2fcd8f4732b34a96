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
from ..algorithms.components import fixed
from ..algorithms.fedavg import Local, alone
from ..analysis.findings import Finding, fallen_behind, of_the_data, over_seeds
from ..analysis.scores import Column, Numbers
from ..core.algorithm import Algorithm, Attend
from ..core.metrics import trivial
from ..core.progress import bar
from ..core.settings import describe
from ..errors import SettingError, StateError
from ..federation import Federation, attending
from ..reporting.table import Table
from ..rounds.plan import Data, Model, parties_of
from .result import LOCAL, Result, carry_out, mean_of_known, plain, spread
from .result_cache import Finished
from .summary import counts, learned, verdict

__all__ = ["LOCAL", "Result", "Study", "compare"]

SHOWN = (
    "mean",
    "learned",
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
PLACES = {"gained": 0, "lost": 0, "trained": 0}
_EVEN = 1e-9  # a difference in score that is the noise of adding up
Ran: TypeAlias = Callable[[Sequence[Algorithm]], tuple[list[Result], list[Algorithm]]]
"""An algorithm, one a seed -> what came of it, and training alone beside it, one a seed."""

_DAMAGED = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)


@dataclass(frozen=True)
class Study:
    """What came of a comparison."""

    results: tuple[Result, ...]
    settings: dict[str, Any]

    @property
    def methods(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(result.method for result in self.results))

    @property
    def note(self) -> str:
        """What must be known of the data, in a sentence; "" if there is nothing."""
        return of_the_data(str(self.settings.get("note", "")))

    def __repr__(self) -> str:
        return f"<Study of {', '.join(self.methods)}>"

    def of(self, method: str) -> list[Result]:
        """The results of one method, one a seed."""
        return [result for result in self.results if result.method == method]

    def alone(self, method: str) -> list[Result]:
        """Local-only training with the same attendance and work, one result a seed."""
        return self.of(self.of(method)[0].beside)

    def gains(self, method: str, over: str | None = None) -> Numbers:
        """What each party gained over training alone, or over another method: paired by seed, the mean over the seeds.

        ``[parties]``; nan where it never trained, because then it is judged by a model that it had no part in.
        """
        others = self.alone(method) if over is None else self.of(over)
        return self._gains([(r.learned, other.learned) for r, other in zip(self.of(method), others, strict=True)])

    def _gains(self, pairs: Sequence[tuple[Column, Column]]) -> Numbers:
        sign = 1 if pairs[0][0].higher_is_better else -1
        with np.errstate(invalid="ignore"):  # two models that failed
            each = sign * np.array([own.values - alone.values for own, alone in pairs])  # [seeds, parties]
        gains = mean_of_known(each)
        return np.where(np.abs(gains) <= _EVEN, 0.0, gains)

    def table(self) -> Table:
        """One row a method, over its parties and seeds; more is in the rows than is printed (p50, p90, best round)."""
        rows = [self._majority(self.of(LOCAL)), *(self._row(method) for method in self.methods)]
        everybody = all(row["mean"] == row["learned"] or row["mean"] != row["mean"] for row in rows)
        shown = [name for name in SHOWN if name != "learned" or not everybody]
        return Table(("method", *shown), rows, self.verdict(), PLACES, self.findings())

    def _row(self, method: str) -> dict[str, Any]:
        results = self.of(method)
        means = [result.scores.own.mean for result in results]
        best = [result.best for result in results]
        return {
            "method": method,
            "mean": float(np.mean(means)),
            "learned": learned(results),
            "± seeds": Column(np.array(means)).spread if len(results) > 1 else float("nan"),
            "best": float(np.mean([score for _, score in best])),
            "best round": float(np.mean([at for at, _ in best])),
            **spread([result.scores.own for result in results]),
            "centre": float("nan") if method == results[0].beside else _mean(results, "center"),  # alone has none
            "before": _mean(results, "before"),
            "after": _mean(results, "after"),
            **counts(self.gains(method)),
            "trained": float(np.mean([result.trained for result in results])),
        }

    def _majority(self, alone: list[Result]) -> dict[str, Any]:
        columns = [result.scores.majority for result in alone]
        unknown = dict.fromkeys(("± seeds", "best", "best round", "centre", "before", "after", "trained"), float("nan"))
        return {
            "method": trivial(alone[0].scores.metric),
            "mean": float(np.mean([column.mean for column in columns])),
            "learned": float(np.mean([result.of_trained(result.scores.majority).mean for result in alone])),
            **unknown,
            **spread(columns),
            **counts(self._gains([(result.scores.majority, result.learned) for result in alone])),
        }

    def verdict(self) -> str:
        """In a few sentences: which method served the parties best, if any did, who gained and lost, what collapsed."""
        return verdict(self)

    def collapses(self) -> dict[str, int]:
        """The methods that collapsed, each with the first round at which it did, in any seed."""
        found = [(name, at) for name in self.methods for at in self.collapsed(name) if at is not None]
        return {method: min(at for name, at in found if name == method) for method, _ in found}

    def collapsed(self, method: str) -> list[int | None]:
        """The round at which a method collapsed, or None, one a seed."""
        each = [[f.round for f in found if f.kind == "collapse" and f.round] for found in self._found(method)]
        return [min(rounds, default=None) for rounds in each]

    def findings(self) -> tuple[str, ...]:
        """What is wrong, in sentences, each once."""
        return tuple(dict.fromkeys(f.text for name in self.methods for f in over_seeds(self._found(name))))

    def _found(self, method: str) -> list[tuple[Finding, ...]]:
        """The findings of a method, one tuple a seed, with what only training alone beside it can tell."""
        return [
            (*result.findings, *_behind(result, beside))
            for result, beside in zip(self.of(method), self.alone(method), strict=True)
        ]

    def plot(self, kind: str, file: str | Path) -> Path:
        """Draw "curves", "parties", "spikes", "collapse", "walk", "hyper", "presence", "rewards", "portfolio" or
        "weights"."""
        from .study_report import draw

        return draw(self, kind, Path(file))

    def save(self, folder: str | Path) -> Path:
        """Write study.json, the pictures and report.html."""
        from .study_report import write

        return write(self, Path(folder))

    @classmethod
    def load(cls, folder: str | Path) -> Study:
        """The study that :meth:`save` wrote into a folder."""
        try:
            found = json.loads((Path(folder) / "study.json").read_text(encoding="utf-8"))
            return cls(tuple(map(Result.from_json, found["results"])), found["settings"])
        except _DAMAGED as error:
            raise StateError(
                f"{folder} does not hold a study that this version can read ({type(error).__name__}: {error}). "
                "Give a folder that Study.save wrote."
            ) from error

    def to_json(self) -> str:
        """Everything in it, for programs."""
        table = [{k: plain(v) if isinstance(v, float) else v for k, v in row.items()} for row in self.table().rows]
        head = {"descant": __version__, "verdict": self.verdict(), "findings": self.findings(), "table": table}
        return json.dumps({**head, "settings": self.settings, "results": [r.to_json() for r in self.results]})


def _behind(result: Result, beside: Result) -> Iterator[Finding]:
    if any(finding.kind == "collapse" for finding in result.findings):
        return
    if "reward" in result.series and "reward" in beside.series:
        found = fallen_behind(result.method, result.series, beside.series["reward"])
        if found is not None:
            yield found


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
    local: Algorithm = Local(),  # noqa: B008  a frozen value
    kept: str | Path | Finished | None = None,
    **settings: Any,
) -> Study:
    """Run every algorithm with every seed, and local-only training beside. ``settings`` are Federation's.

    ``seeds`` is how many, or which; the curve is measured ``points`` times on the way. ``local`` is how a party trains
    alone, where all algorithms have something in their loss that it should have, too. ``kept`` is a folder for the
    trainings that have finished: broken off, the same comparison goes on behind them.
    """
    chosen = list(range(seeds)) if isinstance(seeds, int) else list(map(int, seeds))
    if isinstance(algorithms, Algorithm) or rounds < 1 or not chosen or "seed" in settings:
        raise SettingError(
            "compare needs a list of algorithms, at least one round and at least one seed (seeds=3, or seeds=[1, 2]). "
            f"Got {algorithms!r:.40}, rounds={rounds}, seeds={seeds}."
        )
    if settings.get("vault") is not None:
        raise SettingError("compare runs many federations, and a vault is for one run: leave 'vault' out.")
    given = _checked([attending(algorithm, attend) for algorithm in algorithms], local)
    made, finished = parties_of(people), Finished.at(kept)
    with bar(disable=not progress) as shown:

        def ran(each: Sequence[Algorithm]) -> tuple[list[Result], list[Algorithm]]:
            line = shown.add_task(each[0].name, total=rounds * len(chosen), told="–")
            found, beside = [], []
            for seed, algorithm in zip(chosen, each, strict=True):
                federation = Federation(model, people, algorithm, seed=seed, **settings)
                federation.people = made
                tick = partial(shown.update, line, advance=1)
                train = partial(carry_out, federation, rounds, points, tick)
                found.append(finished.of(federation, rounds, points, train))
                shown.update(line, completed=rounds * len(found))
                beside.append(alone(algorithm, found[-1].tuned, local))
            return found, beside

        results, yardsticks = _side_by_side([[algorithm] * len(chosen) for algorithm in given], ran)
    about = {"rounds": rounds, "seeds": chosen, "parties": len(made), **describe(settings)}
    about |= {"note": made.note} if made.note else {}
    about["algorithms"] = [describe(algorithm) for algorithm in [*yardsticks, *filter(_joins, given)]]
    return Study(tuple(results), about)


def _side_by_side(given: Sequence[list[Algorithm]], ran: Ran) -> tuple[list[Result], list[Algorithm]]:
    """Every algorithm (one a seed) and, before them, its yardstick: training alone with the same attendance and work.

    What work that was is known when the algorithm has run: a tuner may have chosen it. Those of like work share one.
    """
    alone: list[Result] = []
    others: list[Result] = []
    yardsticks: list[list[Algorithm]] = []
    for each in sorted(given, key=lambda each: _joins(each[0])):
        found, beside = ran(each)
        known = next((one for one in yardsticks if [replace(a, name=LOCAL) for a in one] == beside), None)
        if known is None:
            name = f"{LOCAL}, as {each[0].name}" if yardsticks else LOCAL
            known = [replace(algorithm, name=name) for algorithm in beside]
            yardsticks.append(known)
            lone = ran(known)[0] if _joins(each[0]) else found
            alone += [replace(result, beside=name) for result in lone]
        if _joins(each[0]):
            others += [replace(result, beside=known[0].name) for result in found]
    return alone + others, [known[0] for known in yardsticks]


def _joins(algorithm: Algorithm) -> bool:
    """Whether it is anything but training alone."""
    return algorithm.name != LOCAL


def _checked(algorithms: list[Algorithm], local: Algorithm) -> list[Algorithm]:
    """The algorithms, if they can be told apart by their names."""
    names = [algorithm.name for algorithm in algorithms]
    if len(set(names)) < len(names) or any(name.startswith(f"{LOCAL}, as ") for name in names):
        raise SettingError(f"Two algorithms have one name: {names}. Use dataclasses.replace(..., name=...).")
    for algorithm in algorithms:
        untuned = replace(algorithm, tune=fixed)
        if algorithm.name == LOCAL and untuned != alone(untuned, (), local):
            raise SettingError(f"{LOCAL!r} is the name of training alone. Give your algorithm another one.")
    return algorithms


def _mean(results: list[Result], column: str) -> float:
    return float(np.mean([getattr(result.scores, column).mean for result in results]))
