"""What is each party worth? By its own gain, and by what it gives to the others.

"Asynchronous Collaborative Learning Across Data Silos" (Tuor, Lockhart and Magazzeni, 2021), §8, leaves it open how to
quantify the contribution of each client; "there is always a client that profits more than what they put in". Here
coalitions of parties train by themselves, with the same settings and draws, and are judged on the test sets of all
parties: who is in it by its own model, who is not by the coalition's centre, and nobody's coalition is the first model.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..analysis.scores import Numbers
from ..analysis.shapley_values import Coalition, coalitions, orders_of, shapley, standard_error
from ..core.algorithm import Algorithm, Attend
from ..core.progress import bar
from ..errors import SettingError
from ..federation import Federation, attending
from ..reporting.figure import label, picture
from ..reporting.plots import MANY
from ..reporting.table import Table
from ..rounds.plan import Data, Model, parties_of
from .coalitions import Values
from .result import mean_of_known

_COLUMNS = ("party", "samples", "alone", "together", "gain", "share", "± share", "gives", "± gives", "leave-one-out")


@dataclass(frozen=True)
class Worth:
    """What every party is worth. Differences are gains: above 0 is better, whichever way the metric goes.

    ``each`` has one draw a seed, or one an order of arrival if there is a single seed; a draw is ``[parties, parties +
    1]``: what a party (row) adds to the score of each (column), and, in the last column, to the gains of all together.
    """

    names: tuple[str, ...]
    samples: tuple[int, ...]
    metric: str
    alone: Numbers  # [parties] the score on its own test set, of a coalition of one
    together: Numbers  # [parties] the same, of all
    gain: Numbers  # [parties] together - alone
    without: Numbers  # [parties, parties] what the score of each (column) loses when one (row) is left out
    each: Numbers  # [draws, parties, parties + 1] Shapley values
    how: str  # what was trained, in a sentence

    @property
    def between(self) -> Numbers:
        """Who gives what to whom: the Shapley value of a party (row) for the score of another (column)."""
        mean: Numbers = self.each.mean(0)[:, :-1]
        return mean

    @property
    def share(self) -> tuple[Numbers, Numbers]:
        """A party's fair share of what all gain over being alone, in sum, and its standard error.

        It adds up to the sum of the gains. Who has a larger share than its own gain puts in more than it gets out.
        """
        return self.each.mean(0)[:, -1], standard_error(self.each[..., -1])

    @property
    def gives(self) -> tuple[Numbers, Numbers]:
        """What a party adds to the score of another one, the mean over the others, and its standard error."""
        to_others = np.stack([_over_others(draw[:, :-1]) for draw in self.each])
        return to_others.mean(0), standard_error(to_others)

    @property
    def leave_one_out(self) -> Numbers:
        """What the others lose when a party is left out of all, the mean over them."""
        return _over_others(self.without)

    def table(self) -> Table:
        """One row a party: alone and together, its share of the joint gain, and what it gives to the others."""
        numbers = (self.alone, self.together, self.gain, *self.share, *self.gives, self.leave_one_out)
        rows: list[dict[str, Any]] = [
            dict(zip(_COLUMNS, (name, size, *map(float, values)), strict=True))
            for name, size, *values in zip(self.names, self.samples, *numbers, strict=True)
        ]
        return Table(_COLUMNS, rows, self._verdict(), notes=tuple(self._notes()))

    def _verdict(self) -> str:
        alone, together = (float(mean_of_known(each)) for each in (self.alone, self.together))
        gives, most, gains = self.gives[0], int(np.nanargmax(self.gives[0])), int(np.nanargmax(self.gain))
        giver = f"Party {self.names[most]!r} gives most to the others ({gives[most]:+.3f} each)"
        giver = giver if gives[most] > 0 else "No party gives anything to the others"
        gainer = f"party {self.names[gains]!r} gains most ({self.gain[gains]:+.3f})"
        gainer = gainer if self.gain[gains] > 0 else "no party gains"
        return f"{self.metric}: alone {alone:.3f}, together {together:.3f}. {giver}, {gainer}."

    def _notes(self) -> list[str]:
        share = self.share[0]
        credit = np.where(share > 0, np.nan_to_num(share - self.gain), 0.0)  # who takes from the others puts in nothing
        best = int(credit.argmax())
        notes = [self.how]
        if credit[best] > 0:
            notes.append(
                f"Party {self.names[best]!r} puts in the most beyond what it gets: its share of the joint gain is "
                f"{share[best]:+.3f}, its own gain {self.gain[best]:+.3f}."
            )
        if len(self.each) < 2:
            notes.append("With one seed it is not known how much another seed would change: give seeds=3.")
        return notes

    def plot(self, file: str | Path) -> Path:
        """Draw each party's gain, its share and what it gives to the others into a PNG file; bars are ± 2 errors."""
        unknown = np.full(len(self.names), np.nan)
        lines = {
            "its own gain": (self.gain, unknown),
            "its share of all gains": self.share,
            "gives to each other party": self.gives,
            "leave-one-out": (self.leave_one_out, unknown),
        }
        places = np.arange(len(self.names))
        with picture(Path(file), lines, whole=False) as ((axes,), styles):
            for place in places[::2]:
                axes.axvspan(place - 0.5, place + 0.5, color="#f2f2f2", linewidth=0, zorder=0)  # below the grid
            axes.axhline(0, color="black", linewidth=1.0)
            for aside, (told, (mean, error)) in zip((-0.27, -0.09, 0.09, 0.27), lines.items(), strict=True):
                style = {**styles[told], "linestyle": "none", "markersize": 5}
                axes.errorbar(places + aside, mean, 2 * error, label=told, **style)
            axes.set_xlim(-0.5, len(places) - 0.5)
            few = len(places) <= MANY
            axes.set_xticks(places if few else [], [label(name, 18) for name in self.names] if few else [])
            axes.set_xlabel("party")
            axes.set_ylabel(f"{label(self.metric, 40)}: above 0 is better")
            axes.set_title("What each party gets and gives", loc="left")
        return Path(file)


def worth(
    algorithm: Algorithm,
    model: Model,
    people: Data,
    *,
    rounds: int,
    seeds: int | Sequence[int] = 1,
    permutations: int | None = None,
    file: str | Path | None = None,
    progress: bool = True,
    attend: Attend | int | None = None,
    **settings: Any,
) -> Worth:
    """Shapley values and leave-one-out of the parties, and alone against together. ``settings`` are Federation's.

    Up to 10 parties all coalitions train (2^n - 1 trainings a seed) and the values are exact for that seed; of more,
    or with ``permutations``, so many orders of arrival are drawn (20 if nobody says, at most n trainings each) and the
    values have standard errors. Scores of coalitions are kept in ``file``, from which work that was broken off goes on.

    >>> from torch import nn
    >>> from descant import algorithms, parties
    >>> people = parties.digits(count=3, seed=0)
    >>> found = worth(algorithms.FedAvg(), lambda: nn.Linear(64, 10), people, rounds=2, progress=False, lr=0.1, steps=5)
    >>> bool(abs(found.share[0].sum() - found.gain.sum()) < 1e-9)
    True
    """
    chosen = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
    made, algorithm = parties_of(people), attending(algorithm, attend)
    _check(rounds, chosen, made.names, settings)
    groups = [_needed(made.names, permutations, seed) for seed in chosen]
    trainings = sum(len(group) - 1 for group in groups)  # nobody does not train
    values, found = Values(None if file is None else Path(file)), list[_Seed]()
    with bar(disable=not progress) as shown:
        line = shown.add_task(f"{trainings} trainings", total=trainings + len(chosen), told="–")
        for seed, group in zip(chosen, groups, strict=True):
            everybody = Federation(model, made, algorithm, seed=seed, **settings)
            values.begin(everybody, rounds)
            began, scores = time.perf_counter(), dict[Coalition, Numbers]()
            for one in group:
                scores[one] = values.of(everybody, one, rounds, settings)
                shown.update(line, advance=1)
                if progress and len(scores) == 1 and seed == chosen[0]:
                    shown.console.print(_cost(trainings, time.perf_counter() - began))
            plan = everybody.plan_
            sign = 1 if plan.metric.higher_is_better else -1
            found.append(_Seed.of(made.names, scores, sign, permutations, seed))
    orders = orders_of(made.names, permutations, 0)
    drawn = "all coalitions, so exact" if orders is None else f"{len(orders)} orders of arrival drawn"
    how = f"{algorithm.name}, {rounds} rounds: {trainings} trainings with {len(chosen)} seeds ({drawn})."
    return _gathered(made.samples, plan.metric.name, found, how)


def _cost(trainings: int, took: float) -> str:
    whole = f"at most {trainings * took / 60:.1f} min in all"  # nobody takes longer than all together
    return f"What each party is worth: {trainings} trainings; the first, of all parties, took {took:.1f} s: {whole}."


@dataclass(frozen=True)
class _Seed:
    """What came of one seed: scores as they are, differences as gains."""

    alone: Numbers
    together: Numbers
    gain: Numbers
    without: Numbers
    each: Numbers

    @classmethod
    def of(
        cls, names: tuple[str, ...], scores: dict[Coalition, Numbers], sign: int, permutations: int | None, seed: int
    ) -> _Seed:
        whole = frozenset(names)
        alone = np.array([scores[frozenset({name})][i] for i, name in enumerate(names)])

        def value(one: Coalition) -> Numbers:
            """Every party's score and, in the end, what those who are in it gain over being alone, in sum."""
            inside = np.array([name in one for name in names])
            return sign * np.append(scores[one], np.nansum((scores[one] - alone)[inside]))

        without = np.stack([scores[whole] - scores[whole - {name}] for name in names])
        each = shapley(names, value, permutations, seed).each
        return cls(alone, scores[whole], sign * (scores[whole] - alone), sign * without, each)


def _gathered(samples: dict[str, int], metric: str, found: list[_Seed], how: str) -> Worth:
    """The mean over seeds; where there are several, they are the draws that errors are reckoned from."""
    each = found[0].each if len(found) == 1 else np.stack([one.each.mean(0) for one in found])
    means = {name: np.mean([getattr(s, name) for s in found], 0) for name in ("alone", "together", "gain", "without")}
    return Worth(tuple(samples), tuple(samples.values()), metric, each=each, how=how, **means)


def _needed(names: Sequence[str], permutations: int | None, seed: int) -> list[Coalition]:
    """All first, then those of the Shapley values, of training alone, and of leaving one out; each once."""
    orders, whole = orders_of(names, permutations, seed), frozenset(names)
    more = [one for name in names for one in (frozenset({name}), whole - {name})]
    return list(dict.fromkeys([*coalitions(names, orders), *more]))


def _check(rounds: int, seeds: Sequence[int], names: Sequence[str], settings: dict[str, Any]) -> None:
    if not isinstance(rounds, int) or rounds < 1 or not seeds or "seed" in settings or len(names) < 2:
        told = " and a 'seed'" if "seed" in settings else ""
        raise SettingError(
            "worth needs at least two parties, one round and one seed (seeds=3, or seeds=[1, 2]). Got "
            f"{len(names)} parties, rounds={rounds!r:.40}, seeds={seeds!r:.40}{told}."
        )
    if settings.get("vault") is not None:
        raise SettingError("worth trains many coalitions, each of which would seal coresets: leave 'vault' out.")


def _over_others(rows: Numbers) -> Numbers:
    """The mean of every row without its own entry, ``[parties]``; who has no test set does not count."""
    return mean_of_known(np.where(np.eye(len(rows), dtype=bool), np.nan, rows).T)
