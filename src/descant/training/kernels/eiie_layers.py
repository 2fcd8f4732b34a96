"""Evaluators of assets (see `problems.eiie`) for a whole stack of parties, forwards and backwards.

All assets of all days of a batch stand side by side: prices are ``[K, window, n]``, what they say ``[K, width, n]``. A
recurrent evaluator keeps what it saw as ``[window, K, h + 2, n]``, the state, the price and a one below each other, so
that a step is one product. All of it is numpy's, whose small products take half the time of torch's, and whose tanh a
fifth.

What is computed of a party must not depend on how many stand beside it. A product's last bits may depend on where in a
cache line its matrices begin: so every party's matrix begins a line, and n is filled up with zeros.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .layers import Array, Bound, Place, Value, Views


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
        own = {name: (tensor if votes.lead else tensor.unsqueeze(0)).numpy() for name, tensor in mine.items()}
        self._evaluator: _Evaluator = EVALUATORS[votes.kind](own)
        self._vote, self._cash = own["vote"][:, None], own["cash"]

    def forward(self, *inputs: Value) -> Value:
        x = inputs[0] if self._lead else inputs[0].unsqueeze(0).numpy()
        parties, batch, assets, columns = x.shape
        n = batch * assets
        seen = np.zeros((parties, columns, -(-n // _LINE) * _LINE), dtype=x.dtype)
        seen[..., :n] = x.reshape(parties, n, columns).transpose(0, 2, 1)
        self._held = seen[:, -1:]
        self._told = self._evaluator.forward(seen[:, :-1])
        votes = product(self._vote[..., :-2], self._told)
        votes += self._vote[..., -1:]
        votes += self._held * self._vote[..., -2:-1]
        output = np.empty((parties, batch, 1 + assets), dtype=x.dtype)
        output[..., 0], output[..., 1:] = self._cash, votes[..., :n].reshape(parties, batch, assets)
        return output if self._lead else torch.from_numpy(output[0])

    def backward(self, slope: Value) -> Sequence[Value]:
        given = slope if self._lead else slope.unsqueeze(0).numpy()
        along = np.zeros_like(self._held)  # [K, 1, n]
        along[..., : given[0, :, 1:].size] = given[..., 1:].reshape(len(given), 1, -1)
        parts = (product(along, beside.transpose(0, 2, 1)) for beside in (self._told, self._held))
        vote = np.concatenate([*parts, along.sum(2, keepdims=True)], 2)
        found = self._evaluator.backward(self._vote[..., :-2].transpose(0, 2, 1) * along)
        gradients = {**found, "vote": vote[:, 0], "cash": given[..., 0].sum(1, keepdims=True)}
        for name, gradient in gradients.items():
            self._place.put(self._prefix + name, torch.from_numpy(gradient if self._lead else gradient[0]))
        return []


_LINE = 16  # numbers of a cache line


def room(like: Array, parties: int, rows: int, columns: int) -> Array:
    """``[parties, rows, columns]`` in which every party's part begins a cache line, all of it 0."""
    each = rows * columns
    lines = np.zeros((parties, -(-each // _LINE) * _LINE), dtype=like.dtype)
    return lines[:, :each].reshape(parties, rows, columns)


def product(a: Array, b: Array) -> Array:
    """a·b, party by party."""
    found: Array = np.matmul(a, b, out=room(a, len(a), a.shape[1], b.shape[2]))
    return found


class _Evaluator(ABC):
    """One kind at work."""

    def __init__(self, w: Mapping[str, Array]) -> None:
        self._w = w

    @abstractmethod
    def forward(self, x: Array) -> Array:
        """What the prices ``[K, window, n]`` say, ``[K, width, n]``."""

    @abstractmethod
    def backward(self, slope: Array) -> dict[str, Array]:
        """The gradient of the parameters by name."""


class _Convolved(_Evaluator):
    """Both convolutions as products: the first one's matrix is a band."""

    def forward(self, x: Array) -> Array:
        days, bias = self._w["evaluator.days"], self._w["evaluator.days_bias"]
        (parties, window, _), filters, pairs = x.shape, days.shape[1], np.arange(x.shape[1] - 1)
        band = room(x, parties, filters * (window - 1), window).reshape(parties, filters, window - 1, window)
        for day in (0, 1):
            band[:, :, pairs, pairs + day] = days[..., day, None]
        self._x, self._where = x, pairs
        self._pairs = product(band.reshape(parties, -1, window), x)
        self._pairs += np.repeat(bias, window - 1, 1)[..., None]
        np.maximum(self._pairs, 0, out=self._pairs)
        self._told = product(self._w["evaluator.all"], self._pairs)
        self._told += self._w["evaluator.all_bias"][..., None]
        return np.maximum(self._told, 0, out=self._told)

    def backward(self, slope: Array) -> dict[str, Array]:
        slope *= self._told > 0
        along = product(self._w["evaluator.all"].transpose(0, 2, 1), slope)
        along *= self._pairs > 0
        (parties, window, _), filters = self._x.shape, self._w["evaluator.days"].shape[1]
        band = product(along, self._x.transpose(0, 2, 1)).reshape(parties, filters, window - 1, window)
        days = [band[:, :, self._where, self._where + day].sum(2) for day in (0, 1)]
        return {
            "evaluator.days": np.stack(days, 2),
            "evaluator.days_bias": along.sum(2).reshape(parties, filters, -1).sum(2),
            "evaluator.all": product(slope, self._pairs.transpose(0, 2, 1)),
            "evaluator.all_bias": slope.sum(2),
        }


class _Recurrent(_Evaluator):
    """A loop over the days, forwards and back; what it fills is kept from batch to batch."""

    _room: tuple[int, ...] = ()

    def forward(self, x: Array) -> Array:
        step = self._w["evaluator.step"]
        (parties, window, n), hidden = x.shape, step.shape[2] - 2
        if self._room != x.shape:
            self._room = x.shape
            self._seen = np.zeros((window + 1, parties, hidden + 2, n), dtype=x.dtype)  # what each step was made of
            self._seen[:, :, -1] = 1
            self._told = np.empty((parties, step.shape[1], n), dtype=x.dtype)  # a step's product, and its gradient
            self._make(window, hidden)
        self._seen[:-1, :, hidden] = x.transpose(1, 0, 2)
        for t in range(window):
            np.matmul(step, self._seen[t], out=self._told)
            self._forth(t, self._seen[t + 1, :, :hidden])
        return self._seen[-1, :, :hidden]

    def backward(self, slope: Array) -> dict[str, Array]:
        step = self._w["evaluator.step"]
        before, gradient = step[:, :, :-2].transpose(0, 2, 1), np.zeros_like(step)
        for t in range(len(self._seen) - 2, -1, -1):
            self._back(t, slope)
            gradient += product(self._told, self._seen[t].transpose(0, 2, 1))
            if t:
                np.matmul(before, self._told, out=slope)
        return {"evaluator.step": gradient}

    def _make(self, window: int, hidden: int) -> None:
        """Room for more than the states."""

    def _forth(self, t: int, into: Array) -> None:
        np.tanh(self._told, out=into)

    def _back(self, t: int, slope: Array) -> None:
        after = self._seen[t + 1, :, :-2]
        np.multiply(after, after, out=self._told)
        np.subtract(1, self._told, out=self._told)
        self._told *= slope


class _LongShort(_Recurrent):
    """The same with a cell beside the state; σ(x) = ½ + ½·tanh(½x), so that all gates open at once."""

    _carried: Array  # the gradient of a cell, from the days behind it

    def _make(self, window: int, hidden: int) -> None:
        parties, rows, n = self._told.shape
        self._cells = np.zeros((window + 1, parties, hidden, n), dtype=self._told.dtype)
        self._shown = np.empty((window, parties, hidden, n), dtype=self._told.dtype)  # tanh of the cells
        self._gates = np.empty((window, parties, rows, n), dtype=self._told.dtype)
        self._half = np.full((rows, 1), 0.5, dtype=self._told.dtype)
        self._half[2 * hidden : 3 * hidden] = 1  # g is a tanh itself
        self._rest = 1 - self._half
        self._also = 1 - 2 * self._rest  # σ' = σ(1-σ), tanh' = (1-tanh)(1+tanh)

    def _forth(self, t: int, into: Array) -> None:
        gates = self._gates[t]
        self._told *= self._half
        np.tanh(self._told, out=gates)
        gates *= self._half
        gates += self._rest
        i, f, g, o = np.split(gates, 4, 1)
        cell = np.multiply(f, self._cells[t], out=self._cells[t + 1])
        cell += i * g
        np.multiply(o, np.tanh(cell, out=self._shown[t]), out=into)

    def _back(self, t: int, slope: Array) -> None:
        gates, shown = self._gates[t], self._shown[t]
        i, f, g, o = np.split(gates, 4, 1)
        di, df, dg, do = np.split(self._told, 4, 1)
        along = slope * o  # of the cell
        along *= 1 - shown * shown
        if t + 2 < len(self._seen):
            along += self._carried
        np.multiply(slope, shown, out=do)
        np.multiply(along, g, out=di)
        np.multiply(along, self._cells[t], out=df)
        np.multiply(along, i, out=dg)
        self._told *= (1 - gates) * (gates + self._also)
        self._carried = np.multiply(along, f, out=along)


EVALUATORS: dict[str, type[Any]] = {"Convolved": _Convolved, "Recurrent": _Recurrent, "LongShort": _LongShort}
