"""The party's side of the boundary: what a stack of parties does with its tasks.

A piece is a pure function of tasks and memories. Engines differ only in how they cut the tasks of a round into pieces
and where they run them; a piece that was lost can be run again and gives the same answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from . import core, disguise, masking, seeds, standing
from .address import find
from .core import Algorithm, Hyper, Job, Loss, Memory, Report, Solver, Task, Term
from .errors import DescantError, ModelError, PartyError, SettingError
from .examined import completed, evaluated, owned, personal, received_loss, scored
from .flat import ONE_AT_A_TIME, Net, Unbound, bind
from .gate import finite
from .metrics import Metric, is_cross_entropy
from .parties.people import Party, People
from .parties.spaces import is_labels
from .store import DEFAULT_BUDGET
from .store.room import room
from .store.rows import Agreed
from .store.vault_at import VaultAt

RECEIVED = "received_loss"  # the metric that an algorithm's `measure` asks for
VALIDATION = "validation"  # the loss of the centre on the server's own set, where there is one
ANEW = "anew"  # the setting by which a task tells a party to forget what it keeps for itself


Model: TypeAlias = nn.Module | Callable[[], nn.Module] | str
"""A module, a class or a function that makes one, or the address of such a thing: "package.module:name"."""

Data: TypeAlias = People | Callable[[], People] | str
"""Parties, a function that makes them, or its address."""


@dataclass(frozen=True)
class Plan:
    """What a federation is made of; it does not change while it runs. The algorithm's patterns are bound to columns."""

    net: Net
    people: People
    algorithm: Algorithm
    solver: Solver
    loss: Loss
    metric: Metric
    seed: int
    budget: int = DEFAULT_BUDGET  # bytes of party state in memory; the rest is on disk
    origin: tuple[Model, Data] | None = None  # what net and people were made of, for engines that make them elsewhere
    vault: VaultAt | None = None  # where parties' coresets are kept, sealed; None: they stay with the parties
    agreed: Agreed | None = None  # how many of its rows a party lets go, at most; None: as many as it is asked for
    deadline: float = 600.0  # seconds that a party has for a task
    pinned: str = ""  # the fingerprint of the only vault that a party on a machine of its own seals for; "": any
    secret: bytes = field(default=b"", repr=False)  # of a party on a machine of its own: what its keys are made of

    @classmethod
    def made(cls, model: Model, data: Data, algorithm: Algorithm, seed: int, **rest: Any) -> Plan:
        """A plan whose net and parties are made here, of what may be an address; the same on every machine."""
        make = find(model) if isinstance(model, str) else model
        beyond = partial(room, budget=rest.get("budget", DEFAULT_BUDGET))
        net = Net.made(make, seeds.torch_seed(seed, 0, seeds.EVERYBODY, "model"), beyond)
        people = parties_of(data)
        return cls(net, people, bind(algorithm, net), seed=seed, origin=(model, data), **rest)

    @cached_property
    def samples(self) -> int:
        """How many samples all parties train on."""
        return sum(self.people.samples.values())

    @cached_property
    def places(self) -> dict[str, int]:
        """Where each party stands among all of them."""
        return {name: place for place, name in enumerate(self.people)}

    @cached_property
    def classes(self) -> int | None:
        """How many labels the model knows; None where targets are no labels."""
        party, row, size = self.people[self.people.names[0]], self.net.row(), self.net.layout.size
        if not is_labels(party.y):
            return None
        with ONE_AT_A_TIME, torch.inference_mode(False), torch.no_grad():
            self.net.module.eval()
            output, _ = self.net.apply(row[:size], row[size:], party.x[:2].clone())
        return output.shape[1] if output.dim() == 2 and output.shape[1] > 1 else None

    @cached_property
    def terms(self) -> tuple[Term, ...]:
        """What a party adds to its loss. A term times 0 is none: the rest is then what it is without, bit for bit."""
        return tuple(term for term in self.algorithm.terms if isinstance(term, Term) and term.strength != 0)

    @cached_property
    def private(self) -> tuple[str, ...]:
        """The tensors that never leave their party."""
        patterns = self.algorithm.private
        if not isinstance(patterns, tuple) or not all(isinstance(pattern, str) for pattern in patterns):
            raise SettingError(
                f"The 'private' of {self.algorithm.name} must be a tuple of name patterns. Got {patterns!r}."
            )
        return self.net.layout.matching(patterns)


def check_labels(plan: Plan) -> None:
    """Raise if a party has a label for which the model has no output, where the loss tells that targets are classes."""
    if not plan.samples or not is_cross_entropy(plan.loss) or getattr(plan.loss, "ignore_index", -1) >= 0:
        return
    classes = plan.classes
    found = "" if classes is None else plan.people.label_beyond(classes)
    if classes and found:
        known = f"the model has {classes} outputs: labels go from 0 to {classes - 1}"
        raise PartyError(f"{found}, and {known}. Mend the labels, or give the model more outputs.")


def parties_of(data: Data) -> People:
    """The parties, made if need be."""
    found = find(data) if isinstance(data, str) else data
    people = found() if callable(found) else found
    if not isinstance(people, People):
        raise PartyError(
            f"Give parties (or their maker) made by descant.parties, such as from_arrays(...). Got {type(people)}."
        )
    return people


Answer = tuple[Report, Memory | None]  # the memory is None where it does not change


def work(plan: Plan, tasks: Sequence[Task], memories: Sequence[Memory]) -> list[Answer]:
    """Answer every task; a party that fails is reported as such, and the others are not harmed.

    A "personal" task shows a party's whole model, private layers included: it is for those who simulate their parties.
    """
    try:
        with ONE_AT_A_TIME, torch.inference_mode(False), torch.enable_grad():
            return _by_kind(plan, tasks, memories)
    except Exception as error:
        if len(tasks) == 1:
            task, reason = tasks[0], f"{type(error).__name__}: {error}"  # a silo sends what is before the colon
            return [(Report(task.party, task.round, task.kind, "error", reason=reason), None)]
        alone = (work(plan, [task], [memory]) for task, memory in zip(tasks, memories, strict=True))
        return [answer for answers in alone for answer in answers]


def _by_kind(plan: Plan, tasks: Sequence[Task], memories: Sequence[Memory]) -> list[Answer]:
    for task in tasks:
        if task.settings["layout"] != plan.net.layout.digest:
            raise ModelError(f"Party {task.party!r} has another model than the federation: {plan.net.layout.names}.")
    memories = [standing.left(m) if t.settings.get(ANEW) else m for t, m in zip(tasks, memories, strict=True)]
    learning, answers = _learning(plan, tasks, memories)
    for round in {tasks[i].round for i in learning}:  # draws and schedules go by the round: a stack has only one
        some = [i for i in learning if tasks[i].round == round]
        trained = _train(plan, [tasks[i] for i in some], [memories[i] for i in some], [learning[i] for i in some])
        answers.update(zip(some, trained, strict=True))
    judging = [i for i, task in enumerate(tasks) if task.kind == "evaluate"]
    judged = evaluated(plan, [tasks[i] for i in judging], [memories[i] for i in judging])
    answers.update(zip(judging, judged, strict=True))
    for i, task in enumerate(tasks):
        if task.kind == "keys":
            answers[i] = masking.keyed(plan, task)
        if task.kind == "personal":
            row = personal(plan, task, memories[i])
            answers[i] = (Report(task.party, task.round, task.kind, arrays=plan.net.layout.split(row)), None)
    return [answers[i] for i in range(len(tasks))]


def _learning(
    plan: Plan, tasks: Sequence[Task], memories: Sequence[Memory]
) -> tuple[dict[int, Party], dict[int, Answer]]:
    """Who learns by which task, and why nobody can stand in for some."""
    learning: dict[int, Party] = {}
    failed: dict[int, Answer] = {}
    for i, task in enumerate(tasks):
        if task.kind == "train":
            learning[i] = plan.people[task.party]
        elif task.kind == "stand_in":
            try:
                learning[i] = standing.stand_in(plan, task, memories[i])
            except DescantError as error:
                failed[i] = (Report(task.party, task.round, task.kind, "error", reason=str(error)), None)
    return learning, failed


def _stacked(rows: Sequence[Tensor]) -> Tensor:
    """``[K, width]``; one row that all parties share is not copied."""
    shared = all(row is rows[0] for row in rows)
    return rows[0].expand(len(rows), -1) if shared else torch.stack(list(rows))


def _train(plan: Plan, tasks: Sequence[Task], memories: Sequence[Memory], parties: Sequence[Party]) -> list[Answer]:
    before = memories  # a stand-in has none, and what a party has left is no business of its solver
    memories = [{} if t.kind == "stand_in" else standing.without(m) for t, m in zip(tasks, before, strict=True)]
    center = _stacked([completed(plan, t.arrays["center"], m) for t, m in zip(tasks, memories, strict=True)])
    own = _stacked(
        [completed(plan, t.arrays.get("own", t.arrays["center"]), m) for t, m in zip(tasks, memories, strict=True)]
    )
    algorithm, size, names = plan.algorithm, plan.net.layout.size, [task.party for task in tasks]
    anchor = alphas = None
    if algorithm.pull is not None:
        alphas = algorithm.pull.alphas(tasks[0].round, names, center)
        anchor = algorithm.pull.anchor(own[:, :size], center[:, :size], tasks[0].round, names) if alphas.any() else None
    job = Job(
        net=plan.net,
        loss=plan.loss,
        parties=parties,
        hypers=[Hyper(task.settings["lr"], task.settings["work"]) for task in tasks],
        memories=memories,
        seed=tasks[0].settings["seed"],
        round=tasks[0].round,
        way=tasks[0].settings["way"],
        start=algorithm.start(own, center),
        received=center,
        anchor=anchor,
        alphas=alphas,
        terms=plan.terms,
        hold=None if isinstance(algorithm.hold, Unbound) else algorithm.hold,  # a plan's algorithm is bound
    )
    answers = _answers(plan, tasks, job, plan.solver.train(job))
    answers = (disguise.disguised(plan, *one) for one in zip(tasks, before, center, answers, strict=True))
    answers = (masking.masked(plan, *one) for one in zip(tasks, answers, strict=True))
    return [standing.answered(plan, *one) for one in zip(tasks, before, center, answers, strict=True)]


def _answers(plan: Plan, tasks: Sequence[Task], job: Job, trained: core.Trained) -> Iterator[Answer]:
    layout, rows = plan.net.layout, trained.rows
    sent = layout.split(rows if plan.algorithm.report == "model" else rows - job.received)  # [K, ...] each
    memories = [_kept(plan, rows[k], trained.memories[k]) for k in range(len(tasks))]
    asked = [k for k, task in enumerate(tasks) if task.settings.get("judge")]
    states = [(owned(plan, job.start[k], job.memories[k]), owned(plan, rows[k], memories[k])) for k in asked]
    judged = scored(plan, [tasks[k].party for k in asked], states) if asked else {}
    for k, (task, memory) in enumerate(zip(tasks, memories, strict=True)):
        arrays = {name: tensor[k] for name, tensor in sent.items() if name not in plan.private}
        metrics = {**trained.metrics[k], **judged.get(task.party, {})}
        if plan.algorithm.measure:
            metrics[RECEIVED] = received_loss(plan, job.received[k], job.parties[k])
        report = Report(task.party, task.round, task.kind, arrays=arrays, metrics=metrics)
        numbers = [tensor for name, tensor in memory.items() if not name.startswith(core.LOG)]
        healthy = not memory or all(map(finite, (rows[k], *numbers)))
        forgotten: Memory | None = {} if task.settings.get(ANEW) else None
        yield report, memory if healthy else forgotten  # a party that diverged forgets it, so that it can come back


def _kept(plan: Plan, row: Tensor, memory: Memory) -> dict[str, Tensor]:
    """What a party keeps: what its solver remembers, and of its model what nobody else sees."""
    ranges = {name: plan.net.layout.range_of(name) for name in plan.private}
    kept = {**memory, **{f"layer.{name}": row[begin:end] for name, (begin, end) in ranges.items()}}
    if plan.algorithm.personal is not None:
        kept["statistics"] = row[plan.net.layout.size :]
    return kept
