"""The party's side of evaluation: its models as it uses them, and their scores on its test data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..core.algorithm import Metrics, NamedTensors
from ..core.interfaces import EvaluationJob, EvaluationResult
from ..core.messages import Reply, Task
from ..models.flat import MODULE_LOCK
from ..parties.population import Party
from ..training.evaluation import mean_metric

if TYPE_CHECKING:
    from .party_side import TaskResult
    from .plan import Plan

LOCAL_SCORE_NAMES = ("before", "after")
"""Metrics: a party's test score before and after its local training, where a task asks for it."""


def with_private_layers(plan: Plan, row: Tensor, party_state: NamedTensors) -> Tensor:
    """Return a received row with the party's private layers."""
    held_layers = [name for name in plan.private_layers if f"layer.{name}" in party_state]
    if not held_layers:
        return row
    row = row.clone()
    for name in held_layers:
        begin, end = plan.net.layout.column_range(name)
        row[begin:end] = party_state[f"layer.{name}"]
    return row


def personal_model_of(plan: Plan, row: Tensor, party_state: NamedTensors) -> Tensor:
    """Return the personal model of a row, if a term has one."""
    return row if plan.algorithm.personal_model is None else plan.algorithm.personal_model(row, party_state)


def personal_model(plan: Plan, task: Task, party_state: NamedTensors) -> Tensor:
    """Return the party's complete personal model."""
    return personal_model_of(
        plan,
        with_private_layers(plan, task.arrays.get("personal", task.arrays["global_model"]), party_state),
        party_state,
    )


def models_in_use(plan: Plan, task: Task, party_state: NamedTensors) -> tuple[Tensor, Tensor]:
    """Return the global and the personal model as the party uses them: both with its private layers."""
    return with_private_layers(plan, task.arrays["global_model"], party_state), personal_model(plan, task, party_state)


def evaluate(plan: Plan, tasks: Sequence[Task], party_states: Sequence[NamedTensors]) -> list[TaskResult]:
    """Evaluate the global model, the personal model and the trivial baseline on each party's test set."""
    models = (models_in_use(plan, task, state) for task, state in zip(tasks, party_states, strict=True))
    rows = [(shared,) if personal is shared else (shared, personal) for shared, personal in models]
    answers: list[TaskResult] = []
    results = _evaluate_models(plan, [task.party for task in tasks], rows, trivial=True) if tasks else ()
    for task, one in zip(tasks, results, strict=True):
        metrics: dict[str, float] = {"test_samples": one.samples}
        if one.samples:
            metrics |= {"global_model": one.scores[0], "personal": one.scores[-1]}
        if one.trivial is not None:
            metrics["majority"] = one.trivial
        answers.append((Reply(task.party, task.round, task.kind, metrics=metrics), None))
    return answers


def score_local_training(plan: Plan, names: Sequence[str], models: Sequence[Sequence[Tensor]]) -> dict[str, Metrics]:
    """Return the parties' test scores before and after local training."""
    try:
        results = _evaluate_models(plan, names, models)
    except Exception:  # a failure is reported when the party is evaluated; here it must not cost the round
        one_by_one = [
            score_local_training(plan, [name], [rows])
            for name, rows in zip(names, models, strict=True)
            if len(names) > 1
        ]
        return {name: scores for one in one_by_one for name, scores in one.items()}
    with_test_set = ((name, one) for name, one in zip(names, results, strict=True) if one.samples)
    return {name: dict(zip(LOCAL_SCORE_NAMES, one.scores, strict=True)) for name, one in with_test_set}


def _evaluate_models(
    plan: Plan, names: Sequence[str], models: Sequence[Sequence[Tensor]], trivial: bool = False
) -> Sequence[EvaluationResult]:
    return plan.solver.evaluate(
        EvaluationJob(plan.net, plan.metric, [plan.population[name] for name in names], models=models, trivial=trivial)
    )


def received_model_loss(plan: Plan, row: Tensor, party: Party) -> float:
    """Return the loss of the received model on evenly spaced samples of the party."""
    sample_rows = torch.arange(0, party.samples, -(-party.samples // plan.algorithm.loss_samples))
    return loss_on(plan, row, party.x[sample_rows], y=party.y[sample_rows])


def loss_on(plan: Plan, row: Tensor, x: Tensor, y: Tensor) -> float:
    """Return the mean loss of a model on some samples in evaluation mode."""
    with MODULE_LOCK, torch.inference_mode(False):
        plan.net.module.eval()
        return mean_metric(plan.net, row, x, y=y, metric=plan.loss)
