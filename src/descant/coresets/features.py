"""The rows of a party as points: its inputs, a model's activations for them, or the gradient of the loss at each.

Only the party itself makes them: they are what a coreset is chosen by, and never leave.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from ..core.metrics import is_labels
from ..core.settings import unknown
from ..errors import ModelError, PartyError
from ..parties.partition import Rows

Features: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Inputs ``[n, ...]`` and targets ``[n]`` -> points ``[n, d]``."""

_BATCH = 1000  # rows that go through a module at once


@dataclass(frozen=True, eq=False)
class Space:
    """The rows of a party, those of one class side by side, and where each of them lies.

    A place is a number from 0 to n-1 in this order. Targets that are no labels (floating, or several a row) are one
    class.
    """

    order: Rows  # [n] which row of the party is at a place
    classes: tuple[slice, ...]  # the places of each class, by rising labels
    measure: Callable[[], Tensor]  # the points [n, d], in the party's own order; asked for once, if at all

    @classmethod
    def of(cls, y: Tensor, measure: Callable[[], Tensor]) -> Space:
        labels = y.numpy() if is_labels(y) else np.zeros(len(y), dtype=np.int64)
        order = np.argsort(labels, kind="stable")
        ends = np.cumsum(np.unique(labels, return_counts=True)[1])
        return cls(order, tuple(slice(int(a), int(b)) for a, b in zip((0, *ends[:-1]), ends, strict=True)), measure)

    @property
    def sizes(self) -> Rows:
        """How many rows each class has."""
        return np.array([own.stop - own.start for own in self.classes])

    @cached_property
    def points(self) -> Tensor:
        """``[n, d]`` in float32, moved to a mean of 0 and scaled to at most 1, so that no square over- or underflows.

        Nothing here depends on where the origin is or how long a unit is; differences of squares do, in float32.
        """
        given = self.measure().detach().flatten(1)
        if len(given) != len(self.order):
            raise PartyError(f"There must be one point a row. Got {len(given)} points for {len(self.order)} rows.")
        most = max(map(abs, map(float, torch.aminmax(given)))) if given.numel() else 0.0
        if not np.isfinite(most):
            raise PartyError(
                "Some points are not finite, so that there is no distance. Mend the model or the features."
            )
        ordered = given[torch.from_numpy(self.order)].to(torch.promote_types(given.dtype, torch.float32))
        points = (ordered / (most or 1.0)).to(torch.float32)
        return points.sub_(points.mean(0, dtype=torch.float64).to(torch.float32))

    @cached_property
    def squares(self) -> Tensor:
        """|z|² of every point, ``[n]``."""
        return self.points.square().sum(1)

    @cached_property
    def member(self) -> Tensor:
        """The number of its class for every place, ``[n]``."""
        return torch.repeat_interleave(torch.arange(len(self.classes)), torch.from_numpy(self.sizes))


def embedding(module: nn.Module, layer: str | None = None) -> Features:
    """Points that are activations: what comes out of the layer that is named, or what goes into the last linear one.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> embedding(net)(torch.zeros(5, 2), torch.zeros(5)).shape
    torch.Size([5, 3])
    """
    if layer is None:
        return partial(_activations, module, _last_linear(module), True)
    parts = dict(module.named_modules())
    if layer not in parts:
        raise unknown("layer", layer, [name for name in parts if name])
    return partial(_activations, module, parts[layer], False)


def gradient(module: nn.Module) -> Features:
    """Points that are gradients of the cross-entropy in the last linear layer: (softmax - one-hot) ⊗ (activation, 1).

    The usual stand-in for the whole gradient; its 1 is for the bias, where there is one. A point has classes x
    (activations + 1) numbers, so that a wide layer takes much memory.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> gradient(net)(torch.zeros(5, 2), torch.zeros(5, dtype=torch.int64)).shape
    torch.Size([5, 8])
    """
    return partial(_gradients, module, _last_linear(module))


SPACES: Mapping[str, Callable[[nn.Module], Features]] = MappingProxyType({"embedding": embedding, "gradient": gradient})
"""What makes features of a model, by the name of the space."""


def _activations(module: nn.Module, layer: nn.Module, inward: bool, x: Tensor, y: Tensor) -> Tensor:
    return _watched(module, layer, inward, x)[0]


def _gradients(module: nn.Module, head: nn.Linear, x: Tensor, y: Tensor) -> Tensor:
    seen, output = _watched(module, head, True, x)
    if output.shape[1:] != (head.out_features,) or seen.shape[1:] != (head.in_features,) or not is_labels(y):
        raise ModelError(
            "Gradient space needs a model whose last linear layer gives one number a class, and labels. Got outputs "
            f"{tuple(output.shape[1:])} and targets {tuple(y.shape[1:])} of {y.dtype}. Take space='embedding'."
        )
    if len(y) and not 0 <= int(y.min()) <= int(y.max()) < head.out_features:
        raise PartyError(f"The model knows the labels 0 to {head.out_features - 1}. Got {int(y.max())}.")
    off = output.softmax(1) - functional.one_hot(y, head.out_features)  # [n, classes]
    if head.bias is not None:
        seen = torch.cat([seen, seen.new_ones(len(seen), 1)], 1)
    return torch.einsum("nc,nh->nch", off, seen).flatten(1)


def _last_linear(module: nn.Module) -> nn.Linear:
    found = [part for part in module.modules() if isinstance(part, nn.Linear)]
    if not found:
        raise ModelError(
            f"{type(module).__name__} has no linear layer to take activations before. Name a layer: embedding(module, "
            "layer)."
        )
    return found[-1]


@torch.no_grad()
def _watched(module: nn.Module, layer: nn.Module, inward: bool, x: Tensor) -> tuple[Tensor, Tensor]:
    """What goes into a layer (or comes out of it), and the module's output, for every row."""
    seen, outputs = list[Tensor](), list[Tensor]()

    def keep(_: nn.Module, entered: tuple[Any, ...], left: Any) -> None:
        seen.append((entered[0] if inward else left).flatten(1).clone())

    handle = layer.register_forward_hook(keep)
    try:
        with _evaluating(module):
            for part in torch.split(x, _BATCH):
                outputs.append(module(part.clone()))  # a module may write into its input
    finally:
        handle.remove()
    if len(seen) != len(outputs):
        name = type(layer).__name__
        raise ModelError(f"The layer ({name}) ran {len(seen)} times in {len(outputs)} passes. Name one that runs once.")
    return torch.cat(seen), torch.cat(outputs)


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    before = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in before:
            part.training = training
