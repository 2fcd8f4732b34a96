"""A user's module as a kernel: traced once, and then computed for a whole stack of parties, forwards and backwards.

`torch.vmap` with autograd can do the same for nearly any module, but spends several times as long on starting its
operations. Here each layer is one operation with a leading party axis (see `layers`), and the way back is a loop.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from ..flat import Layout, Net
from .layers import FLAT, Into, Operation, Place, Relu, Reshape, Value, Views
from .recorded import Elementwise, Folded, Recorded, operation_of

_ALONE = {torch.tanh, functional.tanh, torch.sigmoid, functional.sigmoid, functional.gelu, functional.silu}
_ALONE |= {functional.elu, functional.leaky_relu, functional.softplus}
_ARITHMETIC = {operator.add, operator.sub, operator.mul, torch.add, torch.sub, torch.mul}
_METHODS = {"tanh": torch.tanh, "sigmoid": torch.sigmoid}
_RELU = {torch.relu, functional.relu, "relu"}
_FLATTEN = {torch.flatten, "flatten"}
_POOLS = {functional.max_pool2d, functional.avg_pool2d, functional.adaptive_avg_pool2d}


class Stack:
    """The columns ``[K, D]`` of some parties, room for their gradient, and both by the names of their tensors."""

    def __init__(self, layout: Layout, columns: Sequence[Tensor], lead: int = 1) -> None:
        self.layout = layout
        self.lead = lead  # 0: one party, whose tensors have no party axis
        self.columns = _lines(columns[0], sum(part.shape[1] for part in columns))
        torch.cat(list(columns), 1, out=self.columns)

    @cached_property
    def gradient(self) -> Tensor:
        return _lines(self.columns, self.columns.shape[1]).zero_()

    @cached_property
    def w(self) -> Views:
        return self._views(self.columns)

    @cached_property
    def g(self) -> Views:
        return self._views(self.gradient)

    def _views(self, columns: Tensor) -> Views:
        return self.layout.split((columns if self.lead else columns[0])[..., : self.layout.size])


def _lines(like: Tensor, width: int) -> Tensor:
    """``[K, width]`` whose rows begin at a cache line: a product is faster so, and does not depend on the row."""
    each = 64 // like.element_size()
    return like.new_empty(len(like), -(-width // each) * each)[:, :width]


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

    def bind(self, w: Views, into: Into) -> BoundKernel:
        """The kernel with its parameters, and where their gradient goes."""
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

    def __init__(self, kernel: Kernel, w: Views, into: Into) -> None:
        stepping = into.scale != 1
        self._result = kernel.result
        self._steps = [
            (step.operation.bind(w, Place(into, step.add or stepping), step.wanted), step.sources)
            for step in kernel.steps
        ]
        self._back = list(enumerate(self._steps, 1))[::-1]

    def forward(self, x: Value) -> Value:
        """The outputs ``[K, batch, ...]`` on ``x [K, batch, ...]``."""
        values = [x]
        for bound, sources in self._steps:
            values.append(bound.forward(*[values[source] for source in sources]))
        return values[self._result]

    def backward(self, slope: Value) -> None:
        """Put the gradient of all parameters where it goes, given that of the outputs."""
        slopes = {self._result: slope}
        for place, (bound, sources) in self._back:
            if place in slopes:  # else nothing before it learns
                found = bound.backward(slopes.pop(place))
                for source, one in zip(sources, found, strict=False):
                    slopes[source] = slopes[source] + one if source in slopes else one


_TRACED: WeakKeyDictionary[nn.Module, list[Kernel | str]] = WeakKeyDictionary()


def kernel_of(net: Net, lead: int) -> Kernel | str:
    """The net's module as a kernel with or without a party axis, or why it cannot be one; traced once."""
    if net.module not in _TRACED:
        _TRACED[net.module] = [_trace(net.module, net.layout, lead) for lead in (0, 1)]
    return _TRACED[net.module][lead]


def _trace(module: nn.Module, layout: Layout, lead: int) -> Kernel | str:
    if layout.parameters < len(layout.names):
        return "it has running statistics"
    if layout.dtype not in (torch.float32, torch.float64):
        return f"its numbers are {layout.dtype}"
    wrapped = nn.Sequential(module)  # so that a lone layer is a layer, too
    try:
        graph = fx.symbolic_trace(wrapped).graph
    except Exception as error:  # tracing runs the user's own forward, which may do anything
        return f"torch.fx cannot trace it ({type(error).__name__})"
    graph.eliminate_dead_code()
    nodes, parts = list(graph.nodes), dict(wrapped.named_modules())
    if nodes[-1].args != tuple(nodes[-1].all_input_nodes) or len(nodes[-1].args) != 1:
        return "it does not return one tensor"
    places, steps, depends = {nodes[0]: 0}, list[Step](), [False]
    lengths: set[fx.Node] = set()  # nodes that are the length of the batch, not values
    for node in nodes[1:-1]:
        if _is_length(node, lengths):
            lengths.add(node)
            continue
        by_length = bool(lengths & set(node.all_input_nodes))
        found = _reshaped(node, lengths, lead) if by_length else _operation(node, parts, layout, lead)
        inputs = [source for source in node.all_input_nodes if source not in lengths]
        if found is None or any(source not in places for source in inputs):
            what = parts[str(node.target)] if node.op == "call_module" else node.target
            name = type(what).__name__ if isinstance(what, nn.Module) else getattr(what, "__name__", str(what))
            return f"no kernel is known for its {name}"
        sources = tuple(places[source] for source in inputs)
        wanted = any(depends[source] for source in sources)
        learns = node.op == "call_module" and any(True for _ in parts[str(node.target)].parameters())
        again = learns and any(other.target == node.target for other in nodes[nodes.index(node) + 1 :])
        steps.append(Step(found, sources, wanted, again))
        depends.append(wanted or learns)
        places[node] = len(steps)
    reached = {name for node in nodes if node.op == "call_module" for name in _names(node, parts[str(node.target)])}
    if reached != set(layout.layers):
        return "some of its parameters are used by no layer"
    return Kernel(tuple(steps), places[nodes[-1].all_input_nodes[0]])


def _operation(node: fx.Node, parts: dict[str, nn.Module], layout: Layout, lead: int) -> Operation | None:
    """What computes a node on the stack; None where that is not known to be the same as party by party."""
    alone = len(node.args) == 1 and isinstance(node.args[0], fx.Node)
    if node.op == "call_module":
        return _layer(node, parts, layout, lead) if alone and not node.kwargs else None
    if node.target in _FLATTEN and node.args[1:] == (1,) and not node.kwargs:
        return Reshape(FLAT, lead)
    if node.target in _RELU and alone:
        return _relu(node, parts, lead) if _overwrites_nothing(node, bool(node.kwargs.get("inplace"))) else None
    if node.op == "call_function" and node.target in _ALONE and alone and not node.kwargs.get("inplace"):
        return Recorded(Elementwise(node.target, {k: v for k, v in node.kwargs.items() if k != "inplace"}), lead)
    if node.op == "call_function" and node.target in _ARITHMETIC and len(node.all_input_nodes) == len(node.args) == 2:
        return None if node.kwargs else Recorded(Elementwise(node.target), lead)
    if node.op == "call_method" and node.target in _METHODS and alone:
        return Recorded(Elementwise(_METHODS[str(node.target)]), lead)
    if node.op == "call_function" and node.target in _POOLS and len(node.all_input_nodes) == 1:
        pooled = Elementwise(node.target, dict(node.kwargs), node.args[1:])
        return Recorded(Folded(pooled) if lead else pooled, lead)
    return _reshaped(node, set(), lead)


def _is_length(node: fx.Node, lengths: set[fx.Node]) -> bool:
    """Whether a node is x.size(0), x.shape[0], or x.shape on the way to it."""
    if node.op == "call_method":
        return node.target == "size" and node.args[1:] == (0,)
    if node.op == "call_function" and node.target is getattr:
        return node.args[1] == "shape"
    if node.target is not operator.getitem:
        return False
    of, index = node.args
    return of in lengths and isinstance(index, int) and index == 0


def _reshaped(node: fx.Node, lengths: set[fx.Node], lead: int) -> Operation | None:
    """x.view(len(x), -1), x.reshape(-1, 784) and the like: what a party's batch becomes."""
    if node.op != "call_method" or node.target not in ("view", "reshape") or node.kwargs:
        return None
    shape = tuple(None if size in lengths else size for size in node.args[1:])
    return Reshape(shape, lead) if all(size is None or isinstance(size, int) for size in shape) else None  # type: ignore[arg-type]


def _prefix(node: fx.Node) -> str:
    path = str(node.target).partition(".")[2]  # without the wrapper's own "0"
    return f"{path}." if path else ""


def _names(node: fx.Node, module: nn.Module) -> list[str]:
    return [_prefix(node) + name for name, _ in module.named_parameters()]


def _relu(node: fx.Node, parts: dict[str, nn.Module], lead: int) -> Relu:
    """In place behind a linear layer that nobody else reads: it does not need its own output on the way back."""
    source = node.all_input_nodes[0]
    linear = source.op == "call_module" and type(parts[str(source.target)]) is nn.Linear
    return Relu(lead, in_place=linear and len(source.users) == 1)


def _layer(node: fx.Node, parts: dict[str, nn.Module], layout: Layout, lead: int) -> Operation | None:
    module = parts[str(node.target)]
    if not set(_names(node, module)) <= set(layout.layers):
        return None  # a frozen layer, or one that shares its parameters with another
    in_place = bool(getattr(module, "inplace", False))
    if in_place and type(module) is not nn.ReLU:
        return None
    if not _overwrites_nothing(node, in_place):
        return None
    return _relu(node, parts, lead) if type(module) is nn.ReLU else operation_of(module, _prefix(node), lead)


def _overwrites_nothing(node: fx.Node, in_place: bool) -> bool:
    """An operation in place may be done elsewhere if nobody else looks at what it would have overwritten."""
    return not in_place or len(node.all_input_nodes[0].users) == 1
