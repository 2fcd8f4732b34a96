"""Layers whose gradient autograd finds, one operation at a time; and which operation computes which layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .layers import FLAT, Bound, Linear, Operation, Place, Reshape, Value, Views
from .max_pooling import Halving, halves
from .reproducible_elementwise import Evened


@dataclass(frozen=True)
class Recorded:
    """Any function of (inputs, parameters) as tensors, whose gradient autograd finds."""

    function: Callable[..., Tensor]
    lead: int
    names: tuple[str, ...] = ()
    fixed: int = 0  # how many of its inputs, counted from the last, have no gradient

    def bind(self, w: Views, place: Place, wanted: bool) -> Bound:
        return _BoundRecorded(self, w, place, wanted)


class _BoundRecorded:
    def __init__(self, recorded: Recorded, w: Views, place: Place, wanted: bool) -> None:
        self._recorded, self._place, self._wanted = recorded, place, wanted
        self._parameters = [_leaf(w[name]) for name in recorded.names]

    def forward(self, *inputs: Value) -> Value:
        tensors = [torch.from_numpy(value) for value in inputs] if self._recorded.lead else list(inputs)
        moving = len(tensors) - self._recorded.fixed
        self._inputs = [_leaf(tensor) for tensor in tensors[:moving]] if self._wanted else tensors[:moving]
        with torch.enable_grad():
            self._output = self._recorded.function(*self._inputs, *tensors[moving:], *self._parameters)
        output = self._output.detach()
        return output.numpy() if self._recorded.lead else output

    def backward(self, slope: Value) -> Sequence[Value]:
        chosen = [*(self._inputs if self._wanted else []), *self._parameters]
        if not chosen:
            return []
        along = torch.from_numpy(slope) if self._recorded.lead else slope
        with torch.enable_grad():
            found = torch.autograd.grad(self._output, chosen, along, allow_unused=True, materialize_grads=True)
        first = len(found) - len(self._recorded.names)
        for name, gradient in zip(self._recorded.names, found[first:], strict=True):
            self._place.put(name, gradient)
        return [one.numpy() for one in found[:first]] if self._recorded.lead else found[:first]


def _leaf(tensor: Tensor) -> Tensor:
    # .data, because a step at once moves other layers of the same row, and autograd would take that for a change of
    # this one; a layer itself moves only after its gradient is known
    return tensor.data.requires_grad_(tensor.is_floating_point())


@dataclass(frozen=True)
class Folded:
    """A function of samples: the party axis is folded into the batch."""

    function: Callable[..., Tensor]

    def __call__(self, x: Tensor) -> Tensor:
        output = self.function(x.flatten(0, 1))
        return output.view(*x.shape[:2], *output.shape[1:])


@dataclass(frozen=True)
class PartyByParty:
    """A function of (inputs, parameters) of one party, for each in turn.

    A convolution goes this way: it is large enough by itself, and a grouped one over all parties is rarely faster and
    often three times slower (784 inputs, 8 to 64 channels, one thread).
    """

    function: Callable[..., Tensor]

    def __call__(self, *stacks: Tensor) -> Tensor:
        return torch.stack([self.function(*parts) for parts in zip(*stacks, strict=True)])


@dataclass(frozen=True)
class Elementwise:
    """A function of each number by itself: the party axis makes no difference to it."""

    function: Callable[..., Tensor]
    options: dict[str, Any] = field(default_factory=dict)
    rest: tuple[Any, ...] = ()  # what it is given behind its inputs

    def __call__(self, *inputs: Tensor) -> Tensor:
        return self.function(*inputs, *self.rest, **self.options)


@dataclass(frozen=True)
class Normalised:
    """Layer normalisation, its scale and shift a party's own."""

    shape: tuple[int, ...]
    epsilon: float
    lead: int

    def __call__(self, x: Tensor, scale: Tensor | None = None, shift: Tensor | None = None) -> Tensor:
        output = functional.layer_norm(x, self.shape, eps=self.epsilon)
        between = output.ndim - self.lead - len(self.shape)
        beside = (*output.shape[: self.lead], *[1] * between, *self.shape)  # [K, 1, ..., shape]
        if scale is not None:
            output = output * scale.view(beside)
        return output if shift is None else output + shift.view(beside)


_SMOOTH = (nn.Tanh, nn.Sigmoid, nn.GELU, nn.ELU, nn.LeakyReLU, nn.SiLU, nn.Softplus, nn.Identity)
_POOLS = (nn.MaxPool1d, nn.MaxPool2d, nn.AvgPool1d, nn.AvgPool2d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d)


POOL = ("kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")
"""The settings of a max pool, in the order of its arguments."""


def operation_of(module: nn.Module, prefix: str, lead: int) -> Operation | None:
    """What computes a layer, its parameters named ``prefix``…; None where no way is known."""
    brought: Callable[[str, int], Operation] | None = getattr(module, "operation", None)
    if brought is not None:
        return brought(prefix, lead)
    names = tuple(prefix + name for name, _ in module.named_parameters())
    if type(module) is nn.Linear:
        return Linear(names[0], names[1] if module.bias is not None else None, lead)
    if type(module) is nn.Flatten:
        return Reshape(FLAT, lead) if module.start_dim == 1 and module.end_dim == -1 else None
    if type(module) is nn.Unflatten:
        return Reshape((None, *module.unflattened_size), lead) if module.dim == 1 else None
    if type(module) is nn.LayerNorm:
        return Recorded(Normalised(module.normalized_shape, module.eps, lead), lead, names)
    if type(module) in _SMOOTH:
        return Recorded(Evened(module) if lead else module, lead)
    if type(module) is nn.MaxPool2d and halves({name: getattr(module, name) for name in POOL}):
        return Halving(lead)
    function = _of_one_party(module)
    if function is None:
        return None
    by_samples = type(module) in _POOLS
    return Recorded((Folded if by_samples else PartyByParty)(function) if lead else function, lead, names)


def _of_one_party(module: nn.Module) -> Callable[..., Tensor] | None:
    """A layer as a function of one party's (batch, parameters)."""
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

    def convolved(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return function(x, weight, bias, **settings)

    return convolved
