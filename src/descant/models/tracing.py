"""The graph of a module's forward, traced once by torch.fx and used by kernels and feature points.

A **point** is an intermediate value between input and output. Its name is the path of the submodule that computes it
("1", "features.2") if that is called once, and torch.fx's name otherwise ("relu", "relu_1"). The two ends are "input"
and "output".
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
_WRAPPER_NAME = "0"  # the name of the user's module within the wrapper


class TracedModule:
    """The graph of a module: its live nodes in order, with their kinds and names."""

    def __init__(self, root: nn.Module, graph: fx.Graph) -> None:
        self._root = root
        self._graph = graph
        self.submodules = dict(root.named_modules())  # by target of their nodes
        *nodes, end = graph.nodes
        self.output_node: fx.Node = end.all_input_nodes[0]
        live = _ancestors(self.output_node) | {nodes[0]}
        self.batch_size_nodes: set[fx.Node] = set()  # nodes that are the batch size, not values
        for node in nodes:
            if _is_batch_size(node, self.batch_size_nodes):
                self.batch_size_nodes.add(node)
        self.nodes = tuple(node for node in nodes if node in live and node not in self.batch_size_nodes)

    def input_values(self, node: fx.Node) -> list[fx.Node]:
        """Return the input values of a node."""
        return [source for source in node.all_input_nodes if source not in self.batch_size_nodes]

    def submodule(self, node: fx.Node) -> nn.Module | None:
        """Return the submodule that a node calls, or None."""
        return self.submodules[str(node.target)] if node.op == "call_module" else None

    def submodule_path(self, node: fx.Node) -> str:
        """Return the path of the submodule that a node calls, within the user's module."""
        return str(node.target).partition(".")[2]

    def kind(self, node: fx.Node) -> str:
        """Return the name of a node's layer, function or method."""
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
        """The name of each value; the last one is "output"."""
        return {node: name for name, node in self.points.items()}

    def find_points(self, names: Iterable[str]) -> list[fx.Node]:
        """Return the values of these names in graph order; raise if a name is unknown."""
        for name in names:
            if name not in self.points:
                raise ModelError(f"The model has no point {name!r} to watch. It has: {', '.join(self.points)}.")
        chosen = {self.points[name] for name in names}
        return [node for node in self.nodes if node in chosen]

    def with_point_outputs(self, points: Iterable[str]) -> fx.GraphModule:
        """Return a module that returns the output and the values at the points; it shares the user's submodules."""
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
        # the whole module, because parts that the output does not use have names, too
        module.add_module(_WRAPPER_NAME, self.submodules[_WRAPPER_NAME])
        return module

    def _is_modified_in_place(self, node: fx.Node) -> bool:
        """Return whether a later node changes a value in place, possibly through a reshape of it."""
        for user in node.users:
            module = self.submodule(user)
            in_place = user.kwargs.get("inplace") or getattr(module, "inplace", False)
            if in_place or (user.op == "call_method" and str(user.target).endswith("_")):
                return True
            if is_reshape(self.kind(user)) and self._is_modified_in_place(user):
                return True
        return False


def is_reshape(kind: str) -> bool:
    """Return whether a node of this kind keeps all numbers in their order."""
    return kind.lower() in ("flatten", "view", "reshape", "unflatten", "squeeze", "unsqueeze", "contiguous")


class _Tracer(fx.Tracer):
    """A tracer whose leaves are torch's layers and modules with an `operation` of their own."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return hasattr(m, "operation") or super().is_leaf_module(m, module_qualified_name)


def trace_module(module: nn.Module) -> TracedModule | str:
    """Return a module's graph in training mode, or the reason why it has none."""
    wrapped = nn.Sequential(module)  # so that a lone layer is traced as a layer, too
    mode = module.training
    try:
        graph = _Tracer().trace(wrapped.train())
    except Exception as error:  # tracing runs the user's own forward, which may do anything
        return f"torch.fx cannot trace it ({type(error).__name__})"
    finally:
        module.train(mode)
    end = list(graph.nodes)[-1]
    returns_one_tensor = len(end.args) == 1 and end.args == tuple(end.all_input_nodes)
    return TracedModule(wrapped, graph) if returns_one_tensor else "it does not return one tensor"


def _ancestors(node: fx.Node) -> set[fx.Node]:
    """Return a node and all nodes that it depends on."""
    found = {node}
    pending = [node]
    while pending:
        new = set(pending.pop().all_input_nodes) - found
        found |= new
        pending += new
    return found


def _is_batch_size(node: fx.Node, batch_size_nodes: set[fx.Node]) -> bool:
    """Return whether a node is x.size(0), x.shape[0], or an x.shape that leads to it."""
    if node.op == "call_method":
        return node.target == "size" and node.args[1:] == (0,)
    if node.op == "call_function" and node.target is getattr:
        return node.args[1] == "shape"
    if node.target is not operator.getitem:
        return False
    of, index = node.args
    return of in batch_size_nodes and isinstance(index, int) and index == 0
