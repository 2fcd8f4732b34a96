"""The party's side of the boundary: what a stack of parties does with its tasks.

A piece is a pure function of tasks and memories. Engines differ only in how they cut the tasks of a round into pieces
and where they run them; a piece that was lost can be run again and gives the same answers.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from . import seeds
from .address import find
from .core import Algorithm, Hyper, Job, Loss, Memory, Report, Solver, Task, Term, Trained
from .errors import ModelError, PartyError, SettingError
from .flat import ONE_AT_A_TIME, Net, Unbound, bind
from .gate import finite
from .metrics import Metric, accuracy, is_cross_entropy
from .parties.people import Party, People
from .store import DEFAULT_BUDGET

_AT_ONCE = 4096  # test samples a forward pass
JUDGED = ("before", "after")  # a party's test score before and after its local work, where a task asks to judge it
RECEIVED = "received_loss"  # the metric that an algorithm's `measure` asks for
VALIDATION = "validation"  # the loss of the centre on the server's own set, where there is one


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

    @classmethod
    def made(cls, model: Model, data: Data, algorithm: Algorithm, seed: int, **rest: Any) -> Plan:
        """A plan whose net and parties are made here, of what may be an address; the same on every machine."""
        make = find(model) if isinstance(model, str) else model
        net = Net.made(make, seeds.torch_seed(seed, 0, seeds.EVERYBODY, "model"))
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


def parties_of(data: Data) -> People:
    """The parties, made if need be."""
    found = find(data) if isinstance(data, str) else data
    people = found() if callable(found) else found
    if not isinstance(people, People):
        raise PartyError(
            f"Give parties (or their maker) made by descant.parties, such as from_arrays(...). Got {type(people)}."
        )
    return people


def check_labels(plan: Plan) -> None:
    """Raise if a party has a label for which the model has no output, where the loss tells that targets are classes."""
    party = plan.people[plan.people.names[0]]
    if not is_cross_entropy(plan.loss) or party.y.ndim != 1 or getattr(plan.loss, "ignore_index", -1) >= 0:
        return
    row, size = plan.net.row(), plan.net.layout.size
    with ONE_AT_A_TIME, torch.no_grad(), torch.random.fork_rng(devices=[]):
        plan.net.module.eval()
        output, _ = plan.net.apply(row[:size], row[size:], party.x[:1].clone())
    found = plan.people.label_beyond(output.shape[1]) if output.ndim == 2 else ""
    if found:
        known = f"the model has {output.shape[1]} outputs: labels go from 0 to {output.shape[1] - 1}"
        raise PartyError(f"{found}, and {known}. Mend the labels, or give the model more outputs.")


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
            task, reason = tasks[0], "".join(traceback.format_exception_only(error)).strip()
            return [(Report(task.party, task.round, task.kind, "error", reason=reason), None)]
        alone = (work(plan, [task], [memory]) for task, memory in zip(tasks, memories, strict=True))
        return [answer for answers in alone for answer in answers]


def _by_kind(plan: Plan, tasks: Sequence[Task], memories: Sequence[Memory]) -> list[Answer]:
    for task in tasks:
        if task.settings["layout"] != plan.net.layout.digest:
            raise ModelError(f"Party {task.party!r} has another model than the federation: {plan.net.layout.names}.")
    training = [i for i, task in enumerate(tasks) if task.kind == "train"]
    answers: dict[int, Answer] = {}
    if training:
        trained = _train(plan, [tasks[i] for i in training], [memories[i] for i in training])
        answers.update(zip(training, trained, strict=True))
    for i, task in enumerate(tasks):
        if task.kind == "evaluate":
            answers[i] = (_evaluate(plan, task, memories[i]), None)
        elif task.kind == "personal":
            row = _personal(plan, task, memories[i])
            answers[i] = (Report(task.party, task.round, task.kind, arrays=plan.net.layout.split(row)), None)
    return [answers[i] for i in range(len(tasks))]


def _completed(plan: Plan, row: Tensor, memory: Memory) -> Tensor:
    """A row that came from outside, with the party's private layers put in."""
    held = [name for name in plan.private if f"layer.{name}" in memory]
    if not held:
        return row
    row = row.clone()
    for name in held:
        begin, end = plan.net.layout.range_of(name)
        row[begin:end] = memory[f"layer.{name}"]
    return row


def _stacked(rows: Sequence[Tensor]) -> Tensor:
    """``[K, width]``; one row that all parties share is not copied."""
    shared = all(row is rows[0] for row in rows)
    return rows[0].expand(len(rows), -1) if shared else torch.stack(list(rows))


def _train(plan: Plan, tasks: Sequence[Task], memories: Sequence[Memory]) -> list[Answer]:
    center = _stacked([_completed(plan, t.arrays["center"], m) for t, m in zip(tasks, memories, strict=True)])
    own = _stacked(
        [_completed(plan, t.arrays.get("own", t.arrays["center"]), m) for t, m in zip(tasks, memories, strict=True)]
    )
    algorithm, size, names = plan.algorithm, plan.net.layout.size, [task.party for task in tasks]
    anchor = alphas = None
    if algorithm.pull is not None:
        alphas = algorithm.pull.alphas(tasks[0].round, names, center)
        anchor = algorithm.pull.anchor(own[:, :size], center[:, :size], tasks[0].round, names) if alphas.any() else None
    job = Job(
        net=plan.net,
        loss=plan.loss,
        parties=[plan.people[name] for name in names],
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
    return list(_answers(plan, tasks, job, plan.solver.train(job)))


def _answers(plan: Plan, tasks: Sequence[Task], job: Job, trained: Trained) -> Iterator[Answer]:
    layout, rows = plan.net.layout, trained.rows
    tensors = layout.split(rows)  # [K, ...] each
    sent = tensors if plan.algorithm.report == "model" else layout.split(rows - job.received)
    for k, task in enumerate(tasks):
        arrays = {name: tensor[k] for name, tensor in sent.items() if name not in plan.private}
        memory = dict(trained.memories[k])
        memory |= {f"layer.{name}": tensors[name][k].reshape(-1) for name in plan.private}
        if plan.algorithm.personal is not None:
            memory["statistics"] = rows[k, layout.size :]
        metrics = trained.metrics[k]
        if plan.algorithm.measure:
            metrics = {**metrics, RECEIVED: _received_loss(plan, job.received[k], job.parties[k])}
        if task.settings.get("judge"):
            metrics = {**metrics, **_judged(plan, task.party, ((job.start[k], job.memories[k]), (rows[k], memory)))}
        report = Report(task.party, task.round, task.kind, arrays=arrays, metrics=metrics)
        healthy = not memory or all(map(finite, (rows[k], *memory.values())))
        yield report, memory if healthy else None  # a party that diverged forgets it, so that it can come back


def _judged(plan: Plan, name: str, states: Sequence[tuple[Tensor, Memory]]) -> dict[str, float]:
    """The party's test score with what it had before its local work, and with what it has after it."""
    party = plan.people[name]
    if not len(party.x_test):
        return {}
    plan.net.module.eval()
    try:
        scores = [_measure(plan, _owned(plan, row, memory), party) for row, memory in states]
    except Exception:  # a metric that fails says so when the party is evaluated; here it must not cost it its round
        return {}
    return dict(zip(JUDGED, scores, strict=True))


def _received_loss(plan: Plan, row: Tensor, party: Party) -> float:
    """The loss of the model that came from the centre, on evenly spaced samples of the party's own."""
    rows = torch.arange(0, party.samples, -(-party.samples // plan.algorithm.measure))
    return loss_on(plan, row, party.x[rows], party.y[rows])


def _owned(plan: Plan, row: Tensor, memory: Memory) -> Tensor:
    """The party's own model, where a term holds it."""
    return row if plan.algorithm.personal is None else plan.algorithm.personal(row, memory)


def _personal(plan: Plan, task: Task, memory: Memory) -> Tensor:
    return _owned(plan, _completed(plan, task.arrays.get("own", task.arrays["center"]), memory), memory)


def _evaluate(plan: Plan, task: Task, memory: Memory) -> Report:
    party = plan.people[task.party]
    metrics: dict[str, float] = {"test_samples": len(party.x_test)}
    if len(party.x_test):
        plan.net.module.eval()
        center = _completed(plan, task.arrays["center"], memory)
        own = _personal(plan, task, memory)
        metrics["center"] = _measure(plan, center, party)
        metrics["own"] = metrics["center"] if own is center else _measure(plan, own, party)
        if plan.metric.value is accuracy:
            metrics["majority"] = float((party.y_test == party.y.mode().values).double().mean())
    return Report(task.party, task.round, task.kind, metrics=metrics)


def loss_on(plan: Plan, row: Tensor, x: Tensor, y: Tensor) -> float:
    """The mean loss of a model on some samples, as it is used and not as it is trained."""
    with ONE_AT_A_TIME, torch.inference_mode(False):
        plan.net.module.eval()
        return _mean(plan, row.clone(), x, y, plan.loss)  # a row from a file lies otherwise, which changes last bits


@torch.no_grad()
def _mean(plan: Plan, row: Tensor, x: Tensor, y: Tensor, value: Loss) -> float:
    size, total = plan.net.layout.size, 0.0
    for begin in range(0, len(x), _AT_ONCE):
        some, target = (part[begin : begin + _AT_ONCE].clone() for part in (x, y))  # a module may write
        output, _ = plan.net.apply(row[:size], row[size:], some)
        total += float(torch.as_tensor(value(output, target)).double().mean()) * len(some)
    return total / len(x)


def _measure(plan: Plan, row: Tensor, party: Party) -> float:
    mean = _mean(plan, row, party.x_test, party.y_test, plan.metric.value)
    worst = -math.inf if plan.metric.higher_is_better else math.inf
    return worst if math.isnan(mean) else mean  # nan stands for a party without a test set, not for a failed model
