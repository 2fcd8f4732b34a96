"""From a model's graph to its points of interest, and to the matching layers that lead back from one to another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx, nn

from ...errors import ModelError
from ...models.matching_layers import Back, Convolution, Linear, Reshaping, Unpooling
from ...models.tracing import Traced, is_reshape

_NON_LINEAR = "relu relu6 leakyrelu prelu elu selu celu gelu silu mish tanh sigmoid softplus softsign logsigmoid"
NON_LINEAR = frozenset((_NON_LINEAR + " hardtanh hardswish hardsigmoid hardshrink softshrink tanhshrink").split())
"""Point-wise non-linearities, as layers, functions or methods: names in small letters, without underscores."""

_NORMS = "batchnorm1d batchnorm2d layernorm groupnorm instancenorm1d instancenorm2d localresponsenorm"
_PASSED = NON_LINEAR | frozenset((_NORMS + " dropout dropout1d dropout2d alphadropout identity").split())
_PASSED |= {"softmax", "logsoftmax", "add", "sub", "mul", "div", "truediv"}  # these with a number: with one input


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
            why = "more than one value goes into it" if sources else "it is where the model begins"
            raise _no_way(traced, above, below, node, why)
        part, source = _part(traced, node, sources[0]), sources[0]
        if isinstance(part, str):
            raise _no_way(traced, above, below, node, part)
        parts += [] if part is None else [part]
        node = source
    return tuple(parts)


def _part(traced: Traced, node: fx.Node, source: fx.Node) -> Back | str | None:
    """The way back through one node: None if there is nothing to undo, or why there is none."""
    module, kind, below = traced.module(node), kind_of(traced, node), traced.names[source]
    if isinstance(module, nn.Linear):
        return Linear(below, module.in_features, module.out_features)
    if isinstance(module, nn.Conv1d | nn.Conv2d):
        return Convolution.of(below, module)
    if is_reshape(kind):
        return Reshaping(below)
    if kind in ("maxpool1d", "maxpool2d"):
        return _unpooling(node, module, below, 1 if kind == "maxpool1d" else 2)
    if "pool" in kind:
        return "it keeps no indices to put values back by"
    return None if kind in _PASSED else "no way back through it is known"


def _unpooling(node: fx.Node, module: nn.Module | None, below: str, sides: int) -> Back | str:
    names = ("kernel_size", "stride", "padding", "dilation", "ceil_mode")
    given = dict(zip(names, node.args[1:], strict=False)) | dict(node.kwargs)
    options: dict[str, Any] = {name: getattr(module, name) for name in names} if module is not None else given
    options = {name: options[name] for name in names if options.get(name) is not None}
    stride = options.get("stride", options["kernel_size"])
    if any(far < wide for far, wide in zip(_pair(stride), _pair(options["kernel_size"]), strict=True)):
        return "its windows overlap, so that two values would go back to one place"
    return Unpooling(below, sides, tuple(options.items()))


def _pair(size: int | Sequence[int]) -> tuple[int, ...]:
    return (size, size) if isinstance(size, int) else tuple(size)


def _no_way(traced: Traced, above: fx.Node, below: fx.Node, node: fx.Node, why: str) -> ModelError:
    names = traced.names
    return ModelError(
        f"The model's {names[above]!r} cannot be led back to its {names[below]!r}: {traced.kind(node)} "
        f"({names[node]!r}) lies between, and {why}. Name points that have no such thing between them: "
        f"points=(...), of {', '.join(traced.points)}."
    )
