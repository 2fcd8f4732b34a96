"""The party's side of a round: perform the tasks of a stack of parties.

A batch is a pure function of tasks and party states. Engines differ only in how they split the tasks of a round into
batches and where they run them; a lost batch can run again and gives the same replies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..core.algorithm import APPEND_ONLY, Hyper, NamedTensors, hidden_state, solver_state
from ..core.interfaces import TrainJob, TrainResult
from ..core.messages import Reply, Task
from ..errors import DescantError, ModelError
from ..models.flat import MODULE_LOCK, Unbound
from ..parties.population import Party
from .party_evaluation import (
    evaluate,
    personal_model,
    personal_model_of,
    received_model_loss,
    score_local_training,
    with_private_layers,
)
from .plan import RECEIVED_MODEL_LOSS, RESET, Plan
from .validation import is_finite

TaskResult = tuple[Reply, NamedTensors | None]  # the party state; None where it does not change


def perform_tasks(plan: Plan, tasks: Sequence[Task], party_states: Sequence[NamedTensors]) -> list[TaskResult]:
    """Perform every task; a party that fails is reported as such, and the others are unaffected.

    A "personal" task returns a party's complete model, private layers included: it is for simulations.
    """
    try:
        with MODULE_LOCK, torch.inference_mode(False), torch.enable_grad():
            return _dispatch_by_kind(plan, tasks, party_states)
    except Exception as error:
        if len(tasks) == 1:
            task = tasks[0]
            reason = f"{type(error).__name__}: {error}"  # a silo sends only the part before the colon
            return [(Reply(task.party, task.round, task.kind, status="error", reason=reason), None)]
        one_by_one = (perform_tasks(plan, [task], [state]) for task, state in zip(tasks, party_states, strict=True))
        return [answer for answers in one_by_one for answer in answers]


def _dispatch_by_kind(plan: Plan, tasks: Sequence[Task], party_states: Sequence[NamedTensors]) -> list[TaskResult]:
    for task in tasks:
        if task.settings["layout"] != plan.net.layout.digest:
            raise ModelError(f"Party {task.party!r} has another model than the federation: {plan.net.layout.names}.")
    party_states = [hidden_state(m) if t.settings.get(RESET) else m for t, m in zip(tasks, party_states, strict=True)]
    trainees, answers = _trainees(plan, tasks, party_states)
    for round in {tasks[i].round for i in trainees}:  # draws and schedules depend on the round: a stack has one
        rows_of_round = [i for i in trainees if tasks[i].round == round]
        trained = _train(
            plan,
            [tasks[i] for i in rows_of_round],
            [party_states[i] for i in rows_of_round],
            parties=[trainees[i] for i in rows_of_round],
        )
        answers.update(zip(rows_of_round, trained, strict=True))
    evaluation_rows = [i for i, task in enumerate(tasks) if task.kind == "evaluate"]
    evaluations = evaluate(plan, [tasks[i] for i in evaluation_rows], [party_states[i] for i in evaluation_rows])
    answers.update(zip(evaluation_rows, evaluations, strict=True))
    for i, task in enumerate(tasks):
        if task.kind == "keys":
            from ..privacy.secure_aggregation import party_masking

            answers[i] = party_masking.key_reply(plan, task)
        if task.kind == "personal":
            row = personal_model(plan, task, party_states[i])
            answers[i] = (Reply(task.party, task.round, task.kind, arrays=plan.net.layout.split(row)), None)
    return [answers[i] for i in range(len(tasks))]


def _trainees(
    plan: Plan, tasks: Sequence[Task], party_states: Sequence[NamedTensors]
) -> tuple[dict[int, Party], dict[int, TaskResult]]:
    """Return the trainee of each task, and error replies for proxies that cannot be built."""
    trainees: dict[int, Party] = {}
    failed: dict[int, TaskResult] = {}
    for i, task in enumerate(tasks):
        if task.kind == "train":
            trainees[i] = plan.population[task.party]
        elif task.kind == "proxy":
            from ..coresets import proxy_training

            try:
                trainees[i] = proxy_training.proxy_party(plan, task, party_states[i])
            except DescantError as error:
                failed[i] = (Reply(task.party, task.round, task.kind, status="error", reason=str(error)), None)
    return trainees, failed


def _stack_rows(rows: Sequence[Tensor]) -> Tensor:
    """Stack rows to ``[K, width]``; a row that all parties share is not copied."""
    shared = all(row is rows[0] for row in rows)
    return rows[0].expand(len(rows), -1) if shared else torch.stack(list(rows))


def _train(
    plan: Plan, tasks: Sequence[Task], party_states: Sequence[NamedTensors], parties: Sequence[Party]
) -> list[TaskResult]:
    states_before = party_states  # a proxy has none; solvers do not see deposited coresets
    party_states = [{} if t.kind == "proxy" else solver_state(m) for t, m in zip(tasks, states_before, strict=True)]
    global_models = _stack_rows(
        [with_private_layers(plan, t.arrays["global_model"], m) for t, m in zip(tasks, party_states, strict=True)]
    )
    personal_models = _stack_rows(
        [
            with_private_layers(plan, t.arrays.get("personal", t.arrays["global_model"]), m)
            for t, m in zip(tasks, party_states, strict=True)
        ]
    )
    algorithm = plan.algorithm
    size = plan.net.layout.trainable_width
    names = [task.party for task in tasks]
    anchor = alphas = None
    if algorithm.proximal_step is not None:
        alphas = algorithm.proximal_step.alphas(tasks[0].round, names, global_models)
        anchor = (
            algorithm.proximal_step.anchor(personal_models[:, :size], global_models[:, :size], tasks[0].round, names)
            if alphas.any()
            else None
        )
    job = TrainJob(
        net=plan.net,
        loss=plan.loss,
        parties=parties,
        hyperparameters=[Hyper(task.settings["lr"], task.settings["work"]) for task in tasks],
        party_states=party_states,
        seed=tasks[0].settings["seed"],
        round=tasks[0].round,
        execution_mode=tasks[0].settings["execution_mode"],
        start=algorithm.local_start(personal_models, global_models),
        received=global_models,
        anchor=anchor,
        alphas=alphas,
        terms=plan.terms,
        freeze=None if isinstance(algorithm.freeze, Unbound) else algorithm.freeze,  # a plan's algorithm is bound
    )
    answers = _make_replies(plan, tasks, job, train_result=plan.solver.train(job))
    return list(_protect_replies(plan, tasks, states_before, global_models=global_models, answers=answers))


def _protect_replies(
    plan: Plan,
    tasks: Sequence[Task],
    before: Sequence[NamedTensors],
    global_models: Tensor,
    answers: Iterator[TaskResult],
) -> Iterator[TaskResult]:
    """Apply local privacy, then masks, then coreset encryption: the order is a security property."""
    if plan.algorithm.privacy is not None:
        from ..privacy import local_dp

        answers = (
            local_dp.privatize_reply(plan, *one) for one in zip(tasks, before, global_models, answers, strict=True)
        )
    if plan.algorithm.secure_aggregation is not None:
        from ..privacy.secure_aggregation import party_masking

        answers = (party_masking.mask_reply(plan, *one) for one in zip(tasks, answers, strict=True))
    if plan.algorithm.coreset_proxy is not None or any(map(hidden_state, before)):
        from ..coresets import proxy_training

        answers = (
            proxy_training.finish_reply(plan, *one) for one in zip(tasks, before, global_models, answers, strict=True)
        )
    return answers


def _make_replies(plan: Plan, tasks: Sequence[Task], job: TrainJob, train_result: TrainResult) -> Iterator[TaskResult]:
    layout = plan.net.layout
    rows = train_result.models
    sent_rows = rows if plan.algorithm.reply_content == "model" else rows - job.received
    reply_tensors = layout.split(sent_rows)  # [K, ...] each
    party_states = [_next_party_state(plan, rows[k], train_result.party_states[k]) for k in range(len(tasks))]
    scored_rows = [k for k, task in enumerate(tasks) if task.settings.get("evaluate_local")]
    models_before_after = [
        (personal_model_of(plan, job.start[k], job.party_states[k]), personal_model_of(plan, rows[k], party_states[k]))
        for k in scored_rows
    ]
    local_scores = (
        score_local_training(plan, [tasks[k].party for k in scored_rows], models_before_after) if scored_rows else {}
    )
    for k, (task, state) in enumerate(zip(tasks, party_states, strict=True)):
        arrays = {name: tensor[k] for name, tensor in reply_tensors.items() if name not in plan.private_layers}
        metrics = {**train_result.metrics[k], **local_scores.get(task.party, {})}
        if plan.algorithm.loss_samples:
            metrics[RECEIVED_MODEL_LOSS] = received_model_loss(plan, job.received[k], job.parties[k])
        reply = Reply(task.party, task.round, task.kind, arrays=arrays, metrics=metrics)
        numbers = [tensor for name, tensor in state.items() if not name.startswith(APPEND_ONLY)]
        healthy = not state or all(map(is_finite, (rows[k], *numbers)))
        # a party that diverged discards its new state, so that it can recover
        state_after_divergence: NamedTensors | None = {} if task.settings.get(RESET) else None
        yield reply, state if healthy else state_after_divergence


def _next_party_state(plan: Plan, row: Tensor, solver_state: NamedTensors) -> dict[str, Tensor]:
    """Return the new party state: the solver's state and the private parts of the model."""
    ranges = {name: plan.net.layout.column_range(name) for name in plan.private_layers}
    kept = {**solver_state, **{f"layer.{name}": row[begin:end] for name, (begin, end) in ranges.items()}}
    if plan.algorithm.personal_model is not None:
        kept["statistics"] = row[plan.net.layout.trainable_width :]
    return kept
