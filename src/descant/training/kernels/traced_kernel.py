"""Kernels: a user's module traced once, then computed for a whole stack of parties, forward and backward.

`torch.vmap` with autograd does the same for nearly any module, but takes several times as long to start its operations.
Here each layer is one operation with a leading party axis (see `layers`), and the backward pass is a loop.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from ...models.flat import Allocator, Layout, Net, allocate_in_memory
from ...models.tracing import TracedModule
from .autograd_layers import POOL_OPTIONS, AutogradOperation, Elementwise, FoldedBatch, operation_of
from .layers import FLAT, GradientTarget, Operation, OperationTarget, Relu, Reshape, Value, Views
from .max_pooling import MaxPool2x2, is_2x2_pooling
from .reproducible_elementwise import PaddedElementwise

_UNARY_FUNCTIONS = {torch.tanh, functional.tanh, torch.sigmoid, functional.sigmoid, functional.gelu, functional.silu}
_UNARY_FUNCTIONS |= {functional.elu, functional.leaky_relu, functional.softplus}
_ARITHMETIC = {operator.add, operator.sub, operator.mul, torch.add, torch.sub, torch.mul}
_METHODS = {"tanh": torch.tanh, "sigmoid": torch.sigmoid}
_RELU = {torch.relu, functional.relu, "relu"}
_FLATTEN = {torch.flatten, "flatten"}
_POOLS = {functional.max_pool2d, functional.avg_pool2d, functional.adaptive_avg_pool2d}


class Stack:
    """The columns ``[K, D]`` of some parties and their gradient, with views of both by tensor name."""

    def __init__(
        self, layout: Layout, columns: Sequence[Tensor], lead: int = 1, allocate: Allocator = allocate_in_memory
    ) -> None:
        self.layout = layout
        self.lead = lead  # 0: one party, whose tensors have no party axis
        self._allocate = allocate
        self.columns = self._aligned_rows(columns[0], sum(part.shape[1] for part in columns))
        torch.cat(list(columns), 1, out=self.columns)

    @cached_property
    def gradient(self) -> Tensor:
        return self._aligned_rows(self.columns, self.columns.shape[1]).zero_()

    @cached_property
    def w(self) -> Views:
        return self._views(self.columns)

    @cached_property
    def g(self) -> Views:
        return self._views(self.gradient)

    def _views(self, columns: Tensor) -> Views:
        return self.layout.split((columns if self.lead else columns[0])[..., : self.layout.trainable_width])

    def _aligned_rows(self, like: Tensor, width: int) -> Tensor:
        """Return ``[K, width]`` with rows aligned to cache lines: products are faster and independent of the row."""
        each = 64 // like.element_size()
        return self._allocate((len(like), -(-width // each) * each), like.dtype)[:, :width]


@dataclass(frozen=True)
class KernelStep:
    """One operation of a traced module."""

    operation: Operation
    sources: tuple[int, ...]  # indices of its inputs among the earlier values
    needs_input_gradient: bool  # an input depends on the parameters
    accumulate: bool  # a later call of the same layer has written a gradient already


@dataclass(frozen=True)
class Kernel:
    """A traced module: operations in order."""

    steps: tuple[KernelStep, ...]
    output_index: int  # index of the output among the values
    point_indices: Mapping[str, int] = field(default_factory=dict)  # indices of the observed points

    def bind(self, w: Views, target: GradientTarget | None) -> BoundKernel:
        """Return the kernel bound to its parameters and the target of their gradient; None: forward only."""
        return BoundKernel(self, w, target)

    @cached_property
    def supports_fused_step(self) -> bool:
        """Return whether parameters may change during the backward pass: not if a layer is used twice."""
        return not any(step.accumulate for step in self.steps)

    @cached_property
    def all_linear(self) -> bool:
        """Return whether all trainable layers are linear: a stack of these is as fast per party as one party."""
        return not any(isinstance(step.operation, AutogradOperation) and step.operation.names for step in self.steps)


class BoundKernel:
    """A kernel bound to its parameters."""

    def __init__(self, kernel: Kernel, w: Views, gradient_target: GradientTarget | None) -> None:
        target = gradient_target or GradientTarget(w)
        both_ways = gradient_target is not None
        fused_step = target.scale != 1
        self._output_index = kernel.output_index
        self._point_indices = kernel.point_indices
        self._steps = [
            (
                step.operation.bind(
                    w, OperationTarget(target, step.accumulate or fused_step), step.needs_input_gradient and both_ways
                ),
                step.sources,
            )
            for step in kernel.steps
        ]
        self._reversed_steps = list(enumerate(self._steps, 1))[::-1]
        self.features: dict[str, Value] = {}  # values at the kernel's points in the last forward pass

    def forward(self, x: Value) -> Value:
        """Return the outputs ``[K, batch, ...]`` for ``x [K, batch, ...]``."""
        values = [x]
        for bound, sources in self._steps:
            values.append(bound.forward(*[values[source] for source in sources]))
        self.features = {name: values[place] for name, place in self._point_indices.items()}
        return values[self._output_index]

    def backward(self, output_gradient: Value, point_gradients: Mapping[str, Value] | None = None) -> None:
        """Write the gradients of all parameters, given those of the outputs and of points."""
        gradients = {self._output_index: output_gradient}
        for name, one in (point_gradients or {}).items():
            index = self._point_indices[name]
            gradients[index] = gradients[index] + one if index in gradients else one
        for index, (bound, sources) in self._reversed_steps:
            if index in gradients:  # otherwise nothing before it is trained
                input_gradients = bound.backward(gradients.pop(index))
                for source, one in zip(sources, input_gradients, strict=False):
                    gradients[source] = gradients[source] + one if source in gradients else one


def kernel_of(net: Net, lead: int, points: tuple[str, ...] = ()) -> Kernel | str:
    """Return the net's module as a kernel with or without a party axis, or why it has none; cached."""
    key = ("kernel", lead, points)
    if key not in net.solver_cache:
        net.solver_cache[key] = (
            net.trace_result
            if isinstance(net.trace_result, str)
            else _kernel(net.trace_result, net.layout, lead, points=points)
        )
    kernel: Kernel | str = net.solver_cache[key]
    return kernel


def _kernel(traced: TracedModule, layout: Layout, lead: int, points: tuple[str, ...]) -> Kernel | str:
    if layout.parameter_count < len(layout.names):
        return "it has running statistics"
    if layout.dtype not in (torch.float32, torch.float64):
        return f"its numbers are {layout.dtype}"
    builder = _KernelBuilder(traced, layout, lead, observed=frozenset(traced.find_points(points)))
    nodes = traced.nodes
    indices = {nodes[0]: 0}
    steps = list[KernelStep]()
    has_gradient = [False]
    for node in nodes[1:]:
        operation = builder.operation(node)
        inputs = traced.input_values(node)
        if operation is None or any(source not in indices for source in inputs):
            return f"no kernel is known for its {traced.kind(node)}"
        sources = tuple(indices[source] for source in inputs)
        needs_input_gradient = any(has_gradient[source] for source in sources)
        has_parameters = any(True for _ in builder.parameter_names(node))
        shared_later = has_parameters and any(other.target == node.target for other in nodes[nodes.index(node) + 1 :])
        steps.append(KernelStep(operation, sources, needs_input_gradient, accumulate=shared_later))
        has_gradient.append(needs_input_gradient or has_parameters)
        indices[node] = len(steps)
    if {name for node in nodes for name in builder.parameter_names(node)} != set(layout.parameter_names):
        return "some of its parameters are used by no layer"
    return Kernel(tuple(steps), indices[traced.output_node], {name: indices[traced.points[name]] for name in points})


@dataclass(frozen=True)
class _KernelBuilder:
    """Builder of the operations for the nodes of a graph."""

    traced: TracedModule
    layout: Layout
    lead: int
    observed: frozenset[fx.Node]  # nodes whose values are read

    def operation(self, node: fx.Node) -> Operation | None:
        """Return the operation of a node on the stack; None if it may differ from party by party."""
        if self.traced.batch_size_nodes & set(node.all_input_nodes):
            return self._reshape(node)
        single_input = len(node.args) == 1 and isinstance(node.args[0], fx.Node)
        if node.op == "call_module":
            return self._layer(node) if single_input and not node.kwargs else None
        if node.target in _FLATTEN and node.args[1:] == (1,) and not node.kwargs:
            return Reshape(FLAT, self.lead)
        if node.target in _RELU and single_input:
            return self._relu(node) if _overwrites_nothing(node, bool(node.kwargs.get("inplace"))) else None
        options = {**dict(zip(POOL_OPTIONS, node.args[1:], strict=False)), **node.kwargs}
        if node.target is functional.max_pool2d and is_2x2_pooling(options):
            return MaxPool2x2(self.lead)
        function = self._function(node, single_input)
        return self._reshape(node) if function is None else AutogradOperation(function, self.lead)

    def _function(self, node: fx.Node, single_input: bool) -> Callable[..., Tensor] | None:
        if node.op == "call_method":
            return (
                self._elementwise(Elementwise(_METHODS[str(node.target)]))
                if node.target in _METHODS and single_input
                else None
            )
        if node.target in _UNARY_FUNCTIONS and single_input and not node.kwargs.get("inplace"):
            return self._elementwise(Elementwise(node.target, {k: v for k, v in node.kwargs.items() if k != "inplace"}))
        if node.target in _ARITHMETIC and len(node.all_input_nodes) == len(node.args) == 2:
            return None if node.kwargs else Elementwise(node.target)
        if node.target in _POOLS and len(node.all_input_nodes) == 1:
            pooled = Elementwise(node.target, dict(node.kwargs), node.args[1:])
            return FoldedBatch(pooled) if self.lead else pooled
        return None

    def _elementwise(self, function: Elementwise) -> Callable[..., Tensor]:
        return PaddedElementwise(function) if self.lead else function

    def _reshape(self, node: fx.Node) -> Operation | None:
        """Return the reshape of x.view(len(x), -1), x.reshape(-1, 784) and the like."""
        if node.op != "call_method" or node.target not in ("view", "reshape") or node.kwargs:
            return None
        shape = tuple(None if size in self.traced.batch_size_nodes else size for size in node.args[1:])
        is_constant = all(size is None or isinstance(size, int) for size in shape)
        return Reshape(shape, self.lead) if is_constant else None  # type: ignore[arg-type]

    def parameter_names(self, node: fx.Node) -> list[str]:
        """Return the parameter names of the layer that a node calls."""
        module = self.traced.submodule(node)
        return [] if module is None else [self._prefix(node) + name for name, _ in module.named_parameters()]

    def _prefix(self, node: fx.Node) -> str:
        path = self.traced.submodule_path(node)
        return f"{path}." if path else ""

    def _relu(self, node: fx.Node) -> Relu:
        """Return a ReLU; it overwrites its input if that is the output of a linear layer and nothing else reads it."""
        source = node.all_input_nodes[0]
        linear = type(self.traced.submodule(source)) is nn.Linear and source not in self.observed
        return Relu(self.lead, in_place=linear and len(source.users) == 1)

    def _layer(self, node: fx.Node) -> Operation | None:
        module = self.traced.submodules[str(node.target)]
        if not set(self.parameter_names(node)) <= set(self.layout.parameter_names):
            return None  # a frozen layer, or one that shares its parameters with another
        in_place = bool(getattr(module, "inplace", False))
        if (in_place and type(module) is not nn.ReLU) or not _overwrites_nothing(node, in_place):
            return None
        return self._relu(node) if type(module) is nn.ReLU else operation_of(module, self._prefix(node), self.lead)


def _overwrites_nothing(node: fx.Node, in_place: bool) -> bool:
    """Return whether an in-place operation can be done out of place: nothing else reads its input."""
    return not in_place or len(node.all_input_nodes[0].users) == 1
