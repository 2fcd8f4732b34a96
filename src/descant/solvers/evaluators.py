"""Evaluators of assets (see `problems.eiie`) for a whole stack of parties, forwards and backwards.

All assets of all days of a batch stand side by side: prices are ``[K, window, n]``, what they say ``[K, width, n]``. A
recurrent evaluator keeps what it saw as ``[window, K, h + 2, n]``, the state, the price and a one below each other, so
that a step is one product; products of that shape are half as long again in the other order.

What is computed of a party must not depend on how many stand beside it. A product's last bits depend on where in a
cache line its matrices begin, and those of some functions on what is left over of a loop by 64 numbers: so every
party's matrix begins a line, and n is filled up with zeros.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
from torch import Tensor

from .layers import Bound, Place, Value, Views


@dataclass(frozen=True)
class Votes:
    """A portfolio's network: ``[K, batch, assets, window + 1]`` -> ``[K, batch, 1 + assets]``."""

    kind: str  # the class of its evaluator
    prefix: str
    lead: int

    def bind(self, w: Views, place: Place, wanted: bool) -> Bound:
        return _BoundVotes(self, w, place)


class _BoundVotes:
    def __init__(self, votes: Votes, w: Views, place: Place) -> None:
        self._lead, self._place, self._prefix = votes.lead, place, votes.prefix
        mine = {name.removeprefix(votes.prefix): t for name, t in w.items() if name.startswith(votes.prefix)}
        own = mine if votes.lead else {name: tensor.unsqueeze(0) for name, tensor in mine.items()}
        self._evaluator: _Evaluator = EVALUATORS[votes.kind](own)
        self._vote, self._cash = own["vote"].unsqueeze(1), own["cash"]

    def forward(self, *inputs: Value) -> Value:
        x = torch.from_numpy(inputs[0]) if self._lead else inputs[0].unsqueeze(0)
        parties, batch, assets, columns = x.shape
        n = batch * assets
        seen = x.new_zeros(parties, columns, self._evaluator.wide(n))
        seen[..., :n] = x.reshape(parties, n, columns).transpose(1, 2)
        prices, self._held = seen[:, :-1], seen[:, -1:]
        self._told = self._evaluator.forward(prices)
        votes = product(self._vote[..., :-2], self._told)
        votes += self._vote[..., -1:]
        votes += self._held * self._vote[..., -2:-1]
        output = x.new_empty(parties, batch, 1 + assets)
        output[..., 0], output[..., 1:] = self._cash, votes[..., :n].view(parties, batch, assets)
        return output.numpy() if self._lead else output[0]

    def backward(self, slope: Value) -> Sequence[Value]:
        given = torch.from_numpy(slope) if self._lead else slope.unsqueeze(0)
        along = torch.zeros_like(self._held)  # [K, 1, n]
        along[..., : given[0, :, 1:].numel()] = given[..., 1:].reshape(len(given), 1, -1)
        parts = (product(along, beside.transpose(1, 2)) for beside in (self._told, self._held))
        vote = torch.cat([*parts, along.sum(2, keepdim=True)], 2)
        found = self._evaluator.backward(self._vote[..., :-2].transpose(1, 2) * along)
        gradients = {**found, "vote": vote[:, 0], "cash": given[..., 0].sum(1, keepdim=True)}
        for name, gradient in gradients.items():
            self._place.put(self._prefix + name, gradient if self._lead else gradient[0])
        return []


_LINE, _LOOP = 16, 64  # numbers of a cache line, and of a vectorised loop


def room(like: Tensor, parties: int, rows: int, columns: int) -> Tensor:
    """``[parties, rows, columns]`` in which every party's part begins a cache line."""
    each = rows * columns
    return like.new_empty(parties, -(-each // _LINE) * _LINE)[:, :each].view(parties, rows, columns)


def product(a: Tensor, b: Tensor) -> Tensor:
    """a·b, party by party."""
    return torch.bmm(a, b, out=room(a, len(a), a.shape[1], b.shape[2]))


class _Evaluator(ABC):
    """One kind at work."""

    def __init__(self, w: Views) -> None:
        self._w = w

    def wide(self, n: int) -> int:
        """To how many places n is filled up."""
        return -(-n // _LINE) * _LINE

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """What the prices ``[K, window, n]`` say, ``[K, width, n]``."""

    @abstractmethod
    def backward(self, slope: Tensor) -> dict[str, Tensor]:
        """The gradient of the parameters by name."""


class _Convolved(_Evaluator):
    """Both convolutions as products: the first one's matrix is a band."""

    def forward(self, x: Tensor) -> Tensor:
        days, bias = self._w["evaluator.days"], self._w["evaluator.days_bias"]
        (parties, window, _), filters = x.shape, days.shape[1]
        band = room(x, parties, filters * (window - 1), window).zero_().view(parties, filters, window - 1, window)
        for day in (0, 1):
            band[..., day:].diagonal(0, 2, 3)[...] = days[..., day, None]
        self._x = x
        self._pairs = product(band.view(parties, -1, window), x)
        self._pairs.add_(bias.repeat_interleave(window - 1, 1).unsqueeze(2)).relu_()
        self._told = product(self._w["evaluator.all"], self._pairs)
        return self._told.add_(self._w["evaluator.all_bias"].unsqueeze(2)).relu_()

    def backward(self, slope: Tensor) -> dict[str, Tensor]:
        top = torch.ops.aten.threshold_backward(slope, self._told, 0)
        below = product(self._w["evaluator.all"].transpose(1, 2), top)
        along = torch.ops.aten.threshold_backward(below, self._pairs, 0)
        (parties, window, _), filters = self._x.shape, self._w["evaluator.days"].shape[1]
        band = product(along, self._x.transpose(1, 2)).view(parties, filters, window - 1, window)
        return {
            "evaluator.days": torch.stack([band[..., day:].diagonal(0, 2, 3).sum(2) for day in (0, 1)], 2),
            "evaluator.days_bias": along.sum(2).view(parties, filters, -1).sum(2),
            "evaluator.all": product(top, self._pairs.transpose(1, 2)),
            "evaluator.all_bias": top.sum(2),
        }


class _Recurrent(_Evaluator):
    """A loop over the days, forwards and back; what it fills is kept from batch to batch."""

    _room: tuple[int, ...] = ()

    def wide(self, n: int) -> int:
        """So that the rows of a state together are whole loops."""
        line = max(_LINE, _LOOP // gcd(_LOOP, self._w["evaluator.step"].shape[2] - 2))
        return -(-n // line) * line

    def forward(self, x: Tensor) -> Tensor:
        step = self._w["evaluator.step"]
        (parties, window, n), hidden = x.shape, step.shape[2] - 2
        if self._room != (*x.shape, hidden):
            self._room = (*x.shape, hidden)
            self._seen = x.new_zeros(window + 1, parties, hidden + 2, n)  # what each step was made of
            self._seen[:, :, -1] = 1
            self._make(x, window, parties, hidden, n)
        self._seen[:-1, :, hidden] = x.transpose(0, 1)
        for t in range(window):
            torch.bmm(step, self._seen[t], out=self._told)
            self._forth(t, self._seen[t + 1, :, :hidden])
        return self._seen[-1, :, :hidden]

    def backward(self, slope: Tensor) -> dict[str, Tensor]:
        step = self._w["evaluator.step"]
        before, gradient = step[:, :, :-2].transpose(1, 2), room(step, *step.shape).zero_()
        for t in range(len(self._seen) - 2, -1, -1):
            self._back(t, slope)
            gradient.baddbmm_(self._told, self._seen[t].transpose(1, 2))
            if t:
                torch.bmm(before, self._told, out=slope)
        return {"evaluator.step": gradient}

    def _make(self, x: Tensor, window: int, parties: int, hidden: int, n: int) -> None:
        self._told = x.new_empty(parties, hidden, n)  # a step before its gates; and the gradient of it

    def _forth(self, t: int, into: Tensor) -> None:
        torch.tanh(self._told, out=into)

    def _back(self, t: int, slope: Tensor) -> None:
        torch.ops.aten.tanh_backward.grad_input(slope, self._seen[t + 1, :, :-2], grad_input=self._told)


class _LongShort(_Recurrent):
    """The same with a cell beside the state."""

    _carried: Tensor  # the gradient of a cell, from the days behind it

    def _make(self, x: Tensor, window: int, parties: int, hidden: int, n: int) -> None:
        self._told = x.new_empty(parties, 4 * hidden, n)
        self._cells = x.new_zeros(window + 1, parties, hidden, n)
        self._gates = x.new_empty(window, parties, 4 * hidden, n)
        self._shown = x.new_empty(window, parties, hidden, n)  # tanh of the cells

    def _forth(self, t: int, into: Tensor) -> None:
        hidden, gates = into.shape[1], self._gates[t]
        torch.sigmoid(self._told, out=gates)
        i, f, g, o = gates.chunk(4, 1)
        torch.tanh(self._told[:, 2 * hidden : 3 * hidden], out=g)
        cell = torch.mul(f, self._cells[t], out=self._cells[t + 1]).addcmul_(i, g)
        torch.mul(o, torch.tanh(cell, out=self._shown[t]), out=into)

    def _back(self, t: int, slope: Tensor) -> None:
        shown = self._shown[t]
        i, f, g, o = self._gates[t].chunk(4, 1)
        di, df, dg, do = self._told.chunk(4, 1)
        along = torch.ops.aten.tanh_backward(slope * o, shown)  # of the cell
        if t + 2 < len(self._seen):
            along += self._carried
        sigmoid, tanh = torch.ops.aten.sigmoid_backward.grad_input, torch.ops.aten.tanh_backward.grad_input
        sigmoid(slope * shown, o, grad_input=do)
        sigmoid(along * g, i, grad_input=di)
        sigmoid(along * self._cells[t], f, grad_input=df)
        tanh(along * i, g, grad_input=dg)
        self._carried = along.mul_(f)


EVALUATORS: dict[str, type[Any]] = {"Convolved": _Convolved, "Recurrent": _Recurrent, "LongShort": _LongShort}
