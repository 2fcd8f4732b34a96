"""How good portfolio policies are: each in the days of its desk's test, day by day."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..core.interfaces import Exam, Judgement
from ..core.metrics import Metric
from ..models.flat import Net
from ..portfolio import Path, follow, uniform
from ..portfolio.desk import Desk
from .kernels.layers import Array
from .kernels.traced_kernel import Stack, kernel_of
from .rl_losses import log_softmax
from .stacked_forward import Outputs
from .stacked_gradient import LOOPED, STACKED

_TESTED = 50  # models that are tested at once


def in_test_years(exam: Exam) -> list[Judgement]:
    """Each model in the days of its desk's test, fees paid exactly; and uniform rebalancing beside."""
    pairs = [(k, row) for k, rows in enumerate(exam.rows) for row in rows]
    found: list[list[float]] = [[] for _ in exam.parties]
    for first in range(0, len(pairs), _TESTED):
        some = pairs[first : first + _TESTED]
        path = walked(exam.net, [exam.parties[k] for k, _ in some], [row for _, row in some])
        for (k, _), growth, turnover in zip(some, path.growth, path.turnover, strict=True):
            found[k].append(_value(exam.metric, growth, turnover))
    return [
        Judgement(desk.tests, scores, _uniform(exam.metric, desk) if exam.trivial else None)
        for desk, scores in zip(exam.parties, found, strict=True)
    ]


@torch.no_grad()
def walked(net: Net, desks: Sequence[Desk], rows: Sequence[Tensor]) -> Path:
    """What models do in the days of their desks' tests, ``[models, days, ...]``; as two, where there is one."""
    count = len(rows)
    if count == 1:
        desks, rows = [*desks, *desks], [*rows, *rows]
    way = LOOPED if isinstance(kernel_of(net, 1), str) else STACKED
    outputs = Outputs(net, way, Stack(net.layout, [torch.stack([row[: net.layout.size] for row in rows])]))
    prices, window = np.stack([desk.test for desk in desks]), desks[0].window  # [models, window + days, assets]
    chosen = np.zeros((len(rows), prices.shape[2]))

    def choose(t: int, before: Array) -> Array:
        nonlocal chosen
        seen = prices[:, t : t + window] / prices[:, t + window - 1, None]
        x = np.concatenate([seen.transpose(0, 2, 1), chosen[..., None]], -1).astype(np.float32)
        told = outputs(x[:, None])[:, 0].astype(np.float64)
        weights = np.exp(log_softmax(told))
        weights = np.where(np.isfinite(weights).all(-1, keepdims=True), weights, before)  # it says nothing: no trade
        chosen = weights[:, 1:]
        return weights

    with np.errstate(all="ignore"):
        path = follow(choose, *terms_of(desks))
    return Path(path.growth[:count], path.weights[:count], path.turnover[:count])


def terms_of(desks: Sequence[Desk]) -> tuple[Array, Array]:
    """What a walk of desks side by side needs: relatives ``[desks, days, assets]``, and what trading costs each."""
    return np.stack([desk.relatives for desk in desks]), np.array([desk.cost for desk in desks])


def _value(metric: Metric, growth: Array, turnover: Array) -> float:
    return float(torch.as_tensor(metric.value(torch.from_numpy(growth), torch.from_numpy(turnover))))


def _uniform(metric: Metric, desk: Desk) -> float:
    """What uniform rebalancing comes to in a desk's test; reckoned once."""
    if metric not in desk.known:
        path = uniform(desk.relatives, desk.cost)
        desk.known[metric] = _value(metric, path.growth, path.turnover)
    known: float = desk.known[metric]
    return known
