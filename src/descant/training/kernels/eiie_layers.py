"""Evaluators of assets (see `models.eiie_network`) for a whole stack of parties, forward and backward.

All assets of all days of a batch are columns: prices are ``[K, window, n]``, features ``[K, width, n]``. A recurrent
evaluator stores its inputs as ``[window, K, h + 2, n]``, with rows for the state, the price and a one, so that a step
is one matrix product. Everything is numpy, whose small products take half the time of torch's, and whose tanh a fifth.

The result of a party must not depend on the number of parties in its stack. The last bits of a product may depend on
where in a cache line its matrices begin. Every party's matrix therefore begins at a cache line, and n is padded with
zeros.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .layers import Array, BoundOperation, OperationTarget, Value, Views


@dataclass(frozen=True)
class EiieOperation:
    """The EIIE portfolio network: ``[K, batch, assets, window + 1]`` -> ``[K, batch, 1 + assets]``."""

    evaluator: str  # the class name of its evaluator, a key of EVALUATORS
    prefix: str
    lead: int

    def bind(self, w: Views, target: OperationTarget, needs_input_gradient: bool) -> BoundOperation:
        return _BoundEiie(self, w, target)


class _BoundEiie:
    def __init__(self, operation: EiieOperation, w: Views, target: OperationTarget) -> None:
        self._lead = operation.lead
        self._target = target
        self._prefix = operation.prefix
        tensors = {name.removeprefix(operation.prefix): t for name, t in w.items() if name.startswith(operation.prefix)}
        parameters = {
            name: (tensor if operation.lead else tensor.unsqueeze(0)).numpy() for name, tensor in tensors.items()
        }
        self._evaluator: _Evaluator = EVALUATORS[operation.evaluator](parameters)
        self._vote_weights = parameters["vote"][:, None]
        self._cash = parameters["cash"]

    def forward(self, *inputs: Value) -> Value:
        x = inputs[0] if self._lead else inputs[0].unsqueeze(0).numpy()
        parties, batch, assets, columns = x.shape
        n = batch * assets
        prices = np.zeros((parties, columns, -(-n // _LINE) * _LINE), dtype=x.dtype)
        prices[..., :n] = x.reshape(parties, n, columns).transpose(0, 2, 1)
        self._previous_weights = prices[:, -1:]
        self._scores = self._evaluator.forward(prices[:, :-1])
        votes = aligned_product(self._vote_weights[..., :-2], self._scores)
        votes += self._vote_weights[..., -1:]
        votes += self._previous_weights * self._vote_weights[..., -2:-1]
        output = np.empty((parties, batch, 1 + assets), dtype=x.dtype)
        output[..., 0], output[..., 1:] = self._cash, votes[..., :n].reshape(parties, batch, assets)
        return output if self._lead else torch.from_numpy(output[0])

    def backward(self, output_gradient: Value) -> Sequence[Value]:
        stacked_gradient = output_gradient if self._lead else output_gradient.unsqueeze(0).numpy()
        vote_gradient = np.zeros_like(self._previous_weights)  # [K, 1, n]
        vote_gradient[..., : stacked_gradient[0, :, 1:].size] = stacked_gradient[..., 1:].reshape(
            len(stacked_gradient), 1, -1
        )
        parts = (
            aligned_product(vote_gradient, values.transpose(0, 2, 1))
            for values in (self._scores, self._previous_weights)
        )
        vote_weights_gradient = np.concatenate([*parts, vote_gradient.sum(2, keepdims=True)], 2)
        evaluator_gradients = self._evaluator.backward(self._vote_weights[..., :-2].transpose(0, 2, 1) * vote_gradient)
        gradients = {
            **evaluator_gradients,
            "vote": vote_weights_gradient[:, 0],
            "cash": stacked_gradient[..., 0].sum(1, keepdims=True),
        }
        for name, gradient in gradients.items():
            self._target.write(self._prefix + name, torch.from_numpy(gradient if self._lead else gradient[0]))
        return []


_LINE = 16  # float32 numbers per cache line


def aligned_zeros(like: Array, parties: int, rows: int, columns: int) -> Array:
    """Return zeros ``[parties, rows, columns]`` in which every party's part begins at a cache line."""
    each = rows * columns
    lines = np.zeros((parties, -(-each // _LINE) * _LINE), dtype=like.dtype)
    return lines[:, :each].reshape(parties, rows, columns)


def aligned_product(a: Array, b: Array) -> Array:
    """Return a·b for every party, each part aligned to a cache line."""
    result: Array = np.matmul(a, b, out=aligned_zeros(a, len(a), a.shape[1], columns=b.shape[2]))
    return result


class _Evaluator(ABC):
    """An evaluator bound to its parameters."""

    def __init__(self, w: Mapping[str, Array]) -> None:
        self._w = w

    @abstractmethod
    def forward(self, x: Array) -> Array:
        """Return the features ``[K, width, n]`` of the prices ``[K, window, n]``."""

    @abstractmethod
    def backward(self, output_gradient: Array) -> dict[str, Array]:
        """Return the gradients of the parameters by name."""


class _ConvolutionalEvaluator(_Evaluator):
    """Both convolutions as matrix products; the matrix of the first one is banded."""

    def forward(self, x: Array) -> Array:
        days = self._w["evaluator.days"]
        bias = self._w["evaluator.days_bias"]
        (parties, window, _), filters, pairs = x.shape, days.shape[1], np.arange(x.shape[1] - 1)
        band = aligned_zeros(x, parties, filters * (window - 1), columns=window).reshape(
            parties, filters, window - 1, window
        )
        for day in (0, 1):
            band[:, :, pairs, pairs + day] = days[..., day, None]
        self._x = x
        self._pair_indices = pairs
        self._day_pairs = aligned_product(band.reshape(parties, -1, window), x)
        self._day_pairs += np.repeat(bias, window - 1, 1)[..., None]
        np.maximum(self._day_pairs, 0, out=self._day_pairs)
        self._output = aligned_product(self._w["evaluator.all"], self._day_pairs)
        self._output += self._w["evaluator.all_bias"][..., None]
        return np.maximum(self._output, 0, out=self._output)

    def backward(self, output_gradient: Array) -> dict[str, Array]:
        output_gradient *= self._output > 0
        pairs_gradient = aligned_product(self._w["evaluator.all"].transpose(0, 2, 1), output_gradient)
        pairs_gradient *= self._day_pairs > 0
        (parties, window, _), filters = self._x.shape, self._w["evaluator.days"].shape[1]
        band = aligned_product(pairs_gradient, self._x.transpose(0, 2, 1)).reshape(parties, filters, window - 1, window)
        days = [band[:, :, self._pair_indices, self._pair_indices + day].sum(2) for day in (0, 1)]
        return {
            "evaluator.days": np.stack(days, 2),
            "evaluator.days_bias": pairs_gradient.sum(2).reshape(parties, filters, -1).sum(2),
            "evaluator.all": aligned_product(output_gradient, self._day_pairs.transpose(0, 2, 1)),
            "evaluator.all_bias": output_gradient.sum(2),
        }


class _RecurrentEvaluator(_Evaluator):
    """A loop over the days; its arrays are reused from batch to batch."""

    _shape: tuple[int, ...] = ()

    def forward(self, x: Array) -> Array:
        step = self._w["evaluator.step"]
        (parties, window, n), hidden = x.shape, step.shape[2] - 2
        if self._shape != x.shape:
            self._shape = x.shape
            self._states = np.zeros((window + 1, parties, hidden + 2, n), dtype=x.dtype)  # the inputs of each step
            self._states[:, :, -1] = 1
            self._product = np.empty(
                (parties, step.shape[1], n), dtype=x.dtype
            )  # the product of a step, then its gradient
            self._allocate(window, hidden)
        self._states[:-1, :, hidden] = x.transpose(1, 0, 2)
        for t in range(window):
            np.matmul(step, self._states[t], out=self._product)
            self._step_forward(t, self._states[t + 1, :, :hidden])
        return self._states[-1, :, :hidden]

    def backward(self, output_gradient: Array) -> dict[str, Array]:
        step = self._w["evaluator.step"]
        state_weights = step[:, :, :-2].transpose(0, 2, 1)
        gradient = np.zeros_like(step)
        for t in range(len(self._states) - 2, -1, -1):
            self._step_backward(t, output_gradient)
            gradient += aligned_product(self._product, self._states[t].transpose(0, 2, 1))
            if t:
                np.matmul(state_weights, self._product, out=output_gradient)
        return {"evaluator.step": gradient}

    def _allocate(self, window: int, hidden: int) -> None:
        """Allocate arrays beyond the states."""

    def _step_forward(self, t: int, state: Array) -> None:
        np.tanh(self._product, out=state)

    def _step_backward(self, t: int, state_gradient: Array) -> None:
        next_state = self._states[t + 1, :, :-2]
        np.multiply(next_state, next_state, out=self._product)
        np.subtract(1, self._product, out=self._product)
        self._product *= state_gradient


class _LstmEvaluator(_RecurrentEvaluator):
    """An LSTM with a cell and a state; σ(x) = ½ + ½·tanh(½x), so that one tanh computes all gates."""

    _cell_gradient: Array  # the gradient of a cell from later days

    def _allocate(self, window: int, hidden: int) -> None:
        parties, rows, n = self._product.shape
        self._cells = np.zeros((window + 1, parties, hidden, n), dtype=self._product.dtype)
        self._cell_tanh = np.empty((window, parties, hidden, n), dtype=self._product.dtype)  # tanh of the cells
        self._gates = np.empty((window, parties, rows, n), dtype=self._product.dtype)
        self._gate_scale = np.full((rows, 1), 0.5, dtype=self._product.dtype)
        self._gate_scale[2 * hidden : 3 * hidden] = 1  # g is a tanh itself
        self._gate_offset = 1 - self._gate_scale
        self._derivative_offset = 1 - 2 * self._gate_offset  # σ' = σ(1-σ), tanh' = (1-tanh)(1+tanh)

    def _step_forward(self, t: int, state: Array) -> None:
        gates = self._gates[t]
        self._product *= self._gate_scale
        np.tanh(self._product, out=gates)
        gates *= self._gate_scale
        gates += self._gate_offset
        i, f, g, o = np.split(gates, 4, 1)
        cell = np.multiply(f, self._cells[t], out=self._cells[t + 1])
        cell += i * g
        np.multiply(o, np.tanh(cell, out=self._cell_tanh[t]), out=state)

    def _step_backward(self, t: int, state_gradient: Array) -> None:
        gates = self._gates[t]
        cell_tanh = self._cell_tanh[t]
        i, f, g, o = np.split(gates, 4, 1)
        di, df, dg, do = np.split(self._product, 4, 1)
        cell_gradient = state_gradient * o  # of the cell
        cell_gradient *= 1 - cell_tanh * cell_tanh
        if t + 2 < len(self._states):
            cell_gradient += self._cell_gradient
        np.multiply(state_gradient, cell_tanh, out=do)
        np.multiply(cell_gradient, g, out=di)
        np.multiply(cell_gradient, self._cells[t], out=df)
        np.multiply(cell_gradient, i, out=dg)
        self._product *= (1 - gates) * (gates + self._derivative_offset)
        self._cell_gradient = np.multiply(cell_gradient, f, out=cell_gradient)


EVALUATORS: dict[str, type[Any]] = {
    "ConvEvaluator": _ConvolutionalEvaluator,
    "RnnEvaluator": _RecurrentEvaluator,
    "LstmEvaluator": _LstmEvaluator,
}
