"""The federation object: fit it, read each party's model, and see whether joining helped."""

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
from .algorithms.fedavg_and_baselines import local_baseline
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
    """A round, and its scores, which must be read before the next round."""

    round: Round
    _compute_scores: Callable[[int], Scores]

    @property
    def index(self) -> int:
        return self.round.index

    @cached_property
    def scores(self) -> Scores:
        """Return the scores of personal model, global model and majority class on every party's test set."""
        return self._compute_scores(self.round.index)


class Federation:
    """Parties that learn together by an algorithm, each with a personal model.

    >>> from descant import algorithms, parties
    >>> population = parties.digits(count=4, seed=0)
    >>> fed = Federation(lambda: nn.Linear(64, 10), population, algorithms.FedAvgPlus(), lr=0.1, steps=5, batch=10)
    >>> fed.fit(2, progress=False).history_[-1]["round"]
    2

    Parameters
    ----------
    model:
        A module, a function that builds one, or its address "package.module:name".
    population:
        The parties: a `Population`, a function that builds one, or its address.
    algorithm:
        The federated method, such as ``algorithms.FedAvgPlus()``.
    solver:
        The local training of a party, such as ``Sgd(lr=0.1)``; by default `Sgd` with ``lr``, ``steps`` and ``batch``.
    lr:
        The learning rate, as shorthand for ``solver=Sgd(lr=...)``.
    steps:
        Local steps per round, as shorthand for ``solver=Sgd(steps=...)``.
    batch:
        Samples per step, as shorthand for ``solver=Sgd(batch=...)``.
    loss:
        The training loss of (output, target); by default the cross entropy.
    metric:
        The score of (output, target); by default accuracy for classes, else the loss.
    participation:
        The participants of a round: a number of parties drawn each round, or a record such as
        ``algorithms.Sample(10)``; by default what the algorithm says.
    seed:
        The seed of every random draw of the run.
    engine:
        Where tasks run: `InProcess`, or ``Processes(...)``, ``Ray(...)``; results do not depend on it.
    memory_budget:
        Bytes of memory for models and for party states, each; the rest is kept on disk.
    vault:
        The location of the encrypted coresets of `CoresetProxies`; by default coresets stay with the parties.
    coreset_limit:
        The largest number or share of rows that leaves a party in a coreset; by default there is no limit.
    deadline:
        Seconds that a party has for a task.
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
        self.memory_budget = memory_budget
        self.vault = vault
        self.coreset_limit = coreset_limit
        self.deadline = deadline
        self.history_ = checkpoint.make_history()
        self.rejections_ = checkpoint.make_rejections()

    def __repr__(self) -> str:
        at = self._state.round if "_state" in self.__dict__ else 0
        name = getattr(self.algorithm, "name", self.algorithm)
        return f"<Federation of {len(self.population)} parties by {name}, after {at} rounds>"

    @cached_property
    def population(self) -> Population:
        """Return the parties."""
        return make_population(self.data)

    @cached_property
    def plan_(self) -> Plan:
        """Return the plan of the run (net, parties, algorithm, solver), built on first use."""
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
        """Return the engine, built on first use."""
        return self.engine(self.plan_)

    @property
    def state(self) -> State:
        """Return the state of the run."""
        if "_state" not in self.__dict__:
            self._state = initial_state(self.plan_)
        return self._state

    @state.setter
    def state(self, state: State) -> None:
        self._state = state

    def rounds(self, n: int, evaluate_local_in: Collection[int] | None = None) -> Iterator[ScoredRound]:
        """Run the next n rounds, one at a time; `break` stops, and another call continues.

        In the rounds of ``evaluate_local_in`` (by default the last of the n) parties score their local training: the
        scores then have "before" and "after" for the participants. The results do not change.
        """
        if not isinstance(n, int) or isinstance(n, bool) or n < 0:
            raise SettingError(f"The number of rounds must be a whole number >= 0. Got {n!r}.")
        scored_rounds = {self.state.round + n} if evaluate_local_in is None else set(evaluate_local_in)
        for round in self._undo_on_error(run(self.plan_, self.engine_, self.state, n, scored_rounds)):
            if round.index != self.state.round + 1:
                raise DescantError(
                    f"Another loop has moved this federation to round {self.state.round}: start a new loop."
                )
            self.state = round.state
            self._warn(round)
            self.rejections_.extend(round.rejections)
            self.history_.append(round.to_record())
            yield ScoredRound(round, self._compute_scores)

    def _undo_on_error(self, rounds: Iterator[Round]) -> Iterator[Round]:
        """Yield the rounds and undo an interrupted one at once, so that hash, save and scores do not see it."""
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
        if not round.note and round.rejections and not self.rejections_:  # only the first time: all are in rejections_
            asked_parties = {
                *round.participants,
                *round.proxied,
                *(r.party for r in round.rejections if r.party in self.population),
            }
            rejected = [rejection for rejection in round.rejections if rejection.tensor != CORESET_KEY]
            subject = f"{len(rejected)} of {len(asked_parties)} replies were" if rejected else "A coreset was"
            text = f"{subject} rejected, the first: {round.rejections[0]}. All are in rejections_."
            warnings.warn(text, DescantWarning, stacklevel=4)

    def fit(self, rounds: int, progress: bool = True) -> Federation:
        """Run more rounds, with a progress bar."""
        self.state  # noqa: B018  raise errors before the progress bar
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
        """Evaluate every party on its own test set."""
        from .analysis.scores import evaluate_parties

        scores = evaluate_parties(self.plan_, self.engine_, self.state)
        self._scored = (self.state.round, scores)
        return scores

    @property
    def cached_scores(self) -> Scores | None:
        """Return the last result of scores() if no round has run since, else None."""
        at, scores = self.__dict__.get("_scored", (None, None))
        return scores if at == self.state.round else None

    def findings(self) -> tuple[str, ...]:
        """Return findings as sentences, from known numbers; call scores() first to include them."""
        return tuple(finding.text for finding in self._findings())

    def _findings(self) -> tuple[Finding, ...]:
        from .analysis import Finding, data_note_sentence, federation_findings

        data_findings = (Finding("data", note),) if (note := data_note_sentence(self.population.note)) else ()
        return data_findings + federation_findings(self, self.cached_scores)

    def plot(self, kind: str, file: str | Path) -> Path:
        """Draw a plot of the run into a file.

        Kinds: "spikes" (at aggregation), "collapse", "walk" (from personal to global model), "hyper" (as tuned),
        "presence" (of parties and proxies), "rewards" (of agents), "portfolio", "weights" and "universes" (of desks).
        """
        from .analysis import draw_federation_plot

        return draw_federation_plot(self, kind, file)

    def _local_baseline(self, names: Sequence[str]) -> Scores:
        """Evaluate local training of the same parties with the same rounds, work and draws."""
        from .analysis.scores import evaluate_parties

        baseline = self.__dict__.get("_twin")
        local = local_baseline(self.plan_.algorithm, self.history_)
        if baseline is None or baseline.state.round > self.state.round:  # load() may go back to an earlier round
            settings = {name: getattr(self, name) for name in ("loss", "metric", "seed", "engine", "memory_budget")}
            baseline = self._twin = Federation(self.model, self.data, local, solver=self.plan_.solver, **settings)
            baseline.population = self.population  # the same object: building it again may draw other parties
        baseline.plan_ = replace(baseline.plan_, algorithm=local)  # the history has grown since
        baseline.fit(self.state.round - baseline.state.round, progress=False)
        return evaluate_parties(baseline.plan_, baseline.engine_, baseline.state, names=names)

    def table(self) -> Table:
        """Return a table of each party: personal model, global model, local training, majority class.

        The first call trains the local baseline for the same rounds, which takes about as long as the run.
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
        """Return the personal modules by party name, built on access."""
        from .analysis.scores import PersonalModels

        return PersonalModels(self.plan_, self.engine_, lambda: self.state)

    @property
    def global_model_(self) -> nn.Module:
        """Return the global module."""
        return self.plan_.net.module_from_row(self.state.global_model)

    def execution_modes(self) -> dict[str, str]:
        """Return the execution modes of local training, best first, with the reason against each."""
        return possible_execution_modes(self.plan_)

    def hash(self) -> str:
        """Return a digest of the global model and of every party's model and state."""
        return checkpoint.run_digest(self.state, self.engine_.party_states)

    def save(self, folder: str | Path) -> Path:
        """Write the state of the run to a folder, atomically."""
        return checkpoint.save(
            Path(folder), self.plan_, self.state, self.engine_.party_states, self.history_, self.rejections_
        )

    def load(self, folder: str | Path) -> Federation:
        """Continue from a folder saved by a federation with the same model, algorithm, solver and seed."""
        loaded = checkpoint.load(Path(folder), self.plan_, self.engine_.party_states)
        self.state, self.history_, self.rejections_ = loaded
        self.__dict__.pop("_scored", None)
        return self


def with_participation(algorithm: Algorithm, participation: Participation | int | None) -> Algorithm:
    """Return the algorithm with the user's participation; a number means that many parties drawn each round."""
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
