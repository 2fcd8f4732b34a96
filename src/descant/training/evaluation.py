"""How good models are on what their parties keep to test them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..core.algorithm import Loss
from ..core.interfaces import Exam, Judgement
from ..core.metrics import accuracy
from ..models.flat import Net
from ..parties.population import Party

_AT_ONCE = 4096  # test samples a forward pass


def on_test_sets(exam: Exam) -> list[Judgement]:
    """Each model on its party's test set; where its accuracy counts, the majority class beside it."""
    exam.net.module.eval()
    return [_judged(exam, party, rows) for party, rows in zip(exam.parties, exam.rows, strict=True)]


def _judged(exam: Exam, party: Party, rows: Sequence[Tensor]) -> Judgement:
    if not len(party.x_test):
        return Judgement(0, ())
    majority = None
    if exam.trivial and exam.metric.value is accuracy:
        majority = float((party.y_test == party.y.mode().values).double().mean())
    return Judgement(len(party.x_test), [_measure(exam, row, party) for row in rows], majority)


def _measure(exam: Exam, row: Tensor, party: Party) -> float:
    mean = mean_of(exam.net, row, party.x_test, party.y_test, exam.metric.value)
    worst = -math.inf if exam.metric.higher_is_better else math.inf
    return worst if math.isnan(mean) else mean  # nan stands for a party without a test set, not for a failed model


@torch.no_grad()
def mean_of(net: Net, row: Tensor, x: Tensor, y: Tensor, value: Loss) -> float:
    """The mean over samples of a loss or a metric of a model, some samples at a time."""
    size, total, row = net.layout.size, 0.0, row.clone()  # a module may write; and a row from a file lies otherwise
    for begin in range(0, len(x), _AT_ONCE):
        some, target = (part[begin : begin + _AT_ONCE].clone() for part in (x, y))  # a module may write
        output, _ = net.apply(row[:size], row[size:], some)
        total += float(torch.as_tensor(value(output, target)).double().mean()) * len(some)
    return total / len(x)
