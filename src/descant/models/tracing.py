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

INPUT, OUTPUT = "input", "output"
_WRAPPER = "0"  # what torch.fx calls the user's module within ours


class Traced:
    """The graph of a module: its live nodes in order, what they are, and what they are called."""

    def __init__(self, root: nn.Module, graph: fx.Graph) -> None:
        self._root, self._graph = root, graph
        self.parts = dict(root.named_modules())  # the submodules by the targets of their nodes
        *nodes, end = graph.nodes
        self.result: fx.Node = end.all_input_nodes[0]
        live = _before(self.result) | {nodes[0]}
        self.lengths: set[fx.Node] = set()  # nodes that are the length of the batch, not values
        for node in nodes:
            if _is_length(node, self.lengths):
                self.lengths.add(node)
        self.nodes = tuple(node for node in nodes if node in live and node not in self.lengths)

    def sources(self, node: fx.Node) -> list[fx.Node]:
        """The values that a node is made of."""
        return [source for source in node.all_input_nodes if source not in self.lengths]

    def module(self, node: fx.Node) -> nn.Module | None:
        """The submodule that a node calls, if it calls one."""
        return self.parts[str(node.target)] if node.op == "call_module" else None

    def path(self, node: fx.Node) -> str:
        """Where the user's module has the submodule that a node calls."""
        return str(node.target).partition(".")[2]

    def kind(self, node: fx.Node) -> str:
        """What a node does: the name of its layer, function or method."""
        module = self.module(node)
        return getattr(node.target, "__name__", str(node.target)) if module is None else type(module).__name__

    @cached_property
    def points(self) -> dict[str, fx.Node]:
        """All values by name, from the input to the output."""
        calls = Counter(node.target for node in self.nodes if node.op == "call_module")
        found = {INPUT: self.nodes[0]}
        for node in self.nodes[1:]:
            path = self.path(node) if calls[node.target] == 1 else ""
            names = (path, node.name.removeprefix(f"_{_WRAPPER}_"), node.name)
            found[next(name for name in names if name and name not in (*found, OUTPUT))] = node
        return {**found, OUTPUT: self.result}

    @cached_property
    def names(self) -> dict[fx.Node, str]:
        """What each value is called; the last is the output, whatever makes it."""
        return {node: name for name, node in self.points.items()}

    def find(self, names: Iterable[str]) -> list[fx.Node]:
        """The values of these names, in the order of the graph; an unknown name is an error."""
        for name in names:
            if name not in self.points:
                raise ModelError(f"The model has no point {name!r} to watch. It has: {', '.join(self.points)}.")
        chosen = {self.points[name] for name in names}
        return [node for node in self.nodes if node in chosen]

    def tapped(self, points: Iterable[str]) -> fx.GraphModule:
        """The module, with the user's own submodules in it, that gives its output and the values at the points."""
        self.find(points)
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        output = graph.graph_copy(self._graph, copies)
        taps = {}
        for name in points:
            taps[name] = copies[self.points[name]]
            if self._is_overwritten(self.points[name]):
                with graph.inserting_after(taps[name]):
                    taps[name] = graph.call_function(torch.clone, (taps[name],))
        graph.output((output, taps))
        module = fx.GraphModule(self._root, graph)
        module.add_module(_WRAPPER, self.parts[_WRAPPER])  # whole: parts that the output does not use have names, too
        return module

    def _is_overwritten(self, node: fx.Node) -> bool:
        """Whether somebody behind it changes a value in place, maybe through another shape of it."""
        for user in node.users:
            module = self.module(user)
            in_place = user.kwargs.get("inplace") or getattr(module, "inplace", False)
            if in_place or (user.op == "call_method" and str(user.target).endswith("_")):
                return True
            if is_reshape(self.kind(user)) and self._is_overwritten(user):
                return True
        return False


def is_reshape(kind: str) -> bool:
    """Whether a node of this kind keeps all numbers, in their order."""
    return kind.lower() in ("flatten", "view", "reshape", "unflatten", "squeeze", "unsqueeze", "contiguous")


class _Tracer(fx.Tracer):
    """Torch's own layers are whole, and so is a module that brings the operation which computes it."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return hasattr(m, "operation") or super().is_leaf_module(m, module_qualified_name)


def trace(module: nn.Module) -> Traced | str:
    """A module's graph, or why there is none. Traced as it is while it learns: nothing else looks at it."""
    wrapped, mode = nn.Sequential(module), module.training  # wrapped, so that a lone layer is a layer, too
    try:
        graph = _Tracer().trace(wrapped.train())
    except Exception as error:  # tracing runs the user's own forward, which may do anything
        return f"torch.fx cannot trace it ({type(error).__name__})"
    finally:
        module.train(mode)
    end = list(graph.nodes)[-1]
    one = len(end.args) == 1 and end.args == tuple(end.all_input_nodes)
    return Traced(wrapped, graph) if one else "it does not return one tensor"


def _before(node: fx.Node) -> set[fx.Node]:
    """A node, and all that it is made of."""
    found, waiting = {node}, [node]
    while waiting:
        new = set(waiting.pop().all_input_nodes) - found
        found |= new
        waiting += new
    return found


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
