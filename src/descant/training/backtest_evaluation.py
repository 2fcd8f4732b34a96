"""Evaluation of portfolio policies in the back-tests of their desks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..core.interfaces import EvaluationJob, EvaluationResult
from ..core.metrics import Metric
from ..models.flat import Net
from ..portfolio import BacktestResult, run_backtest, uniform_rebalancing
from ..portfolio.desk import Desk
from .kernels.layers import Array
from .kernels.traced_kernel import Stack, kernel_of
from .rl_losses import log_softmax
from .stacked_forward import StackedForward
from .stacked_gradient import LOOPED, STACKED

_TEST_BATCH = 50  # models evaluated at once


def evaluate_backtests(job: EvaluationJob) -> list[EvaluationResult]:
    """Evaluate each model in its desk's test period, with exact fees; uniform rebalancing is the baseline."""
    pairs = [(k, row) for k, rows in enumerate(job.models) for row in rows]
    scores_by_desk: list[list[float]] = [[] for _ in job.parties]
    for first in range(0, len(pairs), _TEST_BATCH):
        batch = pairs[first : first + _TEST_BATCH]
        result = backtest_models(job.net, [job.parties[k] for k, _ in batch], [row for _, row in batch])
        for (k, _), growth, turnover in zip(batch, result.growth, result.turnover, strict=True):
            scores_by_desk[k].append(_metric_value(job.metric, growth, turnover))
    return [
        EvaluationResult(desk.test_count, scores, _uniform_score(job.metric, desk) if job.trivial else None)
        for desk, scores in zip(job.parties, scores_by_desk, strict=True)
    ]


@torch.no_grad()
def backtest_models(net: Net, desks: Sequence[Desk], rows: Sequence[Tensor]) -> BacktestResult:
    """Run models through their desks' test periods, ``[models, days, ...]``; a lone model is computed twice."""
    count = len(rows)
    if count == 1:
        desks = [*desks, *desks]
        rows = [*rows, *rows]
    mode = LOOPED if isinstance(kernel_of(net, 1), str) else STACKED
    outputs = StackedForward(
        net, mode, Stack(net.layout, [torch.stack([row[: net.layout.trainable_width] for row in rows])])
    )
    prices = np.stack([desk.test_prices for desk in desks])
    window = desks[0].window  # [models, window + days, assets]
    chosen = np.zeros((len(rows), prices.shape[2]))

    def choose(t: int, held: Array) -> Array:
        nonlocal chosen
        relative_prices = prices[:, t : t + window] / prices[:, t + window - 1, None]
        x = np.concatenate([relative_prices.transpose(0, 2, 1), chosen[..., None]], -1).astype(np.float32)
        output = outputs(x[:, None])[:, 0].astype(np.float64)
        weights = np.exp(log_softmax(output))
        weights = np.where(np.isfinite(weights).all(-1, keepdims=True), weights, held)  # no trade if not finite
        chosen = weights[:, 1:]
        return weights

    with np.errstate(all="ignore"):
        result = run_backtest(choose, *backtest_inputs(desks))
    return BacktestResult(result.growth[:count], result.weights[:count], result.turnover[:count])


def backtest_inputs(desks: Sequence[Desk]) -> tuple[Array, Array]:
    """Return price relatives ``[desks, days, assets]`` and the trading cost of each desk."""
    return np.stack([desk.relatives for desk in desks]), np.array([desk.cost for desk in desks])


def _metric_value(metric: Metric, growth: Array, turnover: Array) -> float:
    return float(torch.as_tensor(metric.value(torch.from_numpy(growth), torch.from_numpy(turnover))))


def _uniform_score(metric: Metric, desk: Desk) -> float:
    """Return the score of uniform rebalancing in a desk's test period; cached."""
    if metric not in desk.cache:
        result = uniform_rebalancing(desk.relatives, desk.cost)
        desk.cache[metric] = _metric_value(metric, result.growth, result.turnover)
    score: float = desk.cache[metric]
    return score
