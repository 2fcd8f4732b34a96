"""Metrics of a model's outputs, and the trivial baselines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..errors import SettingError
from .algorithm import Loss


@dataclass(frozen=True)
class Metric:
    """A score of outputs against their targets."""

    name: str
    value: Callable[[Tensor, Tensor], Tensor]  # (output, target) -> one number, or one a sample
    higher_is_better: bool = True


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    """Return 1 where the largest output is the target's class, else 0."""
    return (output.argmax(-1) == target).double()


def episode_return(returns: Tensor, lengths: Tensor) -> Tensor:
    """Return the return of every episode: the outputs of agents are returns, their targets are lengths."""
    return returns


def annual_return(growth: Tensor, turnover: Tensor) -> Tensor:
    """Return the annual return of a portfolio: its outputs are the growth of each day, its targets the turnover."""
    from ..portfolio import performance_measures

    return torch.as_tensor(performance_measures.annual_return(growth.numpy()))


def sharpe_ratio(growth: Tensor, turnover: Tensor) -> Tensor:
    """Return the annual Sharpe ratio of a portfolio."""
    from ..portfolio import performance_measures

    return torch.as_tensor(performance_measures.sharpe_ratio(growth.numpy()))


_SIGN_FLIPS = 999


def sign_flip_p_value(differences: Tensor) -> float:
    """Return the p-value of the sum of paired differences by random sign flips (Fisher 1935).

    For right and wrong predictions of two models it is McNemar's exact test, up to the draws, which are fixed.

    >>> sign_flip_p_value(torch.tensor([1.0] + [0.0] * 499))
    1.0
    >>> sign_flip_p_value(torch.tensor([1.0] * 20 + [0.0] * 480)) < 0.05
    True
    """
    nonzero = differences[differences != 0].double()  # zeros do not change the sum
    if not len(nonzero):
        return 1.0
    generator = torch.Generator().manual_seed(0)
    observed = float(nonzero.sum().abs()) * (1 - 1e-9)
    at_least_as_extreme = 1
    for _ in range(_SIGN_FLIPS):
        signs = torch.randint(0, 2, nonzero.shape, generator=generator) * 2 - 1
        at_least_as_extreme += int((signs * nonzero).sum().abs() >= observed)
    return at_least_as_extreme / (_SIGN_FLIPS + 1)


EPISODE_RETURN = Metric("return", episode_return)
ANNUAL_RETURN = Metric("annual return", annual_return)
SHARPE_RATIO = Metric("Sharpe ratio", sharpe_ratio)
_TRIVIAL_BY_METRIC = {
    EPISODE_RETURN.name: "random policy",
    ANNUAL_RETURN.name: "uniform rebalancing",
    SHARPE_RATIO.name: "uniform rebalancing",
}
_MAJORITY = "majority class"
TRIVIAL_BASELINES = {
    _MAJORITY: "always answering the most frequent label",
    "random policy": "acting at random",
    "uniform rebalancing": "the same share of every asset, restored every day",
}
"""Every trivial baseline, with its meaning."""


def trivial_baseline(metric: str) -> str:
    """Return the name of the trivial baseline of a metric.

    >>> trivial_baseline("accuracy"), trivial_baseline("return")
    ('majority class', 'random policy')
    """
    return _TRIVIAL_BY_METRIC.get(metric, _MAJORITY)


def has_class_labels(y: Tensor) -> bool:
    """Return whether targets are one whole number a row."""
    return y.dim() == 1 and not y.is_floating_point()


def is_cross_entropy(loss: Loss) -> bool:
    """Return whether the loss implies that targets are classes."""
    return loss is functional.cross_entropy or isinstance(loss, nn.CrossEntropyLoss)


def metric_for(metric: Metric | Callable[[Tensor, Tensor], Tensor] | None, loss: Loss, party: Any) -> Metric:
    """Return the user's metric, or accuracy if the loss is the cross entropy of classes, or the loss itself."""
    if isinstance(metric, Metric):
        return metric
    if metric is not None and not callable(metric):
        raise SettingError(f"A metric is a function of (output, target), or a descant.Metric. Got {metric!r:.60}.")
    if metric is not None:
        return Metric(getattr(metric, "__name__", type(metric).__name__), metric)
    if not is_cross_entropy(loss):
        return Metric("loss", loss, higher_is_better=False)
    target: Tensor = party.y
    if target.is_floating_point() and target.ndim == 1:
        raise SettingError(
            f"The loss is the cross entropy, but the targets are {target.dtype} numbers. Give classes as whole "
            "numbers, or another loss: Federation(..., loss=...)."
        )
    return Metric("accuracy", accuracy) if target.ndim == 1 else Metric("loss", loss, higher_is_better=False)
