"""A user's module as a kernel: traced once, and then computed for a whole stack of parties, forwards and backwards.

`torch.vmap` with autograd can do the same for nearly any module, but spends several times as long on starting its
operations. Here each layer is one operation with a leading party axis (see `layers`), and the way back is a loop.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from ...models.flat import Layout, Net, Room, in_memory
from ...models.tracing import Traced
from .autograd_layers import POOL, Elementwise, Folded, Recorded, operation_of
from .layers import FLAT, Into, Operation, Place, Relu, Reshape, Value, Views
from .max_pooling import Halving, halves
from .reproducible_elementwise import Evened

_ALONE = {torch.tanh, functional.tanh, torch.sigmoid, functional.sigmoid, functional.gelu, functional.silu}
_ALONE |= {functional.elu, functional.leaky_relu, functional.softplus}
_ARITHMETIC = {operator.add, operator.sub, operator.mul, torch.add, torch.sub, torch.mul}
_METHODS = {"tanh": torch.tanh, "sigmoid": torch.sigmoid}
_RELU = {torch.relu, functional.relu, "relu"}
_FLATTEN = {torch.flatten, "flatten"}
_POOLS = {functional.max_pool2d, functional.avg_pool2d, functional.adaptive_avg_pool2d}


class Stack:
    """The columns ``[K, D]`` of some parties, room for their gradient, and both by the names of their tensors."""

    def __init__(self, layout: Layout, columns: Sequence[Tensor], lead: int = 1, room: Room = in_memory) -> None:
        self.layout = layout
        self.lead = lead  # 0: one party, whose tensors have no party axis
        self._room = room
        self.columns = self._lines(columns[0], sum(part.shape[1] for part in columns))
        torch.cat(list(columns), 1, out=self.columns)

    @cached_property
    def gradient(self) -> Tensor:
        return self._lines(self.columns, self.columns.shape[1]).zero_()

    @cached_property
    def w(self) -> Views:
        return self._views(self.columns)

    @cached_property
    def g(self) -> Views:
        return self._views(self.gradient)

    def _views(self, columns: Tensor) -> Views:
        return self.layout.split((columns if self.lead else columns[0])[..., : self.layout.size])

    def _lines(self, like: Tensor, width: int) -> Tensor:
        """``[K, width]`` whose rows begin at a cache line: a product is faster so, and does not depend on the row."""
        each = 64 // like.element_size()
        return self._room((len(like), -(-width // each) * each), like.dtype)[:, :width]


@dataclass(frozen=True)
class Step:
    """One operation of a traced module."""

    operation: Operation
    sources: tuple[int, ...]  # the places of its inputs among the values before it
    wanted: bool  # whether an input depends on the parameters
    add: bool  # whether a call of the same layer behind it has put a gradient there already


@dataclass(frozen=True)
class Kernel:
    """A traced module: operations in order."""

    steps: tuple[Step, ...]
    result: int  # the place of the output among the values
    places: Mapping[str, int] = field(default_factory=dict)  # and those of the points that somebody looks at

    def bind(self, w: Views, into: Into | None) -> BoundKernel:
        """The kernel with its parameters, and where their gradient goes; None: it only goes forwards."""
        return BoundKernel(self, w, into)

    @cached_property
    def steps_at_once(self) -> bool:
        """Whether parameters may move on the way back: not if a layer is used twice."""
        return not any(step.add for step in self.steps)

    @cached_property
    def all_linear(self) -> bool:
        """Whether all that learns is linear layers: these multiply a stack of any size as fast as one party."""
        return not any(isinstance(step.operation, Recorded) and step.operation.names for step in self.steps)


class BoundKernel:
    """A kernel at work."""

    def __init__(self, kernel: Kernel, w: Views, into: Into | None) -> None:
        target, both_ways = into or Into(w), into is not None
        stepping = target.scale != 1
        self._result, self._places = kernel.result, kernel.places
        self._steps = [
            (step.operation.bind(w, Place(target, step.add or stepping), step.wanted and both_ways), step.sources)
            for step in kernel.steps
        ]
        self._back = list(enumerate(self._steps, 1))[::-1]
        self.seen: dict[str, Value] = {}  # the values at the kernel's points in the last pass forwards

    def forward(self, x: Value) -> Value:
        """The outputs ``[K, batch, ...]`` on ``x [K, batch, ...]``."""
        values = [x]
        for bound, sources in self._steps:
            values.append(bound.forward(*[values[source] for source in sources]))
        self.seen = {name: values[place] for name, place in self._places.items()}
        return values[self._result]

    def backward(self, slope: Value, along: Mapping[str, Value] | None = None) -> None:
        """Put the gradient of all parameters where it goes, given that of the outputs, and of points beside them."""
        slopes = {self._result: slope}
        for name, one in (along or {}).items():
            place = self._places[name]
            slopes[place] = slopes[place] + one if place in slopes else one
        for place, (bound, sources) in self._back:
            if place in slopes:  # else nothing before it learns
                found = bound.backward(slopes.pop(place))
                for source, one in zip(sources, found, strict=False):
                    slopes[source] = slopes[source] + one if source in slopes else one


def kernel_of(net: Net, lead: int, points: tuple[str, ...] = ()) -> Kernel | str:
    """The net's module as a kernel with or without a party axis, or why it cannot be one; made once."""
    key = ("kernel", lead, points)
    if key not in net.kept:
        net.kept[key] = net.traced if isinstance(net.traced, str) else _kernel(net.traced, net.layout, lead, points)
    kernel: Kernel | str = net.kept[key]
    return kernel


def _kernel(traced: Traced, layout: Layout, lead: int, points: tuple[str, ...]) -> Kernel | str:
    if layout.parameters < len(layout.names):
        return "it has running statistics"
    if layout.dtype not in (torch.float32, torch.float64):
        return f"its numbers are {layout.dtype}"
    making = _Making(traced, layout, lead, frozenset(traced.find(points)))
    nodes = traced.nodes
    places, steps, depends = {nodes[0]: 0}, list[Step](), [False]
    for node in nodes[1:]:
        found, inputs = making.operation(node), traced.sources(node)
        if found is None or any(source not in places for source in inputs):
            return f"no kernel is known for its {traced.kind(node)}"
        sources = tuple(places[source] for source in inputs)
        wanted = any(depends[source] for source in sources)
        learns = any(True for _ in making.names(node))
        again = learns and any(other.target == node.target for other in nodes[nodes.index(node) + 1 :])
        steps.append(Step(found, sources, wanted, again))
        depends.append(wanted or learns)
        places[node] = len(steps)
    if {name for node in nodes for name in making.names(node)} != set(layout.layers):
        return "some of its parameters are used by no layer"
    return Kernel(tuple(steps), places[traced.result], {name: places[traced.points[name]] for name in points})


@dataclass(frozen=True)
class _Making:
    """How the nodes of a graph become operations."""

    traced: Traced
    layout: Layout
    lead: int
    watched: frozenset[fx.Node]  # whose values somebody looks at

    def operation(self, node: fx.Node) -> Operation | None:
        """What computes a node on the stack; None where that is not known to be the same as party by party."""
        if self.traced.lengths & set(node.all_input_nodes):
            return self._reshaped(node)
        alone = len(node.args) == 1 and isinstance(node.args[0], fx.Node)
        if node.op == "call_module":
            return self._layer(node) if alone and not node.kwargs else None
        if node.target in _FLATTEN and node.args[1:] == (1,) and not node.kwargs:
            return Reshape(FLAT, self.lead)
        if node.target in _RELU and alone:
            return self._relu(node) if _overwrites_nothing(node, bool(node.kwargs.get("inplace"))) else None
        options = {**dict(zip(POOL, node.args[1:], strict=False)), **node.kwargs}
        if node.target is functional.max_pool2d and halves(options):
            return Halving(self.lead)
        function = self._function(node, alone)
        return self._reshaped(node) if function is None else Recorded(function, self.lead)

    def _function(self, node: fx.Node, alone: bool) -> Callable[..., Tensor] | None:
        if node.op == "call_method":
            return self._smooth(Elementwise(_METHODS[str(node.target)])) if node.target in _METHODS and alone else None
        if node.target in _ALONE and alone and not node.kwargs.get("inplace"):
            return self._smooth(Elementwise(node.target, {k: v for k, v in node.kwargs.items() if k != "inplace"}))
        if node.target in _ARITHMETIC and len(node.all_input_nodes) == len(node.args) == 2:
            return None if node.kwargs else Elementwise(node.target)
        if node.target in _POOLS and len(node.all_input_nodes) == 1:
            pooled = Elementwise(node.target, dict(node.kwargs), node.args[1:])
            return Folded(pooled) if self.lead else pooled
        return None

    def _smooth(self, function: Elementwise) -> Callable[..., Tensor]:
        return Evened(function) if self.lead else function

    def _reshaped(self, node: fx.Node) -> Operation | None:
        """x.view(len(x), -1), x.reshape(-1, 784) and the like: what a party's batch becomes."""
        if node.op != "call_method" or node.target not in ("view", "reshape") or node.kwargs:
            return None
        shape = tuple(None if size in self.traced.lengths else size for size in node.args[1:])
        plain = all(size is None or isinstance(size, int) for size in shape)
        return Reshape(shape, self.lead) if plain else None  # type: ignore[arg-type]

    def names(self, node: fx.Node) -> list[str]:
        """The parameters of the layer that a node calls."""
        module = self.traced.module(node)
        return [] if module is None else [self._prefix(node) + name for name, _ in module.named_parameters()]

    def _prefix(self, node: fx.Node) -> str:
        path = self.traced.path(node)
        return f"{path}." if path else ""

    def _relu(self, node: fx.Node) -> Relu:
        """In place behind a linear layer that nobody else reads: it does not need its own output on the way back."""
        source = node.all_input_nodes[0]
        linear = type(self.traced.module(source)) is nn.Linear and source not in self.watched
        return Relu(self.lead, in_place=linear and len(source.users) == 1)

    def _layer(self, node: fx.Node) -> Operation | None:
        module = self.traced.parts[str(node.target)]
        if not set(self.names(node)) <= set(self.layout.layers):
            return None  # a frozen layer, or one that shares its parameters with another
        in_place = bool(getattr(module, "inplace", False))
        if (in_place and type(module) is not nn.ReLU) or not _overwrites_nothing(node, in_place):
            return None
        return self._relu(node) if type(module) is nn.ReLU else operation_of(module, self._prefix(node), self.lead)


def _overwrites_nothing(node: fx.Node, in_place: bool) -> bool:
    """An operation in place may be done elsewhere if nobody else looks at what it would have overwritten."""
    return not in_place or len(node.all_input_nodes[0].users) == 1
