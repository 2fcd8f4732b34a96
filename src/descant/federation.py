"""A federation you can hold: make it, fit it, ask each party's model and whether joining helped."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from torch import Tensor, nn
from torch.nn import functional

from .algorithms import Sample
from .algorithms.fedavg import local_baseline
from .core.algorithm import Algorithm, Loss, Participation
from .core.interfaces import Engine, Solver
from .core.messages import CORESET_KEY
from .core.metrics import Metric, metric_for
from .core.progress import progress_bar
from .engines import InProcess
from .errors import DescantError, DescantWarning, SettingError, StateError
from .parties import Population
from .rounds import checkpoint
from .rounds.loop import Round, State, initial_state, possible_execution_modes, run
from .rounds.plan import ModelSource, Plan, PopulationSource, make_population
from .storage import DEFAULT_BUDGET
from .training import Sgd

if TYPE_CHECKING:
    from .analysis import Finding
    from .analysis.scores import Scores
    from .reporting.table import Table
    from .storage.vault.coreset_rows import CoresetLimit
    from .storage.vault.vault_location import VaultLocation

EngineFactory: TypeAlias = Callable[[Plan], Engine]


@dataclass(frozen=True)
class ScoredRound:
    """A round, and its scores when they are asked for: only while the run stands at it."""

    round: Round
    _compute_scores: Callable[[int], Scores]

    @property
    def index(self) -> int:
        return self.round.index

    @cached_property
    def scores(self) -> Scores:
        """Every party's own test set with its own model, the centre and the majority class."""
        return self._compute_scores(self.round.index)


class Federation:
    """Parties that learn together by an algorithm, each with a model of its own.

    >>> from descant import algorithms, parties
    >>> people = parties.digits(count=4, seed=0)
    >>> fed = Federation(lambda: nn.Linear(64, 10), people, algorithms.FedAvgPlus(), lr=0.1, steps=5, batch=10)
    >>> fed.fit(2, progress=False).history_[-1]["round"]
    2
    """

    def __init__(
        self,
        model: ModelSource,
        population: PopulationSource,
        algorithm: Algorithm,
        *,
        solver: Solver | None = None,
        lr: float | None = None,
        steps: int | None = None,
        batch: int | None = None,
        loss: Loss = functional.cross_entropy,
        metric: Metric | Callable[[Tensor, Tensor], Tensor] | None = None,
        participation: Participation | int | None = None,
        seed: int = 0,
        engine: EngineFactory = InProcess,
        memory_budget: int = DEFAULT_BUDGET,
        vault: VaultLocation | None = None,
        coreset_limit: CoresetLimit | None = None,
        deadline: float = 600.0,
    ) -> None:
        self.model = model
        self.data = population
        self.algorithm = algorithm
        self.solver = solver
        shorthand: dict[str, Any] = {"lr": lr, "steps": steps, "batch": batch}
        self.shorthand = {name: value for name, value in shorthand.items() if value is not None}
        self.loss = loss
        self.metric = metric
        self.participation = participation
        self.seed = seed
        self.engine = engine
        self.memory_budget = (
            memory_budget  # bytes of party state in memory, for models and for memories each; the rest is on disk
        )
        self.vault = vault
        self.coreset_limit = coreset_limit  # where coresets are kept, and how many rows a party lets go: see Plan
        self.deadline = deadline  # seconds that a party has for a task
        self.history_ = checkpoint.make_history()
        self.rejections_ = checkpoint.make_rejections()

    def __repr__(self) -> str:
        at = self._state.round if "_state" in self.__dict__ else 0
        name = getattr(self.algorithm, "name", self.algorithm)
        return f"<Federation of {len(self.population)} parties by {name}, after {at} rounds>"

    @cached_property
    def population(self) -> Population:
        """The parties."""
        return make_population(self.data)

    @cached_property
    def plan_(self) -> Plan:
        """All that is decided of it before the first round: net, parties, method, solver; made when it is asked for."""
        if self.solver is not None and self.shorthand:
            raise SettingError(f"Give a solver, or {', '.join(self.shorthand)} as shorthand for Sgd, not both.")
        given: object = self.solver
        if isinstance(given, str | type) or not callable(self.engine):
            given_values = f"solver={self.solver!r:.60}, engine={self.engine!r:.60}"
            raise SettingError(
                f"Give a solver such as Sgd(lr=0.1), and an engine such as InProcess. Got {given_values}."
            )
        for name, number in (("seed", self.seed), ("memory_budget", self.memory_budget)):
            if not isinstance(number, int | np.integer) or isinstance(number, bool):
                raise SettingError(f"The {name!r} of Federation must be a whole number. Got {number!r:.60}.")
        first = self.population[self.population.names[0]]
        solver = self.solver or Sgd(**self.shorthand)
        plan = Plan.create(
            self.model,
            self.population,
            with_participation(self.algorithm, self.participation),
            int(self.seed),
            solver=solver,
            loss=self.loss,
            metric=metric_for(self.metric or solver.metric, self.loss, first),
            memory_budget=self.memory_budget,
            vault=self.vault,
            coreset_limit=self.coreset_limit,
            deadline=self.deadline,
        )
        return replace(plan, origin=(self.model, self.data))

    @cached_property
    def engine_(self) -> Engine:
        """What carries its tasks to the parties, and what they remember."""
        return self.engine(self.plan_)

    @property
    def state(self) -> State:
        """Where the run stands."""
        if "_state" not in self.__dict__:
            self._state = initial_state(self.plan_)
        return self._state

    @state.setter
    def state(self, state: State) -> None:
        self._state = state

    def rounds(self, n: int, evaluate_local_in: Collection[int] | None = None) -> Iterator[ScoredRound]:
        """The next n rounds, one at a time; `break` stops, and calling it again goes on.

        In the rounds with the numbers ``judge`` (the last of the n, if none are given) the parties judge their own
        local work: the scores then have "before" and "after" of those who took part. It changes nothing else.
        """
        if not isinstance(n, int) or isinstance(n, bool) or n < 0:
            raise SettingError(f"The number of rounds must be a whole number >= 0. Got {n!r}.")
        scored_rounds = {self.state.round + n} if evaluate_local_in is None else set(evaluate_local_in)
        for round in self._undo_on_error(run(self.plan_, self.engine_, self.state, n, scored_rounds)):
            if round.index != self.state.round + 1:
                raise DescantError(
                    f"Another loop has taken this federation to round {self.state.round}: start a new one."
                )
            self.state = round.state
            self._warn(round)
            self.rejections_.extend(round.rejections)
            self.history_.append(round.to_record())
            yield ScoredRound(round, self._compute_scores)

    def _undo_on_error(self, rounds: Iterator[Round]) -> Iterator[Round]:
        """The same rounds; one that breaks off is undone at once, so that hash, save and scores see none of it."""
        try:
            yield from rounds
        except BaseException:
            with suppress(StateError):
                self.engine_.party_states.rollback(self.state.round)
                self.state.personal_models.rollback(self.state.round)
            raise

    def _warn(self, round: Round) -> None:
        for note in filter(None, (round.tuner_note, round.note)):
            warnings.warn(f"Round {round.index}: {note}.", DescantWarning, stacklevel=4)
        if not round.note and round.rejections and not self.rejections_:  # the first time; the rest are in refusals_
            asked_parties = {
                *round.participants,
                *round.proxied,
                *(r.party for r in round.rejections if r.party in self.population),
            }
            rejected = [refusal for refusal in round.rejections if refusal.tensor != CORESET_KEY]
            subject = f"{len(rejected)} of {len(asked_parties)} reports were" if rejected else "What a party left was"
            text = f"{subject} refused, the first: {round.rejections[0]}. All are in refusals_."
            warnings.warn(text, DescantWarning, stacklevel=4)

    def fit(self, rounds: int, progress: bool = True) -> Federation:
        """Run some more rounds, with a progress bar."""
        self.state  # noqa: B018  errors come before the bar
        with progress_bar(disable=not progress) as display:
            task_id = display.add_task(self.algorithm.name, total=rounds, summary="–")
            for round in self.rounds(rounds):
                display.update(task_id, advance=1, summary=round.round.summary)
        return self

    def _compute_scores(self, index: int) -> Scores:
        if index != self.state.round:
            raise DescantError(
                f"The scores of round {index} must be read while the run stands there; it is at {self.state.round}."
            )
        scores = self.scores()
        if self.history_ and self.history_[-1]["round"] == index:
            from .analysis import coverage

            trained = np.array(list(map(coverage(self).rounds.get, scores.names))) > 0
            means = {
                "personal": scores.personal,
                "personal_trained": scores.personal.masked(trained),
                "global_model": scores.global_model,
            }
            self.history_[-1].update({name: column.mean for name, column in means.items()})
            if "presence" in self.history_[-1]:
                self.history_[-1]["global_model_scores"] = scores.global_model.values.tolist()
        return scores

    def scores(self) -> Scores:
        """Every party's own test set, judged now."""
        from .analysis.scores import evaluate_parties

        scores = evaluate_parties(self.plan_, self.engine_, self.state)
        self._scored = (self.state.round, scores)
        return scores

    @property
    def cached_scores(self) -> Scores | None:
        """What scores() has found, if it was asked for since the last round."""
        at, scores = self.__dict__.get("_scored", (None, None))
        return scores if at == self.state.round else None

    def findings(self) -> tuple[str, ...]:
        """What is wrong, in sentences, from numbers that are known: ask for scores() first to hear about them, too."""
        return tuple(finding.text for finding in self._findings())

    def _findings(self) -> tuple[Finding, ...]:
        from .analysis import Finding, data_note_sentence, federation_findings

        data_findings = (Finding("data", note),) if (note := data_note_sentence(self.population.note)) else ()
        return data_findings + federation_findings(self, self.cached_scores)

    def plot(self, kind: str, file: str | Path) -> Path:
        """Draw "spikes" (at aggregation), "collapse", "walk" (own to centre), "hyper" (as tuned), "presence" (who was
        there, who was stood in for), "rewards" (of agents), "portfolio", "weights" or "universes" (of desks)."""
        from .analysis import draw_federation_plot

        return draw_federation_plot(self, kind, file)

    def _local_baseline(self, names: Sequence[str]) -> Scores:
        """The same parties, rounds, work and draws, without federation."""
        from .analysis.scores import evaluate_parties

        baseline = self.__dict__.get("_twin")
        local = local_baseline(self.plan_.algorithm, self.history_)
        if (
            baseline is None or baseline.state.round > self.state.round
        ):  # a run that was loaded may be younger than its twin
            settings = {name: getattr(self, name) for name in ("loss", "metric", "seed", "engine", "memory_budget")}
            baseline = self._twin = Federation(self.model, self.data, local, solver=self.plan_.solver, **settings)
            baseline.population = self.population  # not made anew: they are read once, and whoever made them may draw
        baseline.plan_ = replace(baseline.plan_, algorithm=local)  # of more rounds than when it was made
        baseline.fit(self.state.round - baseline.state.round, progress=False)
        return evaluate_parties(baseline.plan_, baseline.engine_, baseline.state, names=names)

    def table(self) -> Table:
        """Each party: its own model, the centre, what it reaches alone with the same work, and its majority class.

        The first call trains every party alone for as many rounds, which takes about as long as the run did.
        """
        from .analysis import coverage
        from .analysis.scores import party_table

        scores = self.scores()
        rounds = coverage(self).rounds
        return party_table(
            self.population, scores, self._local_baseline(scores.names), rounds=rounds, notes=self.findings()
        )

    @property
    def models_(self) -> Mapping[str, nn.Module]:
        """Party name -> its personal module, made when it is asked for."""
        from .analysis.scores import PersonalModels

        return PersonalModels(self.plan_, self.engine_, lambda: self.state)

    @property
    def global_model_(self) -> nn.Module:
        """The common module."""
        return self.plan_.net.module_from_row(self.state.global_model)

    def execution_modes(self) -> dict[str, str]:
        """The ways to compute the parties' local work, the best first, and why each is not taken ("" if it can be)."""
        return possible_execution_modes(self.plan_)

    def hash(self) -> str:
        """A digest of the centre and of every party's model and memory."""
        return checkpoint.run_digest(self.state, self.engine_.party_states)

    def save(self, folder: str | Path) -> Path:
        """Write the run as it stands into a folder, whole or not at all."""
        return checkpoint.save(
            Path(folder), self.plan_, self.state, self.engine_.party_states, self.history_, self.rejections_
        )

    def load(self, folder: str | Path) -> Federation:
        """Go on from a folder that a federation of the same model, algorithm, solver and seed saved."""
        loaded = checkpoint.load(Path(folder), self.plan_, self.engine_.party_states)
        self.state, self.history_, self.rejections_ = loaded
        self.__dict__.pop("_scored", None)
        return self


def with_participation(algorithm: Algorithm, participation: Participation | int | None) -> Algorithm:
    """The algorithm with who takes part as the user says; a number is so many a round, drawn anew each time."""
    if not isinstance(algorithm, Algorithm):
        raise SettingError(
            f"Give an algorithm, such as algorithms.FedAvg() with its parentheses. Got {algorithm!r:.80}."
        )
    if participation is None:
        return algorithm
    if isinstance(participation, int) and not isinstance(participation, bool):
        return replace(algorithm, participation=Sample(participation))
    if isinstance(participation, type) or not callable(participation):
        raise SettingError(
            "'participation' must be a number of parties a round, or a record such as algorithms.Sample(10). "
            f"Got {participation!r:.80}."
        )
    return replace(algorithm, participation=participation)
