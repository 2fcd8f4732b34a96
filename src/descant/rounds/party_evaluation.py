"""The party's side of judging: its models as it uses them, and what they reach on what it keeps for that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..core.algorithm import Memory, Metrics
from ..core.interfaces import Exam, Judgement
from ..core.messages import Report, Task
from ..models.flat import ONE_AT_A_TIME
from ..parties.population import Party
from ..training.evaluation import mean_of

if TYPE_CHECKING:
    from .party_side import Answer
    from .plan import Plan

JUDGED = ("before", "after")  # a party's test score before and after its local work, where a task asks to judge it


def completed(plan: Plan, row: Tensor, memory: Memory) -> Tensor:
    """A row that came from outside, with the party's private layers put in."""
    held = [name for name in plan.private if f"layer.{name}" in memory]
    if not held:
        return row
    row = row.clone()
    for name in held:
        begin, end = plan.net.layout.range_of(name)
        row[begin:end] = memory[f"layer.{name}"]
    return row


def owned(plan: Plan, row: Tensor, memory: Memory) -> Tensor:
    """The party's own model, where a term holds it."""
    return row if plan.algorithm.personal is None else plan.algorithm.personal(row, memory)


def personal(plan: Plan, task: Task, memory: Memory) -> Tensor:
    """The party's own model, whole."""
    return owned(plan, completed(plan, task.arrays.get("own", task.arrays["center"]), memory), memory)


def shown(plan: Plan, task: Task, memory: Memory) -> tuple[Tensor, Tensor]:
    """The common model and the party's own, as the party uses them: with its private layers in both."""
    return completed(plan, task.arrays["center"], memory), personal(plan, task, memory)


def evaluated(plan: Plan, tasks: Sequence[Task], memories: Sequence[Memory]) -> list[Answer]:
    """What the common model and a party's own reach on its test set, and what is reached without learning."""
    both = (shown(plan, task, memory) for task, memory in zip(tasks, memories, strict=True))
    rows = [(center,) if own is center else (center, own) for center, own in both]
    answers: list[Answer] = []
    found = _examined(plan, [task.party for task in tasks], rows, trivial=True) if tasks else ()
    for task, one in zip(tasks, found, strict=True):
        metrics: dict[str, float] = {"test_samples": one.samples}
        if one.samples:
            metrics |= {"center": one.scores[0], "own": one.scores[-1]}
        if one.trivial is not None:
            metrics["majority"] = one.trivial
        answers.append((Report(task.party, task.round, task.kind, metrics=metrics), None))
    return answers


def scored(plan: Plan, names: Sequence[str], states: Sequence[Sequence[Tensor]]) -> dict[str, Metrics]:
    """The parties' test scores with what each had before its local work, and with what it has after it."""
    try:
        found = _examined(plan, names, states)
    except Exception:  # what fails says so when the party is evaluated; here it must not cost it its round
        alone = [scored(plan, [name], [rows]) for name, rows in zip(names, states, strict=True) if len(names) > 1]
        return {name: scores for one in alone for name, scores in one.items()}
    judged = ((name, one) for name, one in zip(names, found, strict=True) if one.samples)
    return {name: dict(zip(JUDGED, one.scores, strict=True)) for name, one in judged}


def _examined(
    plan: Plan, names: Sequence[str], rows: Sequence[Sequence[Tensor]], trivial: bool = False
) -> Sequence[Judgement]:
    return plan.solver.examine(Exam(plan.net, plan.metric, [plan.people[name] for name in names], rows, trivial))


def received_loss(plan: Plan, row: Tensor, party: Party) -> float:
    """The loss of the model that came from the centre, on evenly spaced samples of the party's own."""
    rows = torch.arange(0, party.samples, -(-party.samples // plan.algorithm.measure))
    return loss_on(plan, row, party.x[rows], party.y[rows])


def loss_on(plan: Plan, row: Tensor, x: Tensor, y: Tensor) -> float:
    """The mean loss of a model on some samples, as it is used and not as it is trained."""
    with ONE_AT_A_TIME, torch.inference_mode(False):
        plan.net.module.eval()
        return mean_of(plan.net, row, x, y, plan.loss)
