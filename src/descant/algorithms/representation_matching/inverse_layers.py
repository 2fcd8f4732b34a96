"""Points of interest in a model's graph, and the inverse layers that lead back from one to another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx, nn

from ...errors import ModelError
from ...models.matching_layers import InverseConvolution, InverseLayer, InverseLinear, InverseMaxPool, InverseReshape
from ...models.tracing import TracedModule, is_reshape

_NON_LINEAR = "relu relu6 leakyrelu prelu elu selu celu gelu silu mish tanh sigmoid softplus softsign logsigmoid"
NON_LINEAR = frozenset((_NON_LINEAR + " hardtanh hardswish hardsigmoid hardshrink softshrink tanhshrink").split())
"""Point-wise non-linearities, as layers, functions or methods: lower-case names without underscores."""

_NORMS = "batchnorm1d batchnorm2d layernorm groupnorm instancenorm1d instancenorm2d localresponsenorm"
_PASS_THROUGH = NON_LINEAR | frozenset((_NORMS + " dropout dropout1d dropout2d alphadropout identity").split())
_PASS_THROUGH |= {
    "softmax",
    "logsoftmax",
    "add",
    "sub",
    "mul",
    "div",
    "truediv",
}  # arithmetic with a constant has one input


def normalized_kind(traced: TracedModule, node: fx.Node) -> str:
    """Return one spelling of a node's operation, the same for nn.LeakyReLU and functional.leaky_relu."""
    return traced.kind(node).lower().replace("_", "")


def points_of_interest(traced: TracedModule) -> list[fx.Node]:
    """Return the paper's points of interest (§3.1): the input, the point-wise non-linearities, and the top.

    Words enter as indices, which cannot be matched; their embeddings take the place of the input.
    """
    start_nodes = [node for node in traced.nodes if normalized_kind(traced, node) == "embedding"] or [traced.nodes[0]]
    chosen = {
        *start_nodes,
        traced.output_node,
        *(node for node in traced.nodes if normalized_kind(traced, node) in NON_LINEAR),
    }
    return [node for node in traced.nodes if node in chosen]


def find_inverse_layers(traced: TracedModule, above: fx.Node, below: fx.Node) -> tuple[InverseLayer, ...]:
    """Return the inverse layers from one point to an earlier one, or raise an error that names the obstacle."""
    parts = list[InverseLayer]()
    node = above
    while node is not below:
        sources = traced.input_values(node)
        if len(sources) != 1:
            reason = "it has more than one input" if sources else "it is where the model begins"
            raise _no_inverse_error(traced, above, below, node=node, reason=reason)
        part = _inverse_layer(traced, node, sources[0])
        source = sources[0]
        if isinstance(part, str):
            raise _no_inverse_error(traced, above, below, node=node, reason=part)
        parts += [] if part is None else [part]
        node = source
    return tuple(parts)


def _inverse_layer(traced: TracedModule, node: fx.Node, source: fx.Node) -> InverseLayer | str | None:
    """Return the inverse of one node: a layer, None if there is nothing to invert, or the reason why there is none."""
    module = traced.submodule(node)
    kind = normalized_kind(traced, node)
    below = traced.point_names[source]
    if isinstance(module, nn.Linear):
        return InverseLinear(below, module.in_features, module.out_features)
    if isinstance(module, nn.Conv1d | nn.Conv2d):
        return InverseConvolution.from_layer(below, module)
    if is_reshape(kind):
        return InverseReshape(below)
    if kind in ("maxpool1d", "maxpool2d"):
        return _inverse_pooling(node, module, below, spatial_dims=1 if kind == "maxpool1d" else 2)
    if "pool" in kind:
        return "it keeps no indices of the pooled values"
    return None if kind in _PASS_THROUGH else "it has no known inverse"


def _inverse_pooling(node: fx.Node, module: nn.Module | None, below: str, spatial_dims: int) -> InverseLayer | str:
    names = ("kernel_size", "stride", "padding", "dilation", "ceil_mode")
    given = dict(zip(names, node.args[1:], strict=False)) | dict(node.kwargs)
    options: dict[str, Any] = {name: getattr(module, name) for name in names} if module is not None else given
    options = {name: options[name] for name in names if options.get(name) is not None}
    stride = options.get("stride", options["kernel_size"])
    if any(far < wide for far, wide in zip(_as_pair(stride), _as_pair(options["kernel_size"]), strict=True)):
        return "its windows overlap, so that two values would return to one position"
    return InverseMaxPool(below, spatial_dims, tuple(options.items()))


def _as_pair(size: int | Sequence[int]) -> tuple[int, ...]:
    return (size, size) if isinstance(size, int) else tuple(size)


def _no_inverse_error(traced: TracedModule, above: fx.Node, below: fx.Node, node: fx.Node, reason: str) -> ModelError:
    names = traced.point_names
    return ModelError(
        f"The model's {names[above]!r} cannot be mapped back to its {names[below]!r}: {traced.kind(node)} "
        f"({names[node]!r}) is between them, and {reason}. Name points with no such node between them: "
        f"points=(...), of {', '.join(traced.points)}."
    )
