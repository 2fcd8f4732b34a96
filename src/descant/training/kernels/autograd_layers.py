"""Layers differentiated by autograd, one operation at a time; `operation_of` finds the operation of a torch layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .layers import FLAT, BoundOperation, Linear, Operation, OperationTarget, Reshape, Value, Views
from .max_pooling import MaxPool2x2, is_2x2_pooling
from .reproducible_elementwise import PaddedElementwise


@dataclass(frozen=True)
class AutogradOperation:
    """Any function of (inputs, parameters) as tensors, differentiated by autograd."""

    function: Callable[..., Tensor]
    lead: int
    names: tuple[str, ...] = ()
    fixed_inputs: int = 0  # number of inputs, counted from the last, that have no gradient

    def bind(self, w: Views, target: OperationTarget, needs_input_gradient: bool) -> BoundOperation:
        return _BoundAutograd(self, w, target, needs_input_gradient=needs_input_gradient)


class _BoundAutograd:
    def __init__(
        self, operation: AutogradOperation, w: Views, target: OperationTarget, needs_input_gradient: bool
    ) -> None:
        self._operation = operation
        self._target = target
        self._needs_input_gradient = needs_input_gradient
        self._parameters = [_leaf(w[name]) for name in operation.names]

    def forward(self, *inputs: Value) -> Value:
        tensors = [torch.from_numpy(value) for value in inputs] if self._operation.lead else list(inputs)
        differentiable = len(tensors) - self._operation.fixed_inputs
        self._inputs = (
            [_leaf(tensor) for tensor in tensors[:differentiable]]
            if self._needs_input_gradient
            else tensors[:differentiable]
        )
        with torch.enable_grad():
            self._output = self._operation.function(*self._inputs, *tensors[differentiable:], *self._parameters)
        output = self._output.detach()
        return output.numpy() if self._operation.lead else output

    def backward(self, output_gradient: Value) -> Sequence[Value]:
        leaves = [*(self._inputs if self._needs_input_gradient else []), *self._parameters]
        if not leaves:
            return []
        along_output = torch.from_numpy(output_gradient) if self._operation.lead else output_gradient
        with torch.enable_grad():
            gradients = torch.autograd.grad(
                self._output, leaves, along_output, allow_unused=True, materialize_grads=True
            )
        first = len(gradients) - len(self._operation.names)
        for name, gradient in zip(self._operation.names, gradients[first:], strict=True):
            self._target.write(name, gradient)
        return [one.numpy() for one in gradients[:first]] if self._operation.lead else gradients[:first]


def _leaf(tensor: Tensor) -> Tensor:
    # .data, because a fused step changes other layers of the same row, and autograd would count that as a change of
    # this one; a layer itself changes only after its gradient is known
    return tensor.data.requires_grad_(tensor.is_floating_point())


@dataclass(frozen=True)
class FoldedBatch:
    """A function of samples: the party axis is folded into the batch."""

    function: Callable[..., Tensor]

    def __call__(self, x: Tensor) -> Tensor:
        output = self.function(x.flatten(0, 1))
        return output.view(*x.shape[:2], *output.shape[1:])


@dataclass(frozen=True)
class PartyByParty:
    """A function of (inputs, parameters) of one party, applied to each party in turn.

    Convolutions are computed like this: one party's convolution is large enough by itself to be efficient, and a
    grouped convolution over all parties is rarely faster and often three times slower (784 inputs, 8 to 64 channels,
    one thread).
    """

    function: Callable[..., Tensor]

    def __call__(self, *stacks: Tensor) -> Tensor:
        return torch.stack([self.function(*parts) for parts in zip(*stacks, strict=True)])


@dataclass(frozen=True)
class Elementwise:
    """An element-wise function, which ignores the party axis."""

    function: Callable[..., Tensor]
    options: dict[str, Any] = field(default_factory=dict)
    extra_arguments: tuple[Any, ...] = ()  # passed after the inputs

    def __call__(self, *inputs: Tensor) -> Tensor:
        return self.function(*inputs, *self.extra_arguments, **self.options)


@dataclass(frozen=True)
class StackedLayerNorm:
    """Layer normalization with a scale and shift per party."""

    shape: tuple[int, ...]
    epsilon: float
    lead: int

    def __call__(self, x: Tensor, scale: Tensor | None = None, shift: Tensor | None = None) -> Tensor:
        output = functional.layer_norm(x, self.shape, eps=self.epsilon)
        middle_axes = output.ndim - self.lead - len(self.shape)
        broadcast_shape = (*output.shape[: self.lead], *[1] * middle_axes, *self.shape)  # [K, 1, ..., shape]
        if scale is not None:
            output = output * scale.view(broadcast_shape)
        return output if shift is None else output + shift.view(broadcast_shape)


_ELEMENTWISE = (nn.Tanh, nn.Sigmoid, nn.GELU, nn.ELU, nn.LeakyReLU, nn.SiLU, nn.Softplus, nn.Identity)
_POOLS = (nn.MaxPool1d, nn.MaxPool2d, nn.AvgPool1d, nn.AvgPool2d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d)


POOL_OPTIONS = ("kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")
"""The options of a max pool, in the order of its arguments."""


def operation_of(module: nn.Module, prefix: str, lead: int) -> Operation | None:
    """Return the operation that computes a layer, whose parameters begin with ``prefix``; None if unsupported."""
    custom: Callable[[str, int], Operation] | None = getattr(module, "operation", None)
    if custom is not None:
        return custom(prefix, lead)
    names = tuple(prefix + name for name, _ in module.named_parameters())
    if type(module) is nn.Linear:
        return Linear(names[0], names[1] if module.bias is not None else None, lead)
    if type(module) is nn.Flatten:
        return Reshape(FLAT, lead) if module.start_dim == 1 and module.end_dim == -1 else None
    if type(module) is nn.Unflatten:
        return Reshape((None, *module.unflattened_size), lead) if module.dim == 1 else None
    if type(module) is nn.LayerNorm:
        return AutogradOperation(StackedLayerNorm(module.normalized_shape, module.eps, lead), lead, names)
    if type(module) in _ELEMENTWISE:
        return AutogradOperation(PaddedElementwise(module) if lead else module, lead)
    if type(module) is nn.MaxPool2d and is_2x2_pooling({name: getattr(module, name) for name in POOL_OPTIONS}):
        return MaxPool2x2(lead)
    function = _party_function(module)
    if function is None:
        return None
    by_samples = type(module) in _POOLS
    return AutogradOperation((FoldedBatch if by_samples else PartyByParty)(function) if lead else function, lead, names)


def _party_function(module: nn.Module) -> Callable[..., Tensor] | None:
    """Return a layer as a function of one party's (batch, parameters)."""
    if (type(module) is nn.Conv1d or type(module) is nn.Conv2d) and module.padding_mode == "zeros":
        return _convolution(module)
    if type(module) is nn.Embedding:
        plain = module.padding_idx is None and module.max_norm is None
        plain = plain and not module.sparse and not module.scale_grad_by_freq
        return functional.embedding if plain else None
    return module if type(module) in _POOLS and not getattr(module, "return_indices", False) else None


def _convolution(module: nn.Conv1d | nn.Conv2d) -> Callable[..., Tensor]:
    function: Callable[..., Tensor] = functional.conv2d if isinstance(module, nn.Conv2d) else functional.conv1d
    settings = {name: getattr(module, name) for name in ("stride", "padding", "dilation", "groups")}

    def convolve(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return function(x, weight, bias, **settings)

    return convolve
