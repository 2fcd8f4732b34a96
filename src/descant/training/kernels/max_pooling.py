"""Max pooling by windows of 2 x 2, nearly all that there is, five times as fast as torch's own on a CPU.

The larger of two neighbours in a row, and then of two rows: each is one operation on whole arrays. The switches say
which of the two it was, by torch's own rule for equals (the first). All of it goes by the last two axes alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .layers import Bound, Place, Value, Views


def halves(options: Mapping[str, Any]) -> bool:
    """Whether a two-dimensional max pool with these options has windows of 2 x 2, side by side."""
    usual: dict[str, Any] = {"stride": None, "padding": 0, "dilation": 1, "ceil_mode": False, "return_indices": False}
    found = {**usual, **options}
    stride = found.pop("stride") or found["kernel_size"]
    wanted = {"kernel_size": 2, "padding": 0, "dilation": 1, "ceil_mode": False, "return_indices": False}
    alike = all(found.get(name) in (value, (value, value)) for name, value in wanted.items())
    return alike and stride in (2, (2, 2)) and len(found) == len(wanted)


@dataclass(frozen=True)
class Switches:
    """Where the largest number of each window was: to the right, below."""

    right: Tensor  # [..., rows, columns of windows]
    lower: Tensor  # [..., rows of windows, columns of windows]
    shape: torch.Size  # of what was pooled

    @classmethod
    def of(cls, x: Tensor, rows: Tensor) -> Switches:
        """Of what is pooled, and the larger of each pair in its rows."""
        pairs = _columns(x)
        return cls(pairs[..., 1] > pairs[..., 0], rows[..., 1, :] > rows[..., 0, :], x.shape)

    def spread(self, y: Tensor) -> Tensor:
        """Numbers back where the pool took its own from, and 0 elsewhere."""
        odd = self.shape[-2] % 2 or self.shape[-1] % 2
        whole = y.new_zeros(self.shape) if odd else y.new_empty(self.shape)
        between = y.new_empty(self.right.shape)
        rows, columns = _rows(between), _columns(whole)
        torch.mul(y, self.lower, out=rows[..., 1, :])
        torch.sub(y, rows[..., 1, :], out=rows[..., 0, :])
        torch.mul(between, self.right, out=columns[..., 1])
        torch.sub(between, columns[..., 1], out=columns[..., 0])
        return whole

    def taken(self, x: Tensor) -> Tensor:
        """The numbers that stand where the pool took its own from."""
        columns = _columns(x)
        rows = _rows((columns[..., 0] * ~self.right).add_(columns[..., 1] * self.right))
        return (rows[..., 0, :] * ~self.lower).add_(rows[..., 1, :] * self.lower)


def larger(x: Tensor) -> Tensor:
    """The larger of each pair in the rows, by two rows; a last one without a neighbour is passed over."""
    pairs = _columns(x)
    return _rows(torch.maximum(pairs[..., 0], pairs[..., 1]))


def _columns(x: Tensor) -> Tensor:
    """Pairs of neighbours in the rows that have a neighbour, too; a view."""
    rows, columns = x.shape[-2] // 2 * 2, x.shape[-1] // 2
    return torch.unflatten(x[..., :rows, : 2 * columns], -1, (columns, 2))


def _rows(x: Tensor) -> Tensor:
    return torch.unflatten(x, -2, (x.shape[-2] // 2, 2))


@dataclass(frozen=True)
class Halving:
    """The largest of each window."""

    lead: int

    def bind(self, w: Views, place: Place, wanted: bool) -> Bound:
        return _BoundHalving(self.lead, wanted)


class _BoundHalving:
    def __init__(self, lead: int, wanted: bool) -> None:
        self._lead, self._wanted = lead, wanted

    def forward(self, *inputs: Value) -> Value:
        x = torch.from_numpy(inputs[0]) if self._lead else inputs[0]
        rows = larger(x)
        if self._wanted:
            self._switches = Switches.of(x, rows)
        pooled = torch.maximum(rows[..., 0, :], rows[..., 1, :])
        return pooled.numpy() if self._lead else pooled

    def backward(self, slope: Value) -> Sequence[Value]:
        if not self._wanted:
            return []
        spread = self._switches.spread(torch.from_numpy(slope) if self._lead else slope)
        return [spread.numpy() if self._lead else spread]


@dataclass(frozen=True)
class Unhalving:
    """The way back: what it is given first, put where the windows of what it is given next have their largest."""

    lead: int

    def bind(self, w: Views, place: Place, wanted: bool) -> Bound:
        return _BoundUnhalving(self.lead)


class _BoundUnhalving:
    def __init__(self, lead: int) -> None:
        self._lead = lead

    def forward(self, *inputs: Value) -> Value:
        y, below = (torch.from_numpy(value) if self._lead else value for value in inputs)
        self._switches = Switches.of(below, larger(below))
        spread = self._switches.spread(y)
        return spread.numpy() if self._lead else spread

    def backward(self, slope: Value) -> Sequence[Value]:
        taken = self._switches.taken(torch.from_numpy(slope) if self._lead else slope)
        return [taken.numpy() if self._lead else taken]
