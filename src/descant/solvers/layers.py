"""The operations of common layers on a whole stack of parties, forwards and backwards.

Values are ``[K, batch, ...]`` and parameters ``[K, ...]``: one leading axis for the parties everywhere. What costs next
to nothing by itself (a small matrix product, a ReLU) has its gradient written out, because recording it would cost more
than computing it; everything else is recorded by autograd, one operation at a time.
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

    def put(self, name: str, gradient: Tensor, add: bool) -> None:
        if add:
            self.tensors[name].add_(gradient, alpha=self.scale)
        else:
            self.tensors[name].copy_(gradient)


class Operation(Protocol):
    """One step of a traced module."""

    def forward(self, w: Views, *inputs: Tensor) -> tuple[Tensor, Any]:
        """The output, and what the way back needs."""

    def backward(self, w: Views, into: Into, add: bool, saved: Any, slope: Tensor, wanted: bool) -> Sequence[Tensor]:
        """Put (or add) the gradient of the parameters where it goes, and return that of the inputs if it is wanted."""


@dataclass(frozen=True)
class Linear:
    """x·Wᵀ + b."""

    weight: str
    bias: str | None = None

    def forward(self, w: Views, *inputs: Tensor) -> tuple[Tensor, Any]:
        (x,) = inputs
        shape = x.shape
        if len(shape) > 3:
            x = x.flatten(1, -2)  # [K, n, in]
        output = product(x, w[self.weight].mT)
        if self.bias is not None:
            output += w[self.bias].unsqueeze(1)
        return output if len(shape) == 3 else output.view(*shape[:-1], -1), (x, shape)

    def backward(self, w: Views, into: Into, add: bool, saved: Any, slope: Tensor, wanted: bool) -> Sequence[Tensor]:
        x, shape = saved
        if len(shape) > 3:
            slope = slope.flatten(1, -2)  # [K, n, out]
        before = [product(slope, w[self.weight]).view(shape)] if wanted else []  # first: `into` may be w
        if add:
            into.tensors[self.weight].baddbmm_(slope.mT, x, alpha=into.scale)
        else:
            product(slope.mT, x, into.tensors[self.weight])
        if self.bias is not None:
            into.put(self.bias, slope.sum(1), add)
        return before


def product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """a·b matrix by matrix; how it is computed depends on the shape of one matrix, never on their number.

    Thin matrices, as at the top of every classifier, go by numpy: torch takes up to three times as long.
    """
    (count, rows, inner), columns = a.shape, b.shape[2]
    thinnest = min(rows, inner, columns)
    if thinnest > 16 or thinnest == 1 or rows * inner * columns > 2**18 or a.device.type != "cpu":
        return torch.bmm(a, b) if out is None else torch.bmm(a, b, out=out)
    if out is None:
        out = a.new_empty(count, rows, columns)
    np.matmul(a.numpy(), b.numpy(), out=out.numpy())
    return out


@dataclass(frozen=True)
class Relu:
    """max(x, 0)."""

    def forward(self, w: Views, *inputs: Tensor) -> tuple[Tensor, Any]:
        output = torch.relu(inputs[0])
        return output, output

    def backward(self, w: Views, into: Into, add: bool, saved: Any, slope: Tensor, wanted: bool) -> Sequence[Tensor]:
        return [torch.ops.aten.threshold_backward(slope, saved, 0)]


@dataclass(frozen=True)
class Flatten:
    """All that is behind the party and the batch in one axis."""

    def forward(self, w: Views, *inputs: Tensor) -> tuple[Tensor, Any]:
        return inputs[0].flatten(2), inputs[0].shape

    def backward(self, w: Views, into: Into, add: bool, saved: Any, slope: Tensor, wanted: bool) -> Sequence[Tensor]:
        return [slope.reshape(saved)]


@dataclass(frozen=True)
class Reshape:
    """Another shape for each party's batch; None stands for the length of the batch."""

    shape: tuple[int | None, ...]

    def forward(self, w: Views, *inputs: Tensor) -> tuple[Tensor, Any]:
        (x,) = inputs
        return x.reshape(len(x), *(x.shape[1] if size is None else size for size in self.shape)), x.shape

    def backward(self, w: Views, into: Into, add: bool, saved: Any, slope: Tensor, wanted: bool) -> Sequence[Tensor]:
        return [slope.reshape(saved)]


@dataclass(frozen=True)
class Recorded:
    """Any function of (inputs, parameters), whose gradient autograd finds."""

    function: Callable[..., Tensor]
    names: tuple[str, ...] = ()

    def forward(self, w: Views, *inputs: Tensor) -> tuple[Tensor, Any]:
        leaves = [_leaf(tensor) for tensor in (*inputs, *(w[name] for name in self.names))]
        with torch.enable_grad():
            output = self.function(*leaves)
        return output.detach(), (leaves, output)

    def backward(self, w: Views, into: Into, add: bool, saved: Any, slope: Tensor, wanted: bool) -> Sequence[Tensor]:
        leaves, output = saved
        first = len(leaves) - len(self.names)
        chosen = leaves if wanted else leaves[first:]
        if not chosen:
            return []
        with torch.enable_grad():
            found = torch.autograd.grad(output, chosen, slope, allow_unused=True, materialize_grads=True)
        for name, gradient in zip(self.names, found[len(found) - len(self.names) :], strict=True):
            into.put(name, gradient, add)
        return found[:first] if wanted else []


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
        if len(stacks[0]) == 1:
            return self.function(*(stack[0] for stack in stacks)).unsqueeze(0)
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

    def __call__(self, x: Tensor, scale: Tensor | None = None, shift: Tensor | None = None) -> Tensor:
        output = functional.layer_norm(x, self.shape, eps=self.epsilon)
        beside = (len(output), *[1] * (output.ndim - 1 - len(self.shape)), *self.shape)  # [K, 1, ..., shape]
        if scale is not None:
            output = output * scale.view(beside)
        return output if shift is None else output + shift.view(beside)


def looked_up(x: Tensor, table: Tensor) -> Tensor:
    """The rows ``[K, ..., width]`` of each party's own table ``[K, words, width]``."""
    found = table.gather(1, x.flatten(1).unsqueeze(2).expand(-1, -1, table.shape[2]))
    return found.view(*x.shape, -1)


_SMOOTH = (nn.Tanh, nn.Sigmoid, nn.GELU, nn.ELU, nn.LeakyReLU, nn.SiLU, nn.Softplus, nn.Identity)
_POOLS = (nn.MaxPool1d, nn.MaxPool2d, nn.AvgPool1d, nn.AvgPool2d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d)


def operation_of(module: nn.Module, prefix: str) -> Operation | None:
    """What computes a layer on the stack, its parameters named ``prefix``…; None where no way is known."""
    names = tuple(prefix + name for name, _ in module.named_parameters())
    if type(module) is nn.Linear:
        return Linear(*names)
    if type(module) is nn.ReLU:
        return Relu()
    if type(module) is nn.Flatten:
        return Flatten() if module.start_dim == 1 and module.end_dim == -1 else None
    if type(module) is nn.Unflatten:
        return Reshape((None, *module.unflattened_size)) if module.dim == 1 else None
    if type(module) is nn.Conv1d or type(module) is nn.Conv2d:
        return Recorded(PartyByParty(_convolution(module)), names) if module.padding_mode == "zeros" else None
    if type(module) is nn.LayerNorm:
        return Recorded(Normalised(module.normalized_shape, module.eps), names)
    if type(module) is nn.Embedding:
        plain = module.padding_idx is None and module.max_norm is None and not module.sparse
        return Recorded(looked_up, names) if plain else None
    if type(module) in _POOLS and not getattr(module, "return_indices", False):
        return Recorded(Folded(module))
    return Recorded(Elementwise(module)) if type(module) in _SMOOTH else None


def _convolution(module: nn.Conv1d | nn.Conv2d) -> Callable[..., Tensor]:
    function: Callable[..., Tensor] = functional.conv2d if isinstance(module, nn.Conv2d) else functional.conv1d
    settings = {name: getattr(module, name) for name in ("stride", "padding", "dilation", "groups")}

    def convolved(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return function(x, weight, bias, **settings)

    return convolved
