"""The party's side of the boundary: what a stack of parties does with its tasks.

A piece is a pure function of tasks and memories. Engines differ only in how they cut the tasks of a round into pieces
and where they run them; a piece that was lost can be run again and gives the same answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..core.algorithm import LOG, Hyper, Memory, hidden_state, solver_state
from ..core.interfaces import Job, Trained
from ..core.messages import Report, Task
from ..errors import DescantError, ModelError
from ..models.flat import ONE_AT_A_TIME, Unbound
from ..parties.population import Party
from .party_evaluation import completed, evaluated, owned, personal, received_loss, scored
from .plan import ANEW, RECEIVED, Plan
from .validation import finite

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
    memories = [hidden_state(m) if t.settings.get(ANEW) else m for t, m in zip(tasks, memories, strict=True)]
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
            from ..privacy.secure_aggregation import party_masking

            answers[i] = party_masking.keyed(plan, task)
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
            from ..coresets import proxy_training

            try:
                learning[i] = proxy_training.stand_in(plan, task, memories[i])
            except DescantError as error:
                failed[i] = (Report(task.party, task.round, task.kind, "error", reason=str(error)), None)
    return learning, failed


def _stacked(rows: Sequence[Tensor]) -> Tensor:
    """``[K, width]``; one row that all parties share is not copied."""
    shared = all(row is rows[0] for row in rows)
    return rows[0].expand(len(rows), -1) if shared else torch.stack(list(rows))


def _train(plan: Plan, tasks: Sequence[Task], memories: Sequence[Memory], parties: Sequence[Party]) -> list[Answer]:
    before = memories  # a stand-in has none, and what a party has left is no business of its solver
    memories = [{} if t.kind == "stand_in" else solver_state(m) for t, m in zip(tasks, before, strict=True)]
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
    return list(_protected(plan, tasks, before, center, answers))


def _protected(
    plan: Plan, tasks: Sequence[Task], before: Sequence[Memory], center: Tensor, answers: Iterator[Answer]
) -> Iterator[Answer]:
    """Apply local privacy, then masks, then coreset encryption: the order is a security property."""
    if plan.algorithm.privacy is not None:
        from ..privacy import local_dp

        answers = (local_dp.disguised(plan, *one) for one in zip(tasks, before, center, answers, strict=True))
    if plan.algorithm.secure is not None:
        from ..privacy.secure_aggregation import party_masking

        answers = (party_masking.masked(plan, *one) for one in zip(tasks, answers, strict=True))
    if plan.algorithm.stand_in is not None or any(map(hidden_state, before)):
        from ..coresets import proxy_training

        answers = (proxy_training.answered(plan, *one) for one in zip(tasks, before, center, answers, strict=True))
    return answers


def _answers(plan: Plan, tasks: Sequence[Task], job: Job, trained: Trained) -> Iterator[Answer]:
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
        numbers = [tensor for name, tensor in memory.items() if not name.startswith(LOG)]
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
