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
from .algorithms.fedavg import alone
from .core.algorithm import Algorithm, Attend, Loss
from .core.interfaces import Engine, Solver
from .core.messages import ASKED
from .core.metrics import Metric, metric_for
from .core.progress import bar
from .engines import InProcess
from .errors import DescantError, DescantWarning, SettingError, StateError
from .parties import People
from .rounds import checkpoint
from .rounds.loop import Round, State, begin, possible_ways, run
from .rounds.plan import Data, Model, Plan, parties_of
from .storage import DEFAULT_BUDGET
from .training import Sgd

if TYPE_CHECKING:
    from .analysis import Finding
    from .analysis.scores import Scores
    from .reporting.table import Table
    from .storage.vault.coreset_rows import Agreed
    from .storage.vault.vault_location import VaultAt

MakeEngine: TypeAlias = Callable[[Plan], Engine]


@dataclass(frozen=True)
class ScoredRound:
    """A round, and its scores when they are asked for: only while the run stands at it."""

    round: Round
    _measure: Callable[[int], Scores]

    @property
    def index(self) -> int:
        return self.round.index

    @cached_property
    def scores(self) -> Scores:
        """Every party's own test set with its own model, the centre and the majority class."""
        return self._measure(self.round.index)


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
        model: Model,
        people: Data,
        algorithm: Algorithm,
        *,
        solver: Solver | None = None,
        lr: float | None = None,
        steps: int | None = None,
        batch: int | None = None,
        loss: Loss = functional.cross_entropy,
        metric: Metric | Callable[[Tensor, Tensor], Tensor] | None = None,
        attend: Attend | int | None = None,
        seed: int = 0,
        engine: MakeEngine = InProcess,
        budget: int = DEFAULT_BUDGET,
        vault: VaultAt | None = None,
        agreed: Agreed | None = None,
        deadline: float = 600.0,
    ) -> None:
        self.model = model
        self.data = people
        self.algorithm = algorithm
        self.solver = solver
        shorthand: dict[str, Any] = {"lr": lr, "steps": steps, "batch": batch}
        self.shorthand = {name: value for name, value in shorthand.items() if value is not None}
        self.loss = loss
        self.metric = metric
        self.attend = attend
        self.seed = seed
        self.engine = engine
        self.budget = budget  # bytes of party state in memory, for models and for memories each; the rest is on disk
        self.vault, self.agreed = vault, agreed  # where coresets are kept, and how many rows a party lets go: see Plan
        self.deadline = deadline  # seconds that a party has for a task
        self.history_, self.refusals_ = checkpoint.history_of(), checkpoint.refusals_of()

    def __repr__(self) -> str:
        at = self._state.round if "_state" in self.__dict__ else 0
        name = getattr(self.algorithm, "name", self.algorithm)
        return f"<Federation of {len(self.people)} parties by {name}, after {at} rounds>"

    @cached_property
    def people(self) -> People:
        """The parties."""
        return parties_of(self.data)

    @cached_property
    def plan_(self) -> Plan:
        """All that is decided of it before the first round: net, parties, method, solver; made when it is asked for."""
        if self.solver is not None and self.shorthand:
            raise SettingError(f"Give a solver, or {', '.join(self.shorthand)} as shorthand for Sgd, not both.")
        given: object = self.solver
        if isinstance(given, str | type) or not callable(self.engine):
            told = f"solver={self.solver!r:.60}, engine={self.engine!r:.60}"
            raise SettingError(f"Give a solver such as Sgd(lr=0.1), and an engine such as InProcess. Got {told}.")
        for name, number in (("seed", self.seed), ("budget", self.budget)):
            if not isinstance(number, int | np.integer) or isinstance(number, bool):
                raise SettingError(f"The {name!r} of Federation must be a whole number. Got {number!r:.60}.")
        first, solver = self.people[self.people.names[0]], self.solver or Sgd(**self.shorthand)
        plan = Plan.made(
            self.model,
            self.people,
            attending(self.algorithm, self.attend),
            int(self.seed),
            solver=solver,
            loss=self.loss,
            metric=metric_for(self.metric or solver.metric, self.loss, first),
            budget=self.budget,
            vault=self.vault,
            agreed=self.agreed,
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
            self._state = begin(self.plan_)
        return self._state

    @state.setter
    def state(self, state: State) -> None:
        self._state = state

    def rounds(self, n: int, judge: Collection[int] | None = None) -> Iterator[ScoredRound]:
        """The next n rounds, one at a time; `break` stops, and calling it again goes on.

        In the rounds with the numbers ``judge`` (the last of the n, if none are given) the parties judge their own
        local work: the scores then have "before" and "after" of those who took part. It changes nothing else.
        """
        if not isinstance(n, int) or isinstance(n, bool) or n < 0:
            raise SettingError(f"The number of rounds must be a whole number >= 0. Got {n!r}.")
        judged = {self.state.round + n} if judge is None else set(judge)
        for round in self._whole(run(self.plan_, self.engine_, self.state, n, judged)):
            if round.index != self.state.round + 1:
                raise DescantError(
                    f"Another loop has taken this federation to round {self.state.round}: start a new one."
                )
            self.state = round.state
            self._warn(round)
            self.refusals_.extend(round.refusals)
            self.history_.append(round.numbers())
            yield ScoredRound(round, self._measure)

    def _whole(self, rounds: Iterator[Round]) -> Iterator[Round]:
        """The same rounds; one that breaks off is undone at once, so that hash, save and scores see none of it."""
        try:
            yield from rounds
        except BaseException:
            with suppress(StateError):
                self.engine_.memory.rollback(self.state.round)
                self.state.own.rollback(self.state.round)
            raise

    def _warn(self, round: Round) -> None:
        for note in filter(None, (round.tuned, round.note)):
            warnings.warn(f"Round {round.index}: {note}.", DescantWarning, stacklevel=4)
        if not round.note and round.refusals and not self.refusals_:  # the first time; the rest are in refusals_
            asked = {*round.present, *round.stood_in, *(r.party for r in round.refusals if r.party in self.people)}
            refused = [refusal for refusal in round.refusals if refusal.tensor != ASKED]
            what = f"{len(refused)} of {len(asked)} reports were" if refused else "What a party left was"
            told = f"{what} refused, the first: {round.refusals[0]}. All are in refusals_."
            warnings.warn(told, DescantWarning, stacklevel=4)

    def fit(self, rounds: int, progress: bool = True) -> Federation:
        """Run some more rounds, with a progress bar."""
        self.state  # noqa: B018  errors come before the bar
        with bar(disable=not progress) as shown:
            line = shown.add_task(self.algorithm.name, total=rounds, told="–")
            for round in self.rounds(rounds):
                shown.update(line, advance=1, told=round.round.told)
        return self

    def _measure(self, index: int) -> Scores:
        if index != self.state.round:
            raise DescantError(
                f"The scores of round {index} must be read while the run stands there; it is at {self.state.round}."
            )
        scores = self.scores()
        if self.history_ and self.history_[-1]["round"] == index:
            from .analysis import coverage

            trained = np.array(list(map(coverage(self).rounds.get, scores.names))) > 0
            means = {"own": scores.own, "learned": scores.own.only(trained), "center": scores.center}
            self.history_[-1].update({name: column.mean for name, column in means.items()})
            if "presence" in self.history_[-1]:
                self.history_[-1]["centers"] = scores.center.values.tolist()
        return scores

    def scores(self) -> Scores:
        """Every party's own test set, judged now."""
        from .analysis.scores import score

        scores = score(self.plan_, self.engine_, self.state)
        self._scored = (self.state.round, scores)
        return scores

    @property
    def scores_now(self) -> Scores | None:
        """What scores() has found, if it was asked for since the last round."""
        at, scores = self.__dict__.get("_scored", (None, None))
        return scores if at == self.state.round else None

    def findings(self) -> tuple[str, ...]:
        """What is wrong, in sentences, from numbers that are known: ask for scores() first to hear about them, too."""
        return tuple(finding.text for finding in self._findings())

    def _findings(self) -> tuple[Finding, ...]:
        from .analysis import Finding, findings_of, of_the_data

        said = (Finding("data", note),) if (note := of_the_data(self.people.note)) else ()
        return said + findings_of(self, self.scores_now)

    def plot(self, kind: str, file: str | Path) -> Path:
        """Draw "spikes" (at aggregation), "collapse", "walk" (own to centre), "hyper" (as tuned), "presence" (who was
        there, who was stood in for), "rewards" (of agents), "portfolio", "weights" or "universes" (of desks)."""
        from .analysis import draw

        return draw(self, kind, file)

    def _alone(self, names: Sequence[str]) -> Scores:
        """The same parties, rounds, work and draws, without federation."""
        from .analysis.scores import score

        twin, local = self.__dict__.get("_twin"), alone(self.plan_.algorithm, self.history_)
        if twin is None or twin.state.round > self.state.round:  # a run that was loaded may be younger than its twin
            settings = {name: getattr(self, name) for name in ("loss", "metric", "seed", "engine", "budget")}
            twin = self._twin = Federation(self.model, self.data, local, solver=self.plan_.solver, **settings)
            twin.people = self.people  # not made anew: they are read once, and whoever made them may draw
        twin.plan_ = replace(twin.plan_, algorithm=local)  # of more rounds than when it was made
        twin.fit(self.state.round - twin.state.round, progress=False)
        return score(twin.plan_, twin.engine_, twin.state, names)

    def table(self) -> Table:
        """Each party: its own model, the centre, what it reaches alone with the same work, and its majority class.

        The first call trains every party alone for as many rounds, which takes about as long as the run did.
        """
        from .analysis import coverage
        from .analysis.scores import party_table

        scores = self.scores()
        rounds = coverage(self).rounds
        return party_table(self.people, scores, self._alone(scores.names), rounds, self.findings())

    @property
    def models_(self) -> Mapping[str, nn.Module]:
        """Party name -> its personal module, made when it is asked for."""
        from .analysis.scores import Models

        return Models(self.plan_, self.engine_, lambda: self.state)

    @property
    def center_(self) -> nn.Module:
        """The common module."""
        return self.plan_.net.module_of(self.state.center)

    def ways(self) -> dict[str, str]:
        """The ways to compute the parties' local work, the best first, and why each is not taken ("" if it can be)."""
        return possible_ways(self.plan_)

    def hash(self) -> str:
        """A digest of the centre and of every party's model and memory."""
        return checkpoint.digest(self.state, self.engine_.memory)

    def save(self, folder: str | Path) -> Path:
        """Write the run as it stands into a folder, whole or not at all."""
        return checkpoint.save(Path(folder), self.plan_, self.state, self.engine_.memory, self.history_, self.refusals_)

    def load(self, folder: str | Path) -> Federation:
        """Go on from a folder that a federation of the same model, algorithm, solver and seed saved."""
        loaded = checkpoint.load(Path(folder), self.plan_, self.engine_.memory)
        self.state, self.history_, self.refusals_ = loaded
        self.__dict__.pop("_scored", None)
        return self


def attending(algorithm: Algorithm, attend: Attend | int | None) -> Algorithm:
    """The algorithm with who takes part as the user says; a number is so many a round, drawn anew each time."""
    if not isinstance(algorithm, Algorithm):
        raise SettingError(
            f"Give an algorithm, such as algorithms.FedAvg() with its parentheses. Got {algorithm!r:.80}."
        )
    if attend is None:
        return algorithm
    if isinstance(attend, int) and not isinstance(attend, bool):
        return replace(algorithm, attend=Sample(attend))
    if isinstance(attend, type) or not callable(attend):
        raise SettingError(
            f"'attend' must be a number of parties a round, or such as algorithms.Sample(10). Got {attend!r:.80}."
        )
    return replace(algorithm, attend=attend)
