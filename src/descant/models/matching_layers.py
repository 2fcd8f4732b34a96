"""Matching layers: inverse layers that reconstruct the activations of another model, and the matching loss.

Mostafa (2019), Robust federated learning through representation matching and adaptive hyper-parameters. Each
inverse layer undoes one layer of the model between two points: it maps the layer's output to the shape of the layer's
input. Trainable ones (for a linear layer or a convolution) own private columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..core.algorithm import LossContext
from ..core.settings import setting

Shape: TypeAlias = tuple[int, ...]
Reduction: TypeAlias = Literal["mean", "sum"]
CACHE_LINE = 16
"""float32 numbers per cache line."""


class InverseLayer(Protocol):
    """The inverse of one layer."""

    @property
    def input_point(self) -> str:
        """The point that is the layer's input."""

    @property
    def parameter_shapes(self) -> tuple[Shape, ...]:
        """Shapes of its private columns: none, or a weight and a bias."""

    @property
    def fan_in(self) -> int:
        """The number of inputs of each of its outputs."""

    def __call__(self, y: Tensor, layer_input: Tensor, *parameters: Tensor) -> Tensor:
        """Map the layer's output to the shape of its input in the trained model."""


@dataclass(frozen=True)
class InverseLinear:
    """A linear layer from the outputs of the model's linear layer to its inputs."""

    input_point: str
    inputs: int
    outputs: int

    @property
    def parameter_shapes(self) -> tuple[Shape, ...]:
        return (self.inputs, self.outputs), (self.inputs,)

    @property
    def fan_in(self) -> int:
        return self.outputs

    def __call__(self, y: Tensor, layer_input: Tensor, *parameters: Tensor) -> Tensor:
        return functional.linear(y, *parameters)


@dataclass(frozen=True)
class InverseConvolution:
    """A transposed convolution with the kernel, stride and padding of the model's convolution."""

    input_point: str
    inputs: int
    outputs: int
    kernel: Shape
    stride: Shape
    padding: Shape
    dilation: Shape
    groups: int

    @classmethod
    def from_layer(cls, input_point: str, layer: nn.Conv1d | nn.Conv2d) -> InverseConvolution:
        padding = layer.padding
        if isinstance(padding, str):  # "same" requires stride 1, and "valid" is no padding
            reach = zip(layer.dilation, layer.kernel_size, strict=True)
            padding = tuple(d * (k - 1) // 2 if padding == "same" else 0 for d, k in reach)
        parts = (layer.kernel_size, layer.stride, padding, layer.dilation, layer.groups)
        return cls(input_point, layer.in_channels, layer.out_channels, *parts)

    @property
    def parameter_shapes(self) -> tuple[Shape, ...]:
        return (self.outputs, self.inputs // self.groups, *self.kernel), (self.inputs,)

    @property
    def fan_in(self) -> int:
        return self.outputs // self.groups * math.prod(self.kernel)

    def output_padding(self, y: Tensor, layer_input: Tensor) -> list[int]:
        """Return the numbers of lines at the far edges that the stride skips."""
        reach = zip(
            y.shape[2:], self.stride, self.padding, self.dilation, self.kernel, layer_input.shape[2:], strict=True
        )
        return [max(0, to - ((n - 1) * s - 2 * p + d * (k - 1) + 1)) for n, s, p, d, k, to in reach]

    def crop(self, output: Tensor, layer_input: Tensor) -> Tensor:
        """Crop the output to the size of the layer's input: "same" padding with an even kernel adds a row (column)."""
        if output.shape[2:] == layer_input.shape[2:]:
            return output
        return output[(slice(None), slice(None), *map(slice, layer_input.shape[2:]))]

    def __call__(self, y: Tensor, layer_input: Tensor, *parameters: Tensor) -> Tensor:
        line = functional.conv_transpose1d
        plane = functional.conv_transpose2d
        function: Callable[..., Tensor] = line if len(self.kernel) == 1 else plane
        parts = (self.stride, self.padding, self.output_padding(y, layer_input), self.groups, self.dilation)
        return self.crop(function(y, *parameters, *parts), layer_input)


@dataclass(frozen=True)
class InverseMaxPool:
    """Unpooling at the positions of the trained model's maxima (Zhao et al., 2015), with 0 elsewhere."""

    input_point: str
    spatial_dims: int  # 2 for images, 1 for sequences
    options: tuple[tuple[str, Any], ...]  # of the model's pool

    @property
    def parameter_shapes(self) -> tuple[Shape, ...]:
        return ()

    @property
    def fan_in(self) -> int:
        return 0

    def __call__(self, y: Tensor, layer_input: Tensor, *parameters: Tensor) -> Tensor:
        pool = functional.max_pool2d if self.spatial_dims == 2 else functional.max_pool1d
        _, switches = pool(layer_input.detach(), **dict(self.options), return_indices=True)
        flat = y.new_zeros(*y.shape[:2], math.prod(layer_input.shape[2:]))
        return flat.scatter(2, switches.flatten(2), y.flatten(2)).view(layer_input.shape)


@dataclass(frozen=True)
class InverseReshape:
    """The inverse of a reshape."""

    input_point: str

    @property
    def parameter_shapes(self) -> tuple[Shape, ...]:
        return ()

    @property
    def fan_in(self) -> int:
        return 0

    def __call__(self, y: Tensor, layer_input: Tensor, *parameters: Tensor) -> Tensor:
        return y.reshape(layer_input.shape)


@dataclass(frozen=True)
class MatchingLayer:
    """One matching layer f_j, from a point of the trained model to the previous point of the received model."""

    from_point: str
    to_point: str
    inverse_layers: tuple[InverseLayer, ...]


@dataclass(frozen=True)
class MatchingLoss:
    """The matching loss Σ_j ‖f_j(a_{j+1}(x; w_i); θ_j) - a_j(x; w)‖², eq. (1).

    It reconstructs the received model's activations from those of the trained model. "mean" averages over the numbers
    of a tensor, "sum" adds them per sample as eq. (1) prints it (ERRATA 5); both average over the batch. Solvers
    recognize this loss term and use its explicit gradient wherever the model has a kernel.
    """

    layers: tuple[MatchingLayer, ...]
    reduction: Reduction = setting("mean", "the reduction of the squares (ERRATA 5)", one_of=("mean", "sum"))
    first_gap: int = 0  # columns before θ, so that it begins at a cache line, which makes products faster

    @cached_property
    def _shapes(self) -> list[Shape]:
        return [shape for link in self.layers for back in link.inverse_layers for shape in back.parameter_shapes]

    @cached_property
    def _sizes(self) -> list[int]:
        """Widths of alternating gaps and tensors."""
        sizes = [math.prod(shape) for shape in self._shapes]
        gaps = [self.first_gap, *(-size % CACHE_LINE for size in sizes)]
        return [size for pair in zip(gaps, [*sizes, 0], strict=True) for size in pair]

    @property
    def width(self) -> int:
        """The number of private columns."""
        return sum(self._sizes)

    def split(self, private: Tensor) -> Iterator[Tensor]:
        """Yield the tensors of θ ``[..., width]``."""
        parts = torch.split_with_sizes(private, self._sizes, dim=-1)[1:-1:2]
        for part, shape in zip(parts, self._shapes, strict=True):
            yield part.view(*private.shape[:-1], *shape)

    def square_weight(self, shape: Shape) -> float:
        """Return the weight of a square in a tensor of this shape, ``[batch, ...]``."""
        return 1 / (math.prod(shape) if self.reduction == "mean" else shape[0])

    def __call__(self, context: LossContext) -> Tensor:
        private = self.split(context.private_params)
        total = context.output.new_zeros(())
        for link in self.layers:
            value = context.features[link.from_point]
            target = context.received_features[link.to_point]
            for back in link.inverse_layers:
                value = back(value, context.features[back.input_point], *(next(private) for _ in back.parameter_shapes))
            total = total + self.square_weight(target.shape) * (value - target).square().sum()
        return total
