"""Models of common layers computed for a whole stack of parties at once, by operations on ``[K, batch, ...]``.

`torch.vmap` can do the same for nearly any module, but spends several times as long on starting its operations. Here a
module is traced once, and each of its layers becomes one operation with a leading party axis.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from ..flat import Layout, Net

Operation: TypeAlias = Callable[..., Tensor]
"""(parameters [K, ...] by name, inputs [K, batch, ...]) -> output [K, batch, ...]"""

Step: TypeAlias = tuple[Operation, tuple[int, ...]]

_ELEMENTWISE = (nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.ELU, nn.LeakyReLU, nn.SiLU, nn.Softplus, nn.Identity)
_FUNCTIONS = {torch.relu, functional.relu, torch.tanh, functional.tanh, torch.sigmoid, functional.sigmoid}
_FUNCTIONS |= {functional.gelu, functional.silu, functional.elu, functional.leaky_relu}
_ARITHMETIC = {operator.add, operator.sub, operator.mul, torch.add, torch.sub, torch.mul}
_METHODS = {"relu": torch.relu, "tanh": torch.tanh, "sigmoid": torch.sigmoid}


@dataclass(frozen=True)
class Kernel:
    """A traced module: operations in order, each with the places of its inputs among the values before it."""

    layout: Layout
    steps: tuple[Step, ...]

    def __call__(self, parameters: Tensor, x: Tensor) -> Tensor:
        """Outputs ``[K, batch, ...]`` of ``parameters [K, d]`` on ``x [K, batch, ...]``."""
        named = self.layout.split(parameters)
        values = [x]
        for operation, sources in self.steps:
            values.append(operation(named, *(values[source] for source in sources)))
        return values[-1]


_TRACED: WeakKeyDictionary[nn.Module, Kernel | str] = WeakKeyDictionary()


def kernel_of(net: Net) -> Kernel | str:
    """The net's module as a kernel, or why it cannot be one; traced once."""
    if net.module not in _TRACED:
        _TRACED[net.module] = _trace(net.module, net.layout)
    return _TRACED[net.module]


def _trace(module: nn.Module, layout: Layout) -> Kernel | str:
    if layout.parameters < len(layout.names):
        return "it has running statistics"
    try:
        nodes = list(fx.Tracer().trace(nn.Sequential(module)).nodes)  # so that a lone layer is a layer, too
    except Exception as error:  # tracing runs the user's own forward, which may do anything
        return f"torch.fx cannot trace it ({type(error).__name__})"
    parts, places, steps = dict(nn.Sequential(module).named_modules()), {nodes[0]: 0}, list[Step]()
    for node in nodes[1:]:
        sources = node.all_input_nodes
        if node.op == "output" and len(sources) == 1 and node.args == (sources[0],):
            return Kernel(layout, (*steps, (_passed, (places[sources[0]],))))
        operation = _operation(node, parts, layout)
        if operation is None or any(source not in places for source in sources):
            what = parts[str(node.target)] if node.op == "call_module" else node.target
            return f"it uses {type(what).__name__ if isinstance(what, nn.Module) else what}, which is not stacked yet"
        steps.append((operation, tuple(places[source] for source in sources)))
        places[node] = len(steps)
    return "it does not return one tensor"


def _operation(node: fx.Node, parts: dict[str, nn.Module], layout: Layout) -> Operation | None:
    """What computes a node on the stack; None where that is not known to be the same as party by party."""
    alone = len(node.args) == 1 and isinstance(node.args[0], fx.Node)
    if node.op == "call_module" and alone and not node.kwargs:
        return _layer(str(node.target), parts[str(node.target)], layout)
    if node.target in ("flatten", torch.flatten) and node.args[1:] == (1,) and not node.kwargs:
        return _flattened
    if node.op == "call_function" and node.target in _FUNCTIONS and alone:
        options = {name: value for name, value in node.kwargs.items() if name != "inplace"}
        return _Plain(node.target, options)
    if node.op == "call_function" and node.target in _ARITHMETIC and len(node.all_input_nodes) == len(node.args) == 2:
        return None if node.kwargs else _Plain(node.target)
    if node.op == "call_method" and node.target in _METHODS and alone:
        return _Plain(_METHODS[str(node.target)])
    return None


def _layer(name: str, module: nn.Module, layout: Layout) -> Operation | None:
    if type(module) is nn.Linear:
        path = name.partition(".")[2]  # without the wrapper's own "0"
        names = [f"{path}.{parameter}" if path else parameter for parameter, _ in module.named_parameters()]
        return _Linear(*names) if set(names) <= set(layout.layers) else None
    if type(module) is nn.Flatten and (module.start_dim, module.end_dim) == (1, -1):
        return _flattened
    return _Plain(module) if type(module) in _ELEMENTWISE and not getattr(module, "inplace", False) else None


@dataclass(frozen=True)
class _Linear:
    weight: str
    bias: str | None = None

    def __call__(self, named: dict[str, Tensor], x: Tensor) -> Tensor:
        # weight times input, not input times weight: so the gradient of the weights comes out as they lie in the row
        weight, columns = named[self.weight], x.flatten(1, -2).mT  # [K, out, in], [K, in, batch]
        if self.bias is None:
            output = torch.bmm(weight, columns)
        else:
            output = torch.baddbmm(named[self.bias].unsqueeze(2), weight, columns)
        return output.mT.reshape(*x.shape[:-1], -1)


@dataclass(frozen=True)
class _Plain:
    """A function of each number by itself: the party axis makes no difference to it."""

    function: Callable[..., Tensor]
    options: dict[str, Any] = field(default_factory=dict)

    def __call__(self, named: dict[str, Tensor], *inputs: Tensor) -> Tensor:
        return self.function(*inputs, **self.options)


def _flattened(named: dict[str, Tensor], x: Tensor) -> Tensor:
    return x.flatten(2)  # all behind the party and the batch


def _passed(named: dict[str, Tensor], x: Tensor) -> Tensor:
    return x
