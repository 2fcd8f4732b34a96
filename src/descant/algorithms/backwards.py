"""The way back through a model, layer by layer: what matching layers are made of.

Each part undoes one layer of the model between two points: it takes what is above the layer, and gives what has the
shape of what is below it. Those that learn (a linear layer, a convolution) own some private columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from torch import Tensor, fx, nn
from torch.nn import functional

from ..errors import ModelError
from ..traced import Traced, is_reshape

Shape: TypeAlias = tuple[int, ...]

_NON_LINEAR = "relu relu6 leakyrelu prelu elu selu celu gelu silu mish tanh sigmoid softplus softsign logsigmoid"
NON_LINEAR = frozenset((_NON_LINEAR + " hardtanh hardswish hardsigmoid hardshrink softshrink tanhshrink").split())
"""Point-wise non-linearities, as layers, functions or methods: names in small letters, without underscores."""

_NORMS = "batchnorm1d batchnorm2d layernorm groupnorm instancenorm1d instancenorm2d localresponsenorm"
_PASSED = NON_LINEAR | frozenset((_NORMS + " dropout dropout1d dropout2d alphadropout identity").split())
_PASSED |= {"softmax", "logsoftmax", "add", "sub", "mul", "div", "truediv"}  # these with a number: with one input


class Back(Protocol):
    """The way back through one layer."""

    @property
    def below(self) -> str:
        """The point that the layer reads."""

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Those of its private columns: nothing, or a weight and a bias."""

    @property
    def fan_in(self) -> int:
        """How many numbers each of its outputs is made of."""

    def __call__(self, y: Tensor, below: Tensor, *own: Tensor) -> Tensor:
        """From what is above the layer to the shape of what is ``below`` it in the trained model."""


@dataclass(frozen=True)
class Linear:
    """Fully connected, from as many numbers as the model's linear layer makes to as many as it reads."""

    below: str
    inputs: int
    outputs: int

    @property
    def shapes(self) -> tuple[Shape, ...]:
        return (self.inputs, self.outputs), (self.inputs,)

    @property
    def fan_in(self) -> int:
        return self.outputs

    def __call__(self, y: Tensor, below: Tensor, *own: Tensor) -> Tensor:
        return functional.linear(y, *own)


@dataclass(frozen=True)
class Convolution:
    """A transposed convolution with the kernel, stride and padding of the model's; with stride 1 it is a plain one."""

    below: str
    inputs: int
    outputs: int
    kernel: Shape
    stride: Shape
    padding: Shape
    dilation: Shape
    groups: int

    @classmethod
    def of(cls, below: str, layer: nn.Conv1d | nn.Conv2d) -> Convolution:
        padding = layer.padding
        if isinstance(padding, str):  # "same" is for stride 1 alone, and "valid" is none
            reach = zip(layer.dilation, layer.kernel_size, strict=True)
            padding = tuple(d * (k - 1) // 2 if padding == "same" else 0 for d, k in reach)
        parts = (layer.kernel_size, layer.stride, padding, layer.dilation, layer.groups)
        return cls(below, layer.in_channels, layer.out_channels, *parts)

    @property
    def _plain(self) -> bool:
        return set(self.stride) == {1} and all(e >= 0 for e in self._edges)

    @property
    def _edges(self) -> Shape:
        """How far a plain convolution must reach beyond the edges to be the transposed one."""
        return tuple(d * (k - 1) - p for d, k, p in zip(self.dilation, self.kernel, self.padding, strict=True))

    @property
    def shapes(self) -> tuple[Shape, ...]:
        ends = (self.inputs, self.outputs) if self._plain else (self.outputs, self.inputs)
        return (ends[0], ends[1] // self.groups, *self.kernel), (self.inputs,)

    @property
    def fan_in(self) -> int:
        return self.outputs // self.groups * math.prod(self.kernel)

    def __call__(self, y: Tensor, below: Tensor, *own: Tensor) -> Tensor:
        along = below.shape[2:]
        if self._plain:
            function: Callable[..., Tensor] = functional.conv2d if len(along) == 2 else functional.conv1d
            output = function(y, *own, padding=self._edges, dilation=self.dilation, groups=self.groups)
            return output if output.shape[2:] == along else output[_within(along)]  # "same" and an even kernel
        function = functional.conv_transpose2d if len(along) == 2 else functional.conv_transpose1d
        reach = zip(y.shape[2:], self.stride, self._edges, self.padding, along, strict=True)
        missing = [to - ((n - 1) * s + e - p + 1) for n, s, e, p, to in reach]  # what the stride has passed over
        options: dict[str, Any] = {"stride": self.stride, "padding": self.padding, "dilation": self.dilation}
        return function(y, *own, output_padding=missing, groups=self.groups, **options)


def _within(along: Sequence[int]) -> tuple[slice, ...]:
    return (slice(None), slice(None), *(slice(length) for length in along))


@dataclass(frozen=True)
class Unpooling:
    """Every number goes back to where the trained model's pool took its own from (Zhao et al., 2015); 0 elsewhere."""

    below: str
    options: tuple[tuple[str, Any], ...]  # of the model's pool

    @property
    def shapes(self) -> tuple[Shape, ...]:
        return ()

    @property
    def fan_in(self) -> int:
        return 0

    def __call__(self, y: Tensor, below: Tensor, *own: Tensor) -> Tensor:
        pool = functional.max_pool2d if below.ndim == 4 else functional.max_pool1d
        _, switches = pool(below.detach(), **dict(self.options), return_indices=True)
        flat = y.new_zeros(*y.shape[:2], math.prod(below.shape[2:]))
        return flat.scatter(2, switches.flatten(2), y.flatten(2)).view(below.shape)


@dataclass(frozen=True)
class Reshaping:
    """The shape that was there before."""

    below: str

    @property
    def shapes(self) -> tuple[Shape, ...]:
        return ()

    @property
    def fan_in(self) -> int:
        return 0

    def __call__(self, y: Tensor, below: Tensor, *own: Tensor) -> Tensor:
        return y.reshape(below.shape)


# ── from a graph to the ways back ─────────────────────────────────────────────────────────────────────────────────────


def kind_of(traced: Traced, node: fx.Node) -> str:
    """What a node does, spelled in one way: nn.LeakyReLU, functional.leaky_relu and x.relu_() are alike."""
    return traced.kind(node).lower().replace("_", "")


def points_of(traced: Traced) -> list[fx.Node]:
    """The paper's points of interest (§3.1): the input, the point-wise non-linearities, and the top.

    Words go in as numbers that nothing can be matched to: there it is what they are embedded as.
    """
    begin = [node for node in traced.nodes if kind_of(traced, node) == "embedding"] or [traced.nodes[0]]
    chosen = {*begin, traced.result, *(node for node in traced.nodes if kind_of(traced, node) in NON_LINEAR)}
    return [node for node in traced.nodes if node in chosen]


def way_back(traced: Traced, above: fx.Node, below: fx.Node) -> tuple[Back, ...]:
    """What leads from one point to another before it; an error names what cannot be gone back through."""
    parts, node = list[Back](), above
    while node is not below:
        sources = traced.sources(node)
        if len(sources) != 1:
            raise _no_way(
                traced, above, below, node, "more than one value goes into it" if sources else "it is reached"
            )
        part, source = _part(traced, node, sources[0]), sources[0]
        if isinstance(part, str):
            raise _no_way(traced, above, below, node, part)
        parts += [] if part is None else [part]
        node = source
    return tuple(parts)


def _part(traced: Traced, node: fx.Node, source: fx.Node) -> Back | None | str:
    """The way back through one node: None if there is nothing to undo, or why there is none."""
    module, kind, below = traced.module(node), kind_of(traced, node), traced.names[source]
    if isinstance(module, nn.Linear):
        return Linear(below, module.in_features, module.out_features)
    if isinstance(module, nn.Conv1d | nn.Conv2d):
        return Convolution.of(below, module)
    if is_reshape(kind):
        return Reshaping(below)
    if kind in ("maxpool1d", "maxpool2d"):
        return _unpooling(node, module, below)
    if "pool" in kind:
        return "it keeps no indices to put values back by"
    return None if kind in _PASSED else "no way back through it is known"


def _unpooling(node: fx.Node, module: nn.Module | None, below: str) -> Back | str:
    names = ("kernel_size", "stride", "padding", "dilation", "ceil_mode")
    given = dict(zip(names, node.args[1:], strict=False)) | dict(node.kwargs)
    options: dict[str, Any] = {name: getattr(module, name) for name in names} if module is not None else given
    options = {name: options[name] for name in names if options.get(name) is not None}
    stride = options.get("stride", options["kernel_size"])
    if any(far < wide for far, wide in zip(_pair(stride), _pair(options["kernel_size"]), strict=True)):
        return "its windows overlap, so that two values would go back to one place"
    return Unpooling(below, tuple(options.items()))


def _pair(size: int | Sequence[int]) -> tuple[int, ...]:
    return (size, size) if isinstance(size, int) else tuple(size)


def _no_way(traced: Traced, above: fx.Node, below: fx.Node, node: fx.Node, why: str) -> ModelError:
    names = traced.names
    return ModelError(
        f"The model's {names[above]!r} cannot be led back to its {names[below]!r}: {traced.kind(node)} "
        f"({names[node]!r}) lies between, and {why}. Name points that have no such thing between them: "
        f"points=(...), of {', '.join(traced.points)}."
    )
