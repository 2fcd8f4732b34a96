"""A party's rows as points: its inputs, a model's activations, or the gradient of the loss at each row.

The party computes them to choose its coreset; they never leave the party.
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

from ..core.metrics import has_class_labels
from ..core.settings import unknown_name_error
from ..errors import ModelError, PartyError
from ..parties.partition import RowIndices

Features: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Inputs ``[n, ...]`` and targets ``[n]`` -> points ``[n, d]``."""

_BATCH = 1000  # rows per forward pass


@dataclass(frozen=True, eq=False)
class FeatureSpace:
    """The rows of a party as points, ordered by class.

    A position is a number from 0 to n-1 in this order. Targets that are not labels (floating, or several per row) form
    one class.
    """

    order: RowIndices  # [n] the party's row at each position
    class_slices: tuple[slice, ...]  # the positions of each class, by rising labels
    compute_points: Callable[[], Tensor]  # the points [n, d], in the party's order; called at most once

    @classmethod
    def from_targets(cls, y: Tensor, compute_points: Callable[[], Tensor]) -> FeatureSpace:
        labels = y.numpy() if has_class_labels(y) else np.zeros(len(y), dtype=np.int64)
        order = np.argsort(labels, kind="stable")
        ends = np.cumsum(np.unique(labels, return_counts=True)[1])
        class_slices = tuple(slice(int(begin), int(end)) for begin, end in zip((0, *ends[:-1]), ends, strict=True))
        return cls(order, class_slices, compute_points)

    @property
    def class_sizes(self) -> RowIndices:
        """Number of rows of each class."""
        return np.array([own.stop - own.start for own in self.class_slices])

    @cached_property
    def points(self) -> Tensor:
        """``[n, d]`` in float32, centered and scaled to at most 1, so that squares neither overflow nor underflow.

        The constructions do not depend on origin or unit; differences of squares in float32 do.
        """
        features = self.compute_points().detach().flatten(1)
        if len(features) != len(self.order):
            raise PartyError(f"There must be one point per row. Got {len(features)} points for {len(self.order)} rows.")
        scale = max(map(abs, map(float, torch.aminmax(features)))) if features.numel() else 0.0
        if not np.isfinite(scale):
            raise PartyError("Some points are not finite and have no distances. Correct the model or the features.")
        ordered = features[torch.from_numpy(self.order)].to(torch.promote_types(features.dtype, torch.float32))
        points = (ordered / (scale or 1.0)).to(torch.float32)
        return points.sub_(points.mean(0, dtype=torch.float64).to(torch.float32))

    @cached_property
    def squared_norms(self) -> Tensor:
        """|z|² of every point, ``[n]``."""
        return self.points.square().sum(1)

    @cached_property
    def class_indices(self) -> Tensor:
        """Index of the class at every position, ``[n]``."""
        return torch.repeat_interleave(torch.arange(len(self.class_slices)), torch.from_numpy(self.class_sizes))


def embedding_features(module: nn.Module, layer: str | None = None) -> Features:
    """Return a function from rows to activations: a named layer's output, or the last linear layer's input.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> embedding_features(net)(torch.zeros(5, 2), torch.zeros(5)).shape
    torch.Size([5, 3])
    """
    if layer is None:
        return partial(_activations, module, _last_linear(module), True)
    parts = dict(module.named_modules())
    if layer not in parts:
        raise unknown_name_error("layer", layer, [name for name in parts if name])
    return partial(_activations, module, parts[layer], False)


def gradient_features(module: nn.Module) -> Features:
    """Return a function that maps rows to gradients of the cross-entropy in the last linear layer.

    A point is (softmax - one-hot) ⊗ (activation, 1), the usual approximation of the whole gradient; its 1 is for the
    bias, if there is one. It has classes x (activations + 1) numbers, so a wide layer takes much memory.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> gradient_features(net)(torch.zeros(5, 2), torch.zeros(5, dtype=torch.int64)).shape
    torch.Size([5, 8])
    """
    return partial(_gradients, module, _last_linear(module))


FEATURE_SPACES: Mapping[str, Callable[[nn.Module], Features]] = MappingProxyType(
    {"embedding": embedding_features, "gradient": gradient_features}
)
"""Constructors of features from a model, by the name of the space."""


def _activations(module: nn.Module, layer: nn.Module, use_input: bool, x: Tensor, y: Tensor) -> Tensor:
    return _capture_layer(module, layer, use_input, x=x)[0]


def _gradients(module: nn.Module, head: nn.Linear, x: Tensor, y: Tensor) -> Tensor:
    activations, output = _capture_layer(module, head, True, x=x)
    is_classifier = output.shape[1:] == (head.out_features,) and activations.shape[1:] == (head.in_features,)
    if not (is_classifier and has_class_labels(y)):
        raise ModelError(
            "Gradient space needs class labels and a model whose last linear layer gives one number per class. "
            f"Got outputs {tuple(output.shape[1:])} and targets {tuple(y.shape[1:])} of {y.dtype}. "
            "Use space='embedding'."
        )
    if len(y) and not 0 <= int(y.min()) <= int(y.max()) < head.out_features:
        raise PartyError(f"The model knows the labels 0 to {head.out_features - 1}. Got {int(y.max())}.")
    errors = output.softmax(1) - functional.one_hot(y, head.out_features)  # [n, classes]
    if head.bias is not None:
        activations = torch.cat([activations, activations.new_ones(len(activations), 1)], 1)
    return torch.einsum("nc,nh->nch", errors, activations).flatten(1)


def _last_linear(module: nn.Module) -> nn.Linear:
    layers = [part for part in module.modules() if isinstance(part, nn.Linear)]
    if not layers:
        raise ModelError(
            f"{type(module).__name__} has no linear layer whose input could be used. Name a layer: "
            "embedding_features(module, layer)."
        )
    return layers[-1]


@torch.no_grad()
def _capture_layer(module: nn.Module, layer: nn.Module, use_input: bool, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return a layer's input (or its output) and the module's output, for every row."""
    captured = list[Tensor]()
    outputs = list[Tensor]()

    def capture(_: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        captured.append((inputs[0] if use_input else output).flatten(1).clone())

    handle = layer.register_forward_hook(capture)
    try:
        with _eval_mode(module):
            for part in torch.split(x, _BATCH):
                outputs.append(module(part.clone()))  # a module may write into its input
    finally:
        handle.remove()
    if len(captured) != len(outputs):
        name = type(layer).__name__
        raise ModelError(
            f"The layer ({name}) ran {len(captured)} times in {len(outputs)} passes. Name one that runs once per pass."
        )
    return torch.cat(captured), torch.cat(outputs)


@contextmanager
def _eval_mode(module: nn.Module) -> Iterator[None]:
    before = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in before:
            part.training = training
