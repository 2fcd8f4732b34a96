"""Operations of common layers on a whole stack of parties, forward and backward.

Values are ``[K, batch, ...]`` and parameters ``[K, ...]``: one leading axis for the parties everywhere (``lead`` = 1),
or no such axis where parties are computed one by one (``lead`` = 0). Stacks are numpy arrays: numpy starts an operation
in half the time and multiplies thin matrices in a third of it. A large single model uses torch tensors, whose products
are faster.

Cheap operations (a small matrix product, a ReLU) have explicit gradients, because recording them would cost more than
computing them. Everything else is recorded by autograd, one operation at a time (see `autograd_layers`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Views: TypeAlias = Mapping[str, Tensor]
"""Tensors of a stack by name, ``[K, ...]`` each."""

Array: TypeAlias = NDArray[Any]


@dataclass(frozen=True)
class GradientTarget:
    """The destination of a gradient: copied, or added times ``scale``. Scale -η on the parameters is a step."""

    tensors: Views
    scale: float = 1.0


@dataclass(frozen=True)
class OperationTarget:
    """The target of one operation; it accumulates if a later call of the same layer has written already."""

    target: GradientTarget
    accumulate: bool

    def write(self, name: str, gradient: Tensor) -> None:
        if self.accumulate:
            self.target.tensors[name].add_(gradient, alpha=self.target.scale)
        else:
            self.target.tensors[name].copy_(gradient)


Value: TypeAlias = Any
"""A tensor of one party, or a numpy array of a stack of them."""


class Operation(Protocol):
    """One step of a traced module."""

    def bind(self, w: Views, target: OperationTarget, needs_input_gradient: bool) -> BoundOperation:
        """Return the operation bound to its parameters, with or without the gradient of its inputs."""


class BoundOperation(Protocol):
    """An operation with its parameters: for each batch, one forward call and then one backward call."""

    def forward(self, *inputs: Value) -> Value: ...

    def backward(self, output_gradient: Value) -> Sequence[Value]:
        """Write the gradients of the parameters, and return those of the inputs if they are needed."""


@dataclass(frozen=True)
class Linear:
    """x·Wᵀ + b."""

    weight: str
    bias: str | None
    lead: int

    def bind(self, w: Views, target: OperationTarget, needs_input_gradient: bool) -> BoundOperation:
        return (_StackedLinear if self.lead else _SingleLinear)(self, w, target, needs_input_gradient)


class _SingleLinear:
    """One party, in torch: x [n, in], W [out, in]."""

    def __init__(self, names: Linear, w: Views, target: OperationTarget, needs_input_gradient: bool) -> None:
        self._destination = target
        self._needs_input_gradient = needs_input_gradient
        self._scale = target.target.scale
        self._weight = w[names.weight]
        self._transposed = w[names.weight].t()
        self._target = target.target.tensors[names.weight]
        self._bias = None if names.bias is None else w[names.bias]
        self._bias_target = None if names.bias is None else target.target.tensors[names.bias]
        self._ones: Tensor | None = None

    def forward(self, *inputs: Tensor) -> Tensor:
        (x,) = inputs
        if x.ndim > 2:  # more axes than the batch: all of them are samples
            return self.forward(x.flatten(0, -2)).view(*x.shape[:-1], -1)
        self._x = x
        return torch.mm(x, self._transposed) if self._bias is None else torch.addmm(self._bias, x, self._transposed)

    def backward(self, output_gradient: Tensor) -> Sequence[Tensor]:
        if output_gradient.ndim > 2:
            return [one.view(*output_gradient.shape[:-1], -1) for one in self.backward(output_gradient.flatten(0, -2))]
        # before a fused step changes the weight
        input_gradients = [torch.mm(output_gradient, self._weight)] if self._needs_input_gradient else []
        if self._destination.accumulate:
            self._target.addmm_(output_gradient.t(), self._x, alpha=self._scale)
        else:
            torch.mm(output_gradient.t(), self._x, out=self._target)
        if self._bias_target is not None and self._destination.accumulate:
            if self._ones is None or len(self._ones) != len(output_gradient):
                self._ones = output_gradient.new_ones(len(output_gradient))
            self._bias_target.addmv_(output_gradient.t(), self._ones, alpha=self._scale)
        elif self._bias_target is not None:
            torch.sum(output_gradient, 0, out=self._bias_target)
        return input_gradients


class _StackedLinear:
    """Many parties, in numpy: x [K, n, in], W [K, out, in]."""

    def __init__(self, names: Linear, w: Views, target: OperationTarget, needs_input_gradient: bool) -> None:
        self._destination = target
        self._needs_input_gradient = needs_input_gradient
        self._scale = target.target.scale
        self._weight = w[names.weight].numpy()
        self._transposed = self._weight.transpose(0, 2, 1)
        self._target = target.target.tensors[names.weight].numpy()
        self._bias = None if names.bias is None else w[names.bias].numpy()[:, None]
        self._bias_target = None if names.bias is None else target.target.tensors[names.bias].numpy()

    def forward(self, *inputs: Array) -> Array:
        (x,) = inputs
        if x.ndim > 3:
            return self.forward(x.reshape(len(x), -1, x.shape[-1])).reshape(*x.shape[:-1], -1)
        self._x = x
        if self._bias is not None and not _is_thin(x, self._transposed):
            return torch.baddbmm(*map(torch.from_numpy, (self._bias, x, self._transposed))).numpy()
        output = product(x, self._transposed)
        if self._bias is not None:
            output += self._bias
        return output

    def backward(self, output_gradient: Array) -> Sequence[Array]:
        if output_gradient.ndim > 3:
            flat = self.backward(output_gradient.reshape(len(output_gradient), -1, output_gradient.shape[-1]))
            return [one.reshape(*output_gradient.shape[:-1], -1) for one in flat]
        # before a fused step changes the weight
        input_gradients = [product(output_gradient, self._weight)] if self._needs_input_gradient else []
        transposed = output_gradient.transpose(0, 2, 1)
        if self._destination.accumulate:
            add_product(self._target, self._scale, transposed, b=self._x)
        else:
            product(transposed, self._x, self._target)
        if self._bias_target is not None and self._destination.accumulate:
            self._bias_target += self._scale * output_gradient.sum(1)
        elif self._bias_target is not None:
            output_gradient.sum(1, out=self._bias_target)
        return input_gradients


def product(a: Array, b: Array, out: Array | None = None) -> Array:
    """Return a·b matrix by matrix; the algorithm depends on the shape of one matrix, never on their number.

    Thin matrices, as in the last layer of a classifier, use numpy, which does not split such small work among threads.
    """
    if _is_thin(a, b):
        thin: Array = np.matmul(a, b, out=out)
        return thin
    buffer = None if out is None else torch.from_numpy(out)
    return torch.bmm(torch.from_numpy(a), torch.from_numpy(b), out=buffer).numpy()


def add_product(total: Array, scale: float, a: Array, b: Array) -> None:
    """Add scale·a·b to ``total``, matrix by matrix; a wide product needs no memory of its own."""
    if _is_thin(a, b):
        total += scale * np.matmul(a, b)
    else:
        torch.from_numpy(total).baddbmm_(torch.from_numpy(a), torch.from_numpy(b), alpha=scale)


def _is_thin(a: Array, b: Array) -> bool:
    rows = int(a.shape[1])
    inner = int(a.shape[2])
    columns = int(b.shape[2])
    return 1 < min(rows, inner, columns) <= 16 and rows * inner * columns <= 2**18


_LARGE_RELU = 2**13


@dataclass(frozen=True)
class Relu:
    """max(x, 0)."""

    lead: int
    in_place: bool  # nothing else reads x, so it need not be kept, and more fits into the cache

    def bind(self, w: Views, target: OperationTarget, needs_input_gradient: bool) -> BoundOperation:
        return _StackedRelu(self.in_place) if self.lead else _SingleRelu(self.in_place)


class _SingleRelu:
    def __init__(self, in_place: bool) -> None:
        self._relu = torch.relu_ if in_place else torch.relu

    def forward(self, *inputs: Tensor) -> Tensor:
        self._output = self._relu(inputs[0])
        return self._output

    def backward(self, output_gradient: Tensor) -> Sequence[Tensor]:
        return [torch.ops.aten.threshold_backward(output_gradient, self._output, 0)]


class _StackedRelu:
    """ReLU of a stack: torch for large arrays, numpy for small ones, with equal results."""

    def __init__(self, in_place: bool) -> None:
        self._in_place = in_place
        self._single = _SingleRelu(in_place)

    def forward(self, *inputs: Array) -> Array:
        if inputs[0].size >= _LARGE_RELU:
            self._output: Array = self._single.forward(torch.from_numpy(inputs[0])).numpy()
        else:
            self._output = np.maximum(inputs[0], 0, out=inputs[0] if self._in_place else None)
        return self._output

    def backward(self, output_gradient: Array) -> Sequence[Array]:
        if output_gradient.size >= _LARGE_RELU:
            return [one.numpy() for one in self._single.backward(torch.from_numpy(output_gradient))]
        return [output_gradient * (self._output > 0)]


@dataclass(frozen=True)
class Reshape:
    """A new shape for each party's batch; None is the length of the batch."""

    shape: tuple[int | None, ...]
    lead: int

    def bind(self, w: Views, target: OperationTarget, needs_input_gradient: bool) -> BoundOperation:
        return _BoundReshape(self)


class _BoundReshape:
    def __init__(self, reshape: Reshape) -> None:
        self._reshape = reshape

    def forward(self, *inputs: Value) -> Value:
        self._input_shape = inputs[0].shape
        lead = self._reshape.lead
        after = (self._input_shape[lead] if size is None else size for size in self._reshape.shape)
        return inputs[0].reshape(*self._input_shape[:lead], *after)

    def backward(self, output_gradient: Value) -> Sequence[Value]:
        return [output_gradient.reshape(self._input_shape)]


FLAT = (None, -1)
"""The shape with all axes after the batch flattened."""
