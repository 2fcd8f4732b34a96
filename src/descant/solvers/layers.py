"""The operations of common layers on a whole stack of parties, forwards and backwards.

Values are ``[K, batch, ...]`` and parameters ``[K, ...]``: one leading axis for the parties everywhere (``lead`` = 1),
or no such axis where parties go one by one (``lead`` = 0). What costs next to nothing by itself (a small matrix
product, a ReLU) has its gradient written out, because recording it would cost more than computing it; everything else
is recorded by autograd, one operation at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

Views: TypeAlias = Mapping[str, Tensor]
"""Tensors of a stack by their names, ``[K, ...]`` each."""


@dataclass(frozen=True)
class Into:
    """Where a gradient goes: put there, or added ``scale`` times. Added to the parameters -η times, it is a step."""

    tensors: Views
    scale: float = 1.0


@dataclass(frozen=True)
class Place:
    """The same for one operation; it is added where a later call of the same layer has put its own already."""

    into: Into
    add: bool

    def put(self, name: str, gradient: Tensor) -> None:
        if self.add:
            self.into.tensors[name].add_(gradient, alpha=self.into.scale)
        else:
            self.into.tensors[name].copy_(gradient)


class Operation(Protocol):
    """One step of a traced module."""

    def bind(self, w: Views, place: Place, wanted: bool) -> Bound:
        """The operation with its parameters; ``wanted``: whether the gradient of its inputs will be asked for."""


class Bound(Protocol):
    """An operation at work: forwards, and then backwards, as often as there are batches."""

    def forward(self, *inputs: Tensor) -> Tensor: ...

    def backward(self, slope: Tensor) -> Sequence[Tensor]:
        """Put the gradient of the parameters where it goes, and return that of the inputs if it is wanted."""


@dataclass(frozen=True)
class Linear:
    """x·Wᵀ + b."""

    weight: str
    bias: str | None = None

    def bind(self, w: Views, place: Place, wanted: bool) -> Bound:
        return _BoundLinear(self, w, place, wanted)


class _BoundLinear:
    def __init__(self, names: Linear, w: Views, place: Place, wanted: bool) -> None:
        self._place, self._wanted = place, wanted
        self._weight, self._turned = w[names.weight], w[names.weight].mT
        self._bias = None if names.bias is None else w[names.bias]
        self._bias_target = None if names.bias is None else place.into.tensors[names.bias]
        self._target, self._scale = place.into.tensors[names.weight], place.into.scale
        self._rank = self._weight.ndim

    def forward(self, *inputs: Tensor) -> Tensor:
        (x,) = inputs
        if x.ndim > self._rank:  # more axes than the batch: all of them are samples
            flat = self.forward(x.flatten(self._rank - 2, -2))
            return flat.view(*x.shape[:-1], -1)
        self._x = x  # [K, n, in], or [n, in]
        return product(x, self._turned, plus=self._bias)

    def backward(self, slope: Tensor) -> Sequence[Tensor]:
        if slope.ndim > self._rank:
            flat = self.backward(slope.flatten(self._rank - 2, -2))  # [K, n, out], or [n, out]
            return [one.view(*slope.shape[:-1], -1) for one in flat]
        before = [product(slope, self._weight)] if self._wanted else []  # before the weight may move
        if not self._place.add:
            product(slope.mT, self._x, self._target)
            if self._bias_target is not None:
                torch.sum(slope, -2, out=self._bias_target)
            return before
        step = self._target.addmm_ if self._rank == 2 else self._target.baddbmm_
        step(slope.mT, self._x, alpha=self._scale)
        if self._bias_target is not None:
            self._bias_target.add_(slope.sum(-2), alpha=self._scale)
        return before


def product(a: Tensor, b: Tensor, out: Tensor | None = None, plus: Tensor | None = None) -> Tensor:
    """a·b + plus matrix by matrix; how it is computed depends on the shape of one matrix, never on their number.

    Thin matrices in a stack, as at the top of every classifier, go by numpy: torch takes up to three times as long.
    """
    if a.ndim == 2:
        return torch.mm(a, b, out=out) if plus is None else torch.addmm(plus, a, b)
    (count, rows, inner), columns = a.shape, b.shape[2]
    thinnest = min(rows, inner, columns)
    if thinnest > 16 or thinnest == 1 or rows * inner * columns > 2**18 or a.device.type != "cpu":
        return torch.bmm(a, b, out=out) if plus is None else torch.baddbmm(plus.unsqueeze(1), a, b)
    if out is None:
        out = a.new_empty(count, rows, columns)
    np.matmul(a.numpy(), b.numpy(), out=out.numpy())
    return out if plus is None else out.add_(plus.unsqueeze(1))


class Relu:
    """max(x, 0)."""

    def bind(self, w: Views, place: Place, wanted: bool) -> Bound:
        return _BoundRelu()


class _BoundRelu:
    def forward(self, *inputs: Tensor) -> Tensor:
        self._output = torch.relu(inputs[0])
        return self._output

    def backward(self, slope: Tensor) -> Sequence[Tensor]:
        return [torch.ops.aten.threshold_backward(slope, self._output, 0)]


@dataclass(frozen=True)
class Reshape:
    """Another shape for each party's batch; None stands for the length of the batch."""

    shape: tuple[int | None, ...]
    lead: int

    def bind(self, w: Views, place: Place, wanted: bool) -> Bound:
        return _BoundReshape(self)


class _BoundReshape:
    def __init__(self, to: Reshape) -> None:
        self._to = to

    def forward(self, *inputs: Tensor) -> Tensor:
        self._before, lead = inputs[0].shape, self._to.lead
        after = (self._before[lead] if size is None else size for size in self._to.shape)
        return inputs[0].reshape(*self._before[:lead], *after)

    def backward(self, slope: Tensor) -> Sequence[Tensor]:
        return [slope.reshape(self._before)]


FLAT = (None, -1)
"""The shape in which all that is behind the batch is one axis."""


@dataclass(frozen=True)
class Recorded:
    """Any function of (inputs, parameters), whose gradient autograd finds."""

    function: Callable[..., Tensor]
    names: tuple[str, ...] = ()

    def bind(self, w: Views, place: Place, wanted: bool) -> Bound:
        return _BoundRecorded(self, w, place, wanted)


class _BoundRecorded:
    def __init__(self, recorded: Recorded, w: Views, place: Place, wanted: bool) -> None:
        self._function, self._names, self._place = recorded.function, recorded.names, place
        self._parameters = [_leaf(w[name]) for name in recorded.names]
        self._wanted = wanted

    def forward(self, *inputs: Tensor) -> Tensor:
        self._inputs = [_leaf(tensor) for tensor in inputs] if self._wanted else list(inputs)
        with torch.enable_grad():
            self._output = self._function(*self._inputs, *self._parameters)
        return self._output.detach()

    def backward(self, slope: Tensor) -> Sequence[Tensor]:
        chosen = [*(self._inputs if self._wanted else []), *self._parameters]
        if not chosen:
            return []
        with torch.enable_grad():
            found = torch.autograd.grad(self._output, chosen, slope, allow_unused=True, materialize_grads=True)
        first = len(found) - len(self._names)
        for name, gradient in zip(self._names, found[first:], strict=True):
            self._place.put(name, gradient)
        return found[:first]


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


def operation_of(module: nn.Module, prefix: str, lead: int) -> Operation | None:
    """What computes a layer, its parameters named ``prefix``…; None where no way is known."""
    names = tuple(prefix + name for name, _ in module.named_parameters())
    if type(module) is nn.Linear:
        return Linear(*names)
    if type(module) is nn.ReLU:
        return Relu()
    if type(module) is nn.Flatten:
        return Reshape(FLAT, lead) if module.start_dim == 1 and module.end_dim == -1 else None
    if type(module) is nn.Unflatten:
        return Reshape((None, *module.unflattened_size), lead) if module.dim == 1 else None
    if type(module) is nn.LayerNorm:
        return Recorded(Normalised(module.normalized_shape, module.eps, lead), names)
    if type(module) in _SMOOTH:
        return Recorded(module)
    function = _of_one_party(module)
    if function is None:
        return None
    by_samples = type(module) in _POOLS
    return Recorded((Folded if by_samples else PartyByParty)(function) if lead else function, names)


def _of_one_party(module: nn.Module) -> Callable[..., Tensor] | None:
    """A layer as a function of one party's (batch, parameters)."""
    if (type(module) is nn.Conv1d or type(module) is nn.Conv2d) and module.padding_mode == "zeros":
        return _convolution(module)
    if type(module) is nn.Embedding:
        plain = module.padding_idx is None and module.max_norm is None and not module.sparse
        return functional.embedding if plain else None
    return module if type(module) in _POOLS and not getattr(module, "return_indices", False) else None


def _convolution(module: nn.Conv1d | nn.Conv2d) -> Callable[..., Tensor]:
    function: Callable[..., Tensor] = functional.conv2d if isinstance(module, nn.Conv2d) else functional.conv1d
    settings = {name: getattr(module, name) for name in ("stride", "padding", "dilation", "groups")}

    def convolved(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return function(x, weight, bias, **settings)

    return convolved
