"""Contributions of the parties: the gain of each, and its effect on the others.

"Asynchronous Collaborative Learning Across Data Silos" (Tuor, Lockhart and Magazzeni, 2021), §8, leaves it open how to
quantify the contribution of each client; "there is always a client that profits more than what they put in". Here
every coalition of parties trains with the same settings and draws and is evaluated on the test sets of all parties:
members with their personal models, the others with the coalition's global model. The empty coalition has the initial
model.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..analysis.scores import Numbers
from ..analysis.shapley_values import Coalition, draw_orders, needed_coalitions, shapley, standard_error
from ..core.algorithm import Algorithm, Participation
from ..core.progress import progress_bar
from ..errors import SettingError
from ..federation import Federation, with_participation
from ..reporting.figure import label, open_figure
from ..reporting.plots import MAX_NAMED_PARTIES
from ..reporting.table import Table
from ..rounds.plan import ModelSource, PopulationSource, make_population
from .coalitions import CoalitionScores
from .training_result import nanmean

_COLUMNS = ("party", "samples", "local", "joint", "gain", "share", "± share", "given", "± gives", "leave-one-out")


@dataclass(frozen=True)
class Contributions:
    """The contribution of every party. The sign of a difference is such that above 0 is better for any metric.

    ``draws`` has one entry per seed. With a single seed it has one per drawn order in which the parties join, or a
    single exact one. An entry is ``[parties, parties + 1]``: the contribution of a party (row) to each party's score
    (column) and, in the last column, to the sum of all gains.
    """

    names: tuple[str, ...]
    samples: tuple[int, ...]
    metric: str
    local: Numbers  # [parties] score on its own test set after local training
    joint: Numbers  # [parties] the same after joint training of all
    gain: Numbers  # [parties] joint - local, with the sign of the metric
    left_out: Numbers  # [parties, parties] loss of each score (column) when a party (row) is left out
    draws: Numbers  # [draws, parties, parties + 1] Shapley values
    description: str  # the trainings in a sentence

    @property
    def pairwise(self) -> Numbers:
        """The Shapley value of each party (row) for the score of each party (column)."""
        mean: Numbers = self.draws.mean(0)[:, :-1]
        return mean

    @property
    def fair_share(self) -> tuple[Numbers, Numbers]:
        """Each party's Shapley share of the sum of all gains, and its standard error.

        The shares add up to the sum of the gains. A party with a larger share than gain contributes more than it gets.
        """
        return self.draws.mean(0)[:, -1], standard_error(self.draws[..., -1])

    @property
    def given_to_others(self) -> tuple[Numbers, Numbers]:
        """Each party's mean contribution to the score of another party, and its standard error."""
        to_others = np.stack([mean_over_others(draw[:, :-1]) for draw in self.draws])
        return to_others.mean(0), standard_error(to_others)

    @property
    def leave_one_out(self) -> Numbers:
        """The mean loss of the other parties when a party is left out."""
        return mean_over_others(self.left_out)

    def table(self) -> Table:
        """Return one row per party: local and joint score, share of the joint gain, contribution to others."""
        numbers = (self.local, self.joint, self.gain, *self.fair_share, *self.given_to_others, self.leave_one_out)
        rows: list[dict[str, Any]] = [
            dict(zip(_COLUMNS, (name, size, *map(float, values)), strict=True))
            for name, size, *values in zip(self.names, self.samples, *numbers, strict=True)
        ]
        return Table(_COLUMNS, rows, self._verdict(), notes=tuple(self._notes()))

    def _verdict(self) -> str:
        local, joint = (float(nanmean(each)) for each in (self.local, self.joint))
        given = self.given_to_others[0]
        top_giver = int(np.nanargmax(self.given_to_others[0]))
        top_gainer = int(np.nanargmax(self.gain))
        giver = f"Party {self.names[top_giver]!r} contributes most to the others ({given[top_giver]:+.3f} each)"
        giver = giver if given[top_giver] > 0 else "No party contributes to the others"
        gainer = f"party {self.names[top_gainer]!r} gains most ({self.gain[top_gainer]:+.3f})"
        gainer = gainer if self.gain[top_gainer] > 0 else "no party gains"
        return f"{self.metric}: local {local:.3f}, joint {joint:.3f}. {giver}, {gainer}."

    def _notes(self) -> list[str]:
        share = self.fair_share[0]
        surplus = np.where(share > 0, np.nan_to_num(share - self.gain), 0.0)  # a negative share contributes nothing
        top_contributor = int(surplus.argmax())
        notes = [self.description]
        if surplus[top_contributor] > 0:
            notes.append(
                f"Party {self.names[top_contributor]!r} contributes most beyond what it gets: its share of the joint "
                f"gain is {share[top_contributor]:+.3f}, its own gain {self.gain[top_contributor]:+.3f}."
            )
        if len(self.draws) < 2:
            notes.append("One seed says nothing about the spread over seeds: give seeds=3.")
        return notes

    def plot(self, file: str | Path) -> Path:
        """Draw each party's gain, share and contribution to others into a PNG file; bars are ± 2 standard errors."""
        unknown = np.full(len(self.names), np.nan)
        lines = {
            "own gain": (self.gain, unknown),
            "share of all gains": self.fair_share,
            "contribution to each other party": self.given_to_others,
            "leave-one-out": (self.leave_one_out, unknown),
        }
        positions = np.arange(len(self.names))
        with open_figure(Path(file), lines, integer_rounds=False) as ((axes,), styles):
            for position in positions[::2]:
                axes.axvspan(position - 0.5, position + 0.5, color="#f2f2f2", linewidth=0, zorder=0)  # below the grid
            axes.axhline(0, color="black", linewidth=1.0)
            for offset, (series_name, (mean, error)) in zip((-0.27, -0.09, 0.09, 0.27), lines.items(), strict=True):
                style = {**styles[series_name], "linestyle": "none", "markersize": 5}
                axes.errorbar(positions + offset, mean, 2 * error, label=series_name, **style)
            axes.set_xlim(-0.5, len(positions) - 0.5)
            show_names = len(positions) <= MAX_NAMED_PARTIES
            axes.set_xticks(
                positions if show_names else [], [label(name, 18) for name in self.names] if show_names else []
            )
            axes.set_xlabel("party")
            axes.set_ylabel(f"{label(self.metric, 40)}: above 0 is better")
            axes.set_title("Gains and contributions of the parties", loc="left")
        return Path(file)


def contributions(
    algorithm: Algorithm,
    model: ModelSource,
    population: PopulationSource,
    *,
    rounds: int,
    seeds: int | Sequence[int] = 1,
    permutations: int | None = None,
    file: str | Path | None = None,
    progress: bool = True,
    participation: Participation | int | None = None,
    **settings: Any,
) -> Contributions:
    """Return Shapley values, leave-one-out losses and local against joint scores of the parties.

    ``settings`` are those of :class:`Federation`. Up to 10 parties, all coalitions train (2^n - 1 trainings per seed)
    and the values are exact for that seed. With more parties, or with ``permutations``, orders of arrival are drawn (20
    by default, at most n trainings each) and the values have standard errors. Scores of coalitions are stored in
    ``file``: an interrupted call continues from there.

    >>> from torch import nn
    >>> from descant import algorithms, parties
    >>> population = parties.digits(count=3, seed=0)
    >>> settings = {"rounds": 2, "progress": False, "lr": 0.1, "steps": 5}
    >>> result = contributions(algorithms.FedAvg(), lambda: nn.Linear(64, 10), population, **settings)
    >>> bool(abs(result.fair_share[0].sum() - result.gain.sum()) < 1e-9)
    True
    """
    chosen_seeds = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
    population_object = make_population(population)
    algorithm = with_participation(algorithm, participation)
    check_arguments(rounds, chosen_seeds, population_object.names, settings=settings)
    coalitions_by_seed = [coalitions_to_train(population_object.names, permutations, seed) for seed in chosen_seeds]
    trainings = sum(len(group) - 1 for group in coalitions_by_seed)  # the empty coalition does not train
    values = CoalitionScores(None if file is None else Path(file))
    seed_results = list[_SeedResult]()
    with progress_bar(disable=not progress) as shown:
        progress_task = shown.add_task(f"{trainings} trainings", total=trainings + len(chosen_seeds), summary="–")
        for seed, group in zip(chosen_seeds, coalitions_by_seed, strict=True):
            full_federation = Federation(model, population_object, algorithm, seed=seed, **settings)
            values.load(full_federation, rounds)
            started = time.perf_counter()
            scores = dict[Coalition, Numbers]()
            for one in group:
                scores[one] = values.get_or_train(full_federation, one, rounds, settings)
                shown.update(progress_task, advance=1)
                if progress and len(scores) == 1 and seed == chosen_seeds[0]:
                    shown.console.print(cost_sentence(trainings, time.perf_counter() - started))
            plan = full_federation.plan_
            sign = 1 if plan.metric.higher_is_better else -1
            seed_results.append(_SeedResult.from_scores(population_object.names, scores, sign, permutations, seed))
    orders = draw_orders(population_object.names, permutations, 0)
    orders_sentence = "all coalitions, so exact" if orders is None else f"{len(orders)} orders of arrival drawn"
    description = (
        f"{algorithm.name}, {rounds} rounds: {trainings} trainings with {len(chosen_seeds)} seeds ({orders_sentence})."
    )
    return average_over_seeds(population_object.samples, plan.metric.name, seed_results, description=description)


def cost_sentence(trainings: int, first_seconds: float) -> str:
    total_sentence = (
        f"at most {trainings * first_seconds / 60:.1f} min in all"  # no coalition takes longer than that of all parties
    )
    return f"{trainings} trainings. The first, with all parties, took {first_seconds:.1f} s: {total_sentence}."


@dataclass(frozen=True)
class _SeedResult:
    """The result of one seed: scores as measured, differences as gains."""

    local: Numbers
    joint: Numbers
    gain: Numbers
    left_out: Numbers
    draws: Numbers

    @classmethod
    def from_scores(
        cls, names: tuple[str, ...], scores: dict[Coalition, Numbers], sign: int, permutations: int | None, seed: int
    ) -> _SeedResult:
        all_parties = frozenset(names)
        local = np.array([scores[frozenset({name})][i] for i, name in enumerate(names)])

        def value(coalition: Coalition) -> Numbers:
            """Return every party's score and, at the end, the sum of the members' gains over local training."""
            members = np.array([name in coalition for name in names])
            return sign * np.append(scores[coalition], np.nansum((scores[coalition] - local)[members]))

        left_out = np.stack([scores[all_parties] - scores[all_parties - {name}] for name in names])
        draws = shapley(names, value, permutations, seed=seed).draws
        return cls(local, scores[all_parties], sign * (scores[all_parties] - local), sign * left_out, draws)


def average_over_seeds(
    samples: dict[str, int], metric: str, seed_results: list[_SeedResult], description: str
) -> Contributions:
    """Return the mean over seeds; with several seeds, standard errors are computed over seeds."""
    draws = seed_results[0].draws if len(seed_results) == 1 else np.stack([one.draws.mean(0) for one in seed_results])
    means = {
        name: np.mean([getattr(s, name) for s in seed_results], 0) for name in ("local", "joint", "gain", "left_out")
    }
    return Contributions(tuple(samples), tuple(samples.values()), metric, draws=draws, description=description, **means)


def coalitions_to_train(names: Sequence[str], permutations: int | None, seed: int) -> list[Coalition]:
    """Return the coalitions to train, each once: all parties, those of Shapley values, singles, leave-one-out."""
    orders = draw_orders(names, permutations, seed)
    all_parties = frozenset(names)
    more = [each for name in names for each in (frozenset({name}), all_parties - {name})]
    return list(dict.fromkeys([*needed_coalitions(names, orders), *more]))


def check_arguments(rounds: int, seeds: Sequence[int], names: Sequence[str], settings: dict[str, Any]) -> None:
    if not isinstance(rounds, int) or rounds < 1 or not seeds or "seed" in settings or len(names) < 2:
        extra = " and a 'seed'" if "seed" in settings else ""
        raise SettingError(
            "contributions needs at least two parties, one round and one seed (seeds=3, or seeds=[1, 2]). Got "
            f"{len(names)} parties, rounds={rounds!r:.40}, seeds={seeds!r:.40}{extra}."
        )
    if settings.get("vault") is not None:
        raise SettingError(
            "contributions trains many coalitions, each of which would seal coresets: leave 'vault' out."
        )


def mean_over_others(rows: Numbers) -> Numbers:
    """Return the mean of every row without its diagonal entry, ``[parties]``; nan entries do not count."""
    return nanmean(np.where(np.eye(len(rows), dtype=bool), np.nan, rows).T)
