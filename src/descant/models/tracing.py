"""A module's own forward as a graph of named nodes, traced once by torch.fx: kernels and points of interest share it.

A **point** is a value on the way from the input to the output. It is called by the path of the submodule that makes it
("1", "features.2") where that is used once, and by torch.fx's name for it otherwise ("relu", "relu_1"). The two ends
are "input" and "output".
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable
from functools import cached_property

import torch
from torch import fx, nn

from ..errors import ModelError

INPUT = "input"
OUTPUT = "output"
_WRAPPER_NAME = "0"  # what torch.fx calls the user's module within ours


class TracedModule:
    """The graph of a module: its live nodes in order, what they are, and what they are called."""

    def __init__(self, root: nn.Module, graph: fx.Graph) -> None:
        self._root = root
        self._graph = graph
        self.submodules = dict(root.named_modules())  # the submodules by the targets of their nodes
        *nodes, end = graph.nodes
        self.output_node: fx.Node = end.all_input_nodes[0]
        live = _ancestors(self.output_node) | {nodes[0]}
        self.batch_size_nodes: set[fx.Node] = set()  # nodes that are the length of the batch, not values
        for node in nodes:
            if _is_batch_size(node, self.batch_size_nodes):
                self.batch_size_nodes.add(node)
        self.nodes = tuple(node for node in nodes if node in live and node not in self.batch_size_nodes)

    def input_values(self, node: fx.Node) -> list[fx.Node]:
        """The values that a node is made of."""
        return [source for source in node.all_input_nodes if source not in self.batch_size_nodes]

    def submodule(self, node: fx.Node) -> nn.Module | None:
        """The submodule that a node calls, if it calls one."""
        return self.submodules[str(node.target)] if node.op == "call_module" else None

    def submodule_path(self, node: fx.Node) -> str:
        """Where the user's module has the submodule that a node calls."""
        return str(node.target).partition(".")[2]

    def kind(self, node: fx.Node) -> str:
        """What a node does: the name of its layer, function or method."""
        module = self.submodule(node)
        return getattr(node.target, "__name__", str(node.target)) if module is None else type(module).__name__

    @cached_property
    def points(self) -> dict[str, fx.Node]:
        """All values by name, from the input to the output."""
        calls = Counter(node.target for node in self.nodes if node.op == "call_module")
        found = {INPUT: self.nodes[0]}
        for node in self.nodes[1:]:
            path = self.submodule_path(node) if calls[node.target] == 1 else ""
            names = (path, node.name.removeprefix(f"_{_WRAPPER_NAME}_"), node.name)
            found[next(name for name in names if name and name not in (*found, OUTPUT))] = node
        return {**found, OUTPUT: self.output_node}

    @cached_property
    def point_names(self) -> dict[fx.Node, str]:
        """What each value is called; the last is the output, whatever makes it."""
        return {node: name for name, node in self.points.items()}

    def find_points(self, names: Iterable[str]) -> list[fx.Node]:
        """The values of these names, in the order of the graph; an unknown name is an error."""
        for name in names:
            if name not in self.points:
                raise ModelError(f"The model has no point {name!r} to watch. It has: {', '.join(self.points)}.")
        chosen = {self.points[name] for name in names}
        return [node for node in self.nodes if node in chosen]

    def with_point_outputs(self, points: Iterable[str]) -> fx.GraphModule:
        """The module, with the user's own submodules in it, that gives its output and the values at the points."""
        self.find_points(points)
        graph = fx.Graph()
        copies = dict[fx.Node, fx.Node]()
        output = graph.graph_copy(self._graph, copies)
        taps = {}
        for name in points:
            taps[name] = copies[self.points[name]]
            if self._is_modified_in_place(self.points[name]):
                with graph.inserting_after(taps[name]):
                    taps[name] = graph.call_function(torch.clone, (taps[name],))
        graph.output((output, taps))
        module = fx.GraphModule(self._root, graph)
        module.add_module(
            _WRAPPER_NAME, self.submodules[_WRAPPER_NAME]
        )  # whole: parts that the output does not use have names, too
        return module

    def _is_modified_in_place(self, node: fx.Node) -> bool:
        """Whether somebody behind it changes a value in place, maybe through another shape of it."""
        for user in node.users:
            module = self.submodule(user)
            in_place = user.kwargs.get("inplace") or getattr(module, "inplace", False)
            if in_place or (user.op == "call_method" and str(user.target).endswith("_")):
                return True
            if is_reshape(self.kind(user)) and self._is_modified_in_place(user):
                return True
        return False


def is_reshape(kind: str) -> bool:
    """Whether a node of this kind keeps all numbers, in their order."""
    return kind.lower() in ("flatten", "view", "reshape", "unflatten", "squeeze", "unsqueeze", "contiguous")


class _Tracer(fx.Tracer):
    """Torch's own layers are whole, and so is a module that brings the operation which computes it."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return hasattr(m, "operation") or super().is_leaf_module(m, module_qualified_name)


def trace_module(module: nn.Module) -> TracedModule | str:
    """A module's graph, or why there is none. Traced as it is while it learns: nothing else looks at it."""
    wrapped = nn.Sequential(module)
    mode = module.training  # wrapped, so that a lone layer is a layer, too
    try:
        graph = _Tracer().trace(wrapped.train())
    except Exception as error:  # tracing runs the user's own forward, which may do anything
        return f"torch.fx cannot trace it ({type(error).__name__})"
    finally:
        module.train(mode)
    end = list(graph.nodes)[-1]
    one = len(end.args) == 1 and end.args == tuple(end.all_input_nodes)
    return TracedModule(wrapped, graph) if one else "it does not return one tensor"


def _ancestors(node: fx.Node) -> set[fx.Node]:
    """A node, and all that it is made of."""
    found = {node}
    pending = [node]
    while pending:
        new = set(pending.pop().all_input_nodes) - found
        found |= new
        pending += new
    return found


def _is_batch_size(node: fx.Node, batch_size_nodes: set[fx.Node]) -> bool:
    """Whether a node is x.size(0), x.shape[0], or x.shape on the way to it."""
    if node.op == "call_method":
        return node.target == "size" and node.args[1:] == (0,)
    if node.op == "call_function" and node.target is getattr:
        return node.args[1] == "shape"
    if node.target is not operator.getitem:
        return False
    of, index = node.args
    return of in batch_size_nodes and isinstance(index, int) and index == 0
