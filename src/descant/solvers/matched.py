"""The gradient of representation matching, written out: matching layers are computed as the layers of a model are."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ..links import Back, Linear, Link, Matching, Reshaping
from . import layers
from .layers import Into, Operation, Place, Value
from .recorded import PartyByParty, Recorded


def _operation(back: Back, names: tuple[str, ...], lead: int) -> Operation:
    """What computes the way back through a layer, its private columns called ``names``."""
    if isinstance(back, Linear):
        return layers.Linear(names[0], names[1], lead)
    whole = not lead or isinstance(back, Reshaping)  # another shape is one with a party axis, too
    return Recorded(back if whole else PartyByParty(back), lead, names, fixed=1)


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
            slope = self._slope(link, value, frozen[link.below], strengths)
            for bound, _ in reversed(way):
                (slope,) = bound.backward(slope)
            along[link.above] = along[link.above] + slope if link.above in along else slope
        return along

    def _slope(self, link: Link, value: Value, aim: Value, strengths: Tensor) -> Value:
        """The gradient of the squares along what was rebuilt: 2·strength·share·(rebuilt - aim)."""
        slope = value - aim
        factor = strengths * 2 * self._matching.share(aim.shape[self._lead :])
        slope *= factor.numpy().reshape(-1, *[1] * (slope.ndim - 1)) if self._lead else factor[0]
        return slope
