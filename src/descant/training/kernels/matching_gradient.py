"""The gradient of representation matching, written out: matching layers are computed as the layers of a model are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ...models.matching_layers import Back, Convolution, Linear, Matching, Reshaping, Unpooling
from . import layers
from .autograd_layers import PartyByParty, Recorded
from .layers import Into, Operation, Place, Value
from .max_pooling import Unhalving, halves

FEW = 8  # channels up to which torch's general algorithm is faster than oneDNN's: 20 ms for 27 at 3, 12 for 24 at 1


@dataclass(frozen=True)
class _ToFewChannels:
    """The same transposed convolution by matrix products."""

    back: Convolution

    def __call__(self, y: Tensor, below: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        parts = (self.back.stride, self.back.padding, self.back.missing(y, below), self.back.dilation)
        output: Tensor = torch.ops.aten.slow_conv_transpose2d(y, weight, self.back.kernel, bias, *parts)
        return self.back.cut(output, below)


def _operation(back: Back, names: tuple[str, ...], lead: int) -> Operation:
    """What computes the way back through a layer, its private columns called ``names``."""
    if isinstance(back, Linear):
        return layers.Linear(names[0], names[1], lead)
    if isinstance(back, Unpooling) and back.sides == 2 and halves(dict(back.options)):
        return Unhalving(lead)
    function: Callable[..., Tensor] = back
    if isinstance(back, Convolution) and back.inputs <= FEW and back.groups == 1 and len(back.kernel) == 2:
        function = _ToFewChannels(back)
    whole = not lead or isinstance(back, Reshaping)  # another shape is one with a party axis, too
    return Recorded(function if whole else PartyByParty(function), lead, names, fixed=1)


class BoundMatching:
    """A matching term at work on a stack: it puts the gradient of its private columns where it goes."""

    def __init__(self, matching: Matching, columns: Tensor, into: Tensor, scale: float, lead: int) -> None:
        self._matching, self._lead = matching, lead
        w, target = (
            {str(i): part for i, part in enumerate(matching.split(stack if lead else stack[0]))}
            for stack in (columns, into)
        )
        place, count = Place(Into(target, scale), scale != 1), 0
        self._ways = []
        for link in matching.links:
            way = []
            for back in link.way:
                names = tuple(str(count + i) for i in range(len(back.shapes)))
                count += len(names)
                way.append((_operation(back, names, lead).bind(w, place, True), back))
            self._ways.append((link, way))

    def __call__(self, seen: Mapping[str, Value], frozen: Mapping[str, Value], strengths: Tensor) -> dict[str, Value]:
        """The gradient along the points of the trained model; ``strengths [K]``."""
        along: dict[str, Value] = {}
        for link, way in self._ways:
            value = seen[link.above]
            for bound, back in way:
                value = bound.forward(value, *([] if isinstance(back, Linear) else [seen[back.below]]))
            own = any(not isinstance(back, Reshaping) for back in link.way)  # else it may be the model's own memory
            slope = self._slope(value if own else value + 0, frozen[link.below], strengths)
            for bound, _ in reversed(way):
                (slope,) = bound.backward(slope)
            along[link.above] = along[link.above] + slope if link.above in along else slope
        return along

    def _slope(self, rebuilt: Value, aim: Value, strengths: Tensor) -> Value:
        """The gradient of the squares along what was rebuilt, in its place: 2·strength·share·(rebuilt - aim)."""
        rebuilt -= aim
        factor = strengths * 2 * self._matching.share(aim.shape[self._lead :])
        rebuilt *= factor.numpy().reshape(-1, *[1] * (rebuilt.ndim - 1)) if self._lead else factor[0]
        return rebuilt
