"""The explicit gradient of representation matching: matching layers are computed like layers of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ...models.matching_layers import (
    InverseConvolution,
    InverseLayer,
    InverseLinear,
    InverseMaxPool,
    InverseReshape,
    MatchingLoss,
)
from . import layers
from .autograd_layers import AutogradOperation, PartyByParty
from .layers import GradientTarget, Operation, OperationTarget, Value
from .max_pooling import MaxUnpool2x2, is_2x2_pooling

# channels up to which torch's general algorithm is faster than oneDNN's: 20 ms for 27 at 3, 12 for 24 at 1
MAX_FEW_CHANNELS = 8


@dataclass(frozen=True)
class _ToFewChannels:
    """The transposed convolution of an inverse layer by matrix products."""

    back: InverseConvolution

    def __call__(self, y: Tensor, below: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        parts = (self.back.stride, self.back.padding, self.back.output_padding(y, below), self.back.dilation)
        output: Tensor = torch.ops.aten.slow_conv_transpose2d(y, weight, self.back.kernel, bias, *parts)
        return self.back.crop(output, below)


def _reverse_operation(layer: InverseLayer, names: tuple[str, ...], lead: int) -> Operation:
    """Return the operation of an inverse layer, whose private columns are called ``names``."""
    if isinstance(layer, InverseLinear):
        return layers.Linear(names[0], names[1], lead)
    if isinstance(layer, InverseMaxPool) and layer.spatial_dims == 2 and is_2x2_pooling(dict(layer.options)):
        return MaxUnpool2x2(lead)
    function: Callable[..., Tensor] = layer
    if (
        isinstance(layer, InverseConvolution)
        and layer.inputs <= MAX_FEW_CHANNELS
        and layer.groups == 1
        and len(layer.kernel) == 2
    ):
        function = _ToFewChannels(layer)
    is_stackable = not lead or isinstance(layer, InverseReshape)  # a reshape works with a party axis, too
    return AutogradOperation(function if is_stackable else PartyByParty(function), lead, names, fixed_inputs=1)


class BoundMatching:
    """A matching term bound to a stack; it writes the gradients of its private columns."""

    def __init__(self, matching: MatchingLoss, columns: Tensor, gradient: Tensor, scale: float, lead: int) -> None:
        self._matching = matching
        self._lead = lead
        w, gradient_views = (
            {str(i): part for i, part in enumerate(matching.split(stack if lead else stack[0]))}
            for stack in (columns, gradient)
        )
        operation_target = OperationTarget(GradientTarget(gradient_views, scale), scale != 1)
        count = 0
        self._paths = []
        for link in matching.layers:
            path = []
            for back in link.inverse_layers:
                names = tuple(str(count + i) for i in range(len(back.parameter_shapes)))
                count += len(names)
                path.append((_reverse_operation(back, names, lead).bind(w, operation_target, True), back))
            self._paths.append((link, path))

    def __call__(
        self, features: Mapping[str, Value], received_features: Mapping[str, Value], strengths: Tensor
    ) -> dict[str, Value]:
        """Return the gradient along the points of the trained model; ``strengths [K]``."""
        point_gradients: dict[str, Value] = {}
        for link, path in self._paths:
            value = features[link.from_point]
            for bound, back in path:
                value = bound.forward(value, *([] if isinstance(back, InverseLinear) else [features[back.input_point]]))
            # without another layer, the value may share the model's memory
            is_copy = any(not isinstance(back, InverseReshape) for back in link.inverse_layers)
            gradient = self._square_gradient(
                value if is_copy else value + 0, received_features[link.to_point], strengths
            )
            for bound, _ in reversed(path):
                (gradient,) = bound.backward(gradient)
            point_gradients[link.from_point] = (
                point_gradients[link.from_point] + gradient if link.from_point in point_gradients else gradient
            )
        return point_gradients

    def _square_gradient(self, rebuilt: Value, target: Value, strengths: Tensor) -> Value:
        """Overwrite ``rebuilt`` with the gradient of the squares: 2·strength·weight·(rebuilt - target)."""
        rebuilt -= target
        factor = strengths * 2 * self._matching.square_weight(target.shape[self._lead :])
        rebuilt *= factor.numpy().reshape(-1, *[1] * (rebuilt.ndim - 1)) if self._lead else factor[0]
        return rebuilt
