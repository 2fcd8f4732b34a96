"""Evaluation of models on the test sets of their parties."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..core.algorithm import Loss
from ..core.interfaces import EvaluationJob, EvaluationResult
from ..core.metrics import accuracy
from ..models.flat import Net
from ..parties.population import Party

_BATCH_SIZE = 4096  # test samples per forward pass


def evaluate_test_sets(job: EvaluationJob) -> list[EvaluationResult]:
    """Evaluate each model on its party's test set; for accuracy, add the majority-class baseline."""
    job.net.module.eval()
    return [_evaluate_party(job, party, rows) for party, rows in zip(job.parties, job.models, strict=True)]


def _evaluate_party(job: EvaluationJob, party: Party, rows: Sequence[Tensor]) -> EvaluationResult:
    if not len(party.x_test):
        return EvaluationResult(0, ())
    majority = None
    if job.trivial and job.metric.value is accuracy:
        majority = float((party.y_test == party.y.mode().values).double().mean())
    return EvaluationResult(len(party.x_test), [_measure(job, row, party) for row in rows], majority)


def _measure(job: EvaluationJob, row: Tensor, party: Party) -> float:
    mean = mean_metric(job.net, row, party.x_test, y=party.y_test, metric=job.metric.value)
    worst = -math.inf if job.metric.higher_is_better else math.inf
    return worst if math.isnan(mean) else mean  # nan means "no test set"; a failed model scores the worst value


@torch.no_grad()
def mean_metric(net: Net, row: Tensor, x: Tensor, y: Tensor, metric: Loss) -> float:
    """Return the mean of a loss or metric over samples, computed in batches."""
    size = net.layout.trainable_width
    total = 0.0
    row = row.clone()  # a module may write to it; a row mapped from a file is aligned differently
    for begin in range(0, len(x), _BATCH_SIZE):
        batch, target = (
            part[begin : begin + _BATCH_SIZE].clone() for part in (x, y)
        )  # a module may write to its input
        output, _ = net.apply(row[:size], row[size:], batch)
        total += float(torch.as_tensor(metric(output, target)).double().mean()) * len(batch)
    return total / len(x)
