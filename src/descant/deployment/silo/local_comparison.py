"""`descant silo evaluate`: compare joining with local training on this machine. Nothing is sent."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...algorithms import Local
from ...analysis.scores import ScoreColumn, Scores, party_table
from ...core.algorithm import NamedTensors
from ...core.interfaces import EvaluationJob
from ...core.messages import Reply, Task, TaskKind
from ...core.metrics import Metric, sign_flip_p_value, trivial_baseline
from ...core.progress import progress_bar
from ...errors import PartyError, StateError
from ...models.flat import MODULE_LOCK, bind
from ...parties import Agent, Party
from ...reporting.table import Table
from ...rounds.party_side import perform_tasks
from ...rounds.plan import Plan
from ...rounds.validation import is_finite
from .handshake_reply import check_party_kind, layout_summary, require_handshake
from .result_files import SiloResults, TrainingRecord
from .silo_file import PartyWording, SiloFile
from .task_handler import TaskHandler

_SIGNIFICANCE_LEVEL = 0.05  # ours: a difference that chance gives more often than this counts as none
_SCORE_TOLERANCE = 0.005  # ours: the scores of one model may differ by this much between machines


def compare_with_local(file: SiloFile, folder: Path, progress: bool = False) -> Table:
    """Compare personal and global model with local training by the same work in the same rounds."""
    result = SiloResults(folder)
    plan = TaskHandler(file, folder).plan
    recorded_scores = result.scores()
    training_records = result.training_records()
    if not training_records:
        raise StateError(f"The party has not trained in {folder} yet. Join first: descant silo join.")
    local = replace(plan, algorithm=bind(Local(), plan.net))
    _check_same_setup(file, folder, plan=local, recorded_scores=recorded_scores)
    row = _train_locally(local, file.party, training_records, progress=progress)
    local_scores, scores = (
        _to_scores(plan, file.party, numbers) for numbers in (_evaluate_row(local, file.party, row), recorded_scores)
    )
    table = party_table(file.population, scores, local_scores, rounds={file.party: len(training_records)})
    p_value = (
        sign_flip_p_value(_score_differences(plan, file.party_data, result.personal_model(plan.net.layout), local=row))
        if recorded_scores["test_samples"]
        else 1.0
    )
    return replace(table, verdict=_verdict(scores, local_scores, recorded_scores, p_value, file.wording))


def _check_same_setup(file: SiloFile, folder: Path, plan: Plan, recorded_scores: Mapping[str, Any]) -> None:
    """Raise unless the file has the model and, as far as scores can tell, the data that took part.

    Otherwise local training would use other rows than the personal model did, and other test samples.
    """
    layout = plan.net.layout
    hint = f"Give the file with which it joined: descant silo judge {folder.parent} FILE"
    if layout.digest != (joined_digest := require_handshake(folder)["layout"]):
        raise StateError(f"The model of {file.path} is {layout_summary(layout)}, but {joined_digest} took part. {hint}")
    try:
        check_party_kind(file, plan)
    except PartyError as error:
        message = f"The party of {file.path} is of another kind than the one that took part: {error} {hint}"
        raise StateError(message) from error
    current_scores = _evaluate_row(plan, file.party, SiloResults(folder).personal_model(layout))
    tolerances = {"test_samples": 0.0, "majority": 1e-6, **({"personal": _SCORE_TOLERANCE} if file.has_rows else {})}
    for name, tolerance in tolerances.items():  # no tolerance fits episodes: one step can change much between machines
        recorded, current = (float(each.get(name, math.nan)) for each in (recorded_scores, current_scores))
        if (
            not math.isclose(recorded, current, rel_tol=tolerance, abs_tol=tolerance)
            and not math.isnan(recorded)
            and not math.isnan(current)
        ):
            label = trivial_baseline(plan.metric.name) if name == "majority" else name
            raise StateError(
                f"The data of {file.path} are not those that took part: {label} was {recorded:.6g} on their test set "
                f"and is {current:.6g} on this one. {hint}"
            )


def _train_locally(plan: Plan, party: str, training_records: Mapping[int, TrainingRecord], progress: bool) -> Tensor:
    """Train the party alone with the recorded settings and random streams; return its model as a row."""
    row = plan.net.copy_initial_row()
    party_state = dict[str, Tensor]()
    with progress_bar(disable=not progress) as bar:
        progress_task = bar.add_task("training locally", total=len(training_records), summary="–")
        for record in training_records.values():
            settings = {"lr": record.lr, "work": record.work}
            reply, new_state = _run_task(
                plan,
                party,
                record.round,
                kind="train",
                row=row,
                party_state=party_state,
                execution_mode=record.execution_mode,
                extra_settings=settings,
            )
            trained = plan.net.layout.join(reply.arrays)
            if is_finite(trained):  # a non-finite update would have been rejected in the federation too
                row = trained
                party_state = dict(new_state if new_state is not None else party_state)
            bar.update(progress_task, advance=1)
    return row


def _evaluate_row(plan: Plan, party: str, row: Tensor) -> Mapping[str, Any]:
    return _run_task(plan, party, 0, kind="evaluate", row=row, party_state={}, execution_mode="", extra_settings={})[
        0
    ].metrics


def _run_task(
    plan: Plan,
    party: str,
    round: int,
    kind: TaskKind,
    row: Tensor,
    party_state: NamedTensors,
    execution_mode: str,
    extra_settings: Mapping[str, Any],
) -> tuple[Reply, NamedTensors | None]:
    settings = {"seed": plan.seed, "execution_mode": execution_mode, "layout": plan.net.layout.digest, **extra_settings}
    [(reply, new_state)] = perform_tasks(
        plan,
        [Task(party, round, kind, arrays={"global_model": row, "personal": row}, settings=settings)],
        [party_state],
    )
    if reply.status != "ok":
        raise PartyError(f"Local training failed in round {round}: {reply.reason}")
    return reply, new_state


def _to_scores(plan: Plan, party: str, metrics: Mapping[str, Any]) -> Scores:
    """Return evaluation metrics as scores of one party."""

    def column(name: str) -> ScoreColumn:
        return ScoreColumn(np.array([metrics.get(name, math.nan)], dtype=float), plan.metric.higher_is_better)

    return Scores((party,), plan.metric.name, *map(column, ("personal", "global_model", "majority", "before", "after")))


def _score_differences(plan: Plan, party: Any, personal: Tensor, local: Tensor) -> Tensor:
    """Return by how much the personal model beats the local one on each test sample.

    An agent is compared per episode, a desk per day. Two models that both fail do not differ.
    """
    improvement = (_score_samples(plan, party, personal) - _score_samples(plan, party, local)) * (
        1 if plan.metric.higher_is_better else -1
    )
    return improvement.nan_to_num(0.0, math.inf, -math.inf)


def _score_samples(plan: Plan, party: Any, row: Tensor) -> Tensor:
    """Return the metric of a model on each test sample; the worst value where the model fails."""
    scores = list[Tensor]()
    worst = -math.inf if plan.metric.higher_is_better else math.inf

    def record_scores(output: Tensor, target: Tensor) -> Tensor:
        scores.append(_per_sample_metric(plan.metric, party, output, target=target).double())
        return scores[-1].mean()

    job = EvaluationJob(plan.net, replace(plan.metric, value=record_scores), [party], models=[[row]], trivial=False)
    with MODULE_LOCK, torch.inference_mode(False):
        plan.solver.evaluate(job)
    return torch.cat(scores).nan_to_num(worst, math.inf, -math.inf)


def _per_sample_metric(metric: Metric, party: Any, output: Tensor, target: Tensor) -> Tensor:
    """Return the metric of each test sample; for a desk the log return of each day, which adds up to its metric."""
    if isinstance(party, Party):
        samples = range(len(output))
        return torch.stack([metric.value(output[i : i + 1], target[i : i + 1]).double().mean() for i in samples])
    return metric.value(output, target) if isinstance(party, Agent) else output.log()


def _verdict(
    scores: Scores, local_scores: Scores, recorded_scores: Mapping[str, Any], p_value: float, wording: PartyWording
) -> str:
    personal = scores.personal.mean
    local = local_scores.personal.mean
    samples = int(recorded_scores["test_samples"])
    if math.isnan(personal) or math.isnan(local):
        return f"The party has no test set, so joining cannot be compared. Give its file {wording.test_setting}."
    tests = f"{samples} {wording.tested_unit}{'s' * (samples != 1)}"
    conclusion = "Joining helped" if scores.personal.count_better(local_scores.personal) else "Joining did not help"
    if p_value > _SIGNIFICANCE_LEVEL:
        conclusion = f"No significant difference on {tests}"
    each = f", where one sample is {1 / samples:.3f}" if scores.metric == "accuracy" else ""
    return (
        f"{conclusion}: {scores.metric} {personal:.3f} after round {recorded_scores['round']}, and {local:.3f} by "
        f"local training with the same work, on {tests}{each}. The global model has {scores.global_model.mean:.3f}."
    )
