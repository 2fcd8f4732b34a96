"""What a party minimises, f_k + Σ terms, written for one party and computed for a stack of them.

There are three ways to compute a stack. *Stacked*: all parties at once by operations with a party axis, for small
models of common layers. *Vectorised*: all at once by `torch.vmap`, for other small models. *Looped*: one party after
another, for large models and for modules that draw random numbers or that vmap cannot take (an `nn.LSTM`, say).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ..core import Loss, Memory, Sight, Term
from ..errors import ModelError
from ..flat import Net
from ..settings import value_at
from .stacked import kernel_of

STACKED, VECTORISED, LOOPED = "stacked", "vectorised", "looped"

Outcome: TypeAlias = tuple[Tensor, Tensor, Tensor]


def private_columns(
    terms: Sequence[Term], received: Tensor, memory: Memory, draws: Callable[[str], np.random.Generator]
) -> list[Tensor]:
    """The private columns of each term: remembered, or begun from what was received."""
    columns = []
    for term in terms:
        own = memory.get(f"private.{term.name}")
        if own is None:
            own = received.new_empty(0) if term.begin is None else term.begin(received, draws(term.name))
        columns.append(own)
    return columns


@dataclass(frozen=True)
class Objective:
    """The local objective of a party: its loss and the terms that the algorithm adds."""

    net: Net
    loss: Loss
    terms: tuple[Term, ...]
    widths: tuple[int, ...]  # how many private columns each term owns

    def strengths(self, round: int, names: Sequence[str], like: Tensor) -> Tensor:
        """The factor before each term for each party, ``[K, terms]``."""
        values = [[value_at(term.strength, round, name) for term in self.terms] for name in names]
        return like.new_tensor(values).reshape(len(names), len(self.terms))

    def descent(self, way: str, columns: Tensor, statistics: Tensor, *rest: Tensor) -> Outcome:
        """The gradient ``[K, d + private]`` of what is minimised, the losses ``[K]`` and new statistics ``[K, s]``."""
        if way == LOOPED and not self.terms:
            return self._alone(columns, statistics, *rest[-2:])
        leaf = columns.detach().requires_grad_()
        totals, losses, after = self.stacked(way, leaf, statistics, *rest)
        (gradient,) = torch.autograd.grad(totals.sum(), leaf)
        return gradient, losses.detach(), after.detach()

    def _alone(self, columns: Tensor, statistics: Tensor, x: Tensor, y: Tensor) -> Outcome:
        """One party without terms: the module runs as it is."""
        after = statistics.clone()
        output, parameters = self.net.run(columns[0], after[0], x[0])
        loss = self.loss(output, y[0]).mean()
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        return flat.unsqueeze(0), loss.detach().unsqueeze(0), after

    def stacked(self, way: str, columns: Tensor, statistics: Tensor, *rest: Tensor) -> Outcome:
        """What is minimised ``[K]``, the losses alone ``[K]`` and new statistics ``[K, s]`` of a stack of columns."""
        alone = columns.shape[0] == 1
        if way == LOOPED:
            if not alone:
                raise ValueError("the looped way takes one party at a time")
            total, loss, after = self.one(columns[0], statistics[0], *(part[0] for part in rest))
            return total.unsqueeze(0), loss.unsqueeze(0), after.unsqueeze(0)
        parts = (columns, statistics, *rest)
        if alone:  # one party rounds otherwise than many: a lone one is computed as two
            parts = tuple(part.expand(2, *part.shape[1:]) for part in parts)
        totals, losses, after = self._all(*parts) if way == STACKED else torch.vmap(self.one)(*parts)
        return (totals[:1], losses[:1], after[:1]) if alone else (totals, losses, after)

    def _all(
        self, columns: Tensor, statistics: Tensor, received: Tensor, strengths: Tensor, x: Tensor, y: Tensor
    ) -> Outcome:
        """The whole stack by its kernel; only the terms, written for one party, go through vmap."""
        kernel = kernel_of(self.net)
        if isinstance(kernel, str):
            raise ModelError(f"{type(self.net.module).__name__} cannot be stacked: {kernel}.")
        w, *private = torch.split_with_sizes(columns, [received.shape[-1], *self.widths], dim=1)
        output = kernel(w, x)
        totals = losses = self._losses(output, y)
        for i, term in enumerate(self.terms):
            value = torch.vmap(partial(self._term, term))(w, received, private[i], x, y, output)
            totals = totals + strengths[:, i] * value
        return totals, losses, statistics

    def _losses(self, output: Tensor, y: Tensor) -> Tensor:
        if self.loss is functional.cross_entropy and output.ndim == 3 and y.ndim == 2:
            each = functional.cross_entropy(output.flatten(0, 1), y.flatten(), reduction="none")
            return each.view(y.shape).mean(1)
        return torch.vmap(self._mean_loss)(output, y)

    def _mean_loss(self, output: Tensor, y: Tensor) -> Tensor:
        return self.loss(output, y).mean()

    def _term(
        self, term: Term, w: Tensor, received: Tensor, own: Tensor, x: Tensor, y: Tensor, output: Tensor
    ) -> Tensor:
        return term.value(Sight(w, received, own, x, y, output, {}, {}, self._elsewhere, self.loss))

    def _elsewhere(self, parameters: Tensor, inputs: Tensor) -> Tensor:
        return self.net.apply(parameters, parameters.new_empty(0), inputs)[0]

    def one(
        self, columns: Tensor, statistics: Tensor, received: Tensor, strengths: Tensor, x: Tensor, y: Tensor
    ) -> Outcome:
        """What one party minimises on one batch, its loss alone, and its statistics afterwards."""
        w, *private = torch.split_with_sizes(columns, [received.shape[-1], *self.widths])
        points = tuple(dict.fromkeys(point for term in self.terms for point in term.points))
        seen: dict[str, Tensor] = {}
        seen_received: dict[str, Tensor] = {}

        def elsewhere(parameters: Tensor, inputs: Tensor) -> Tensor:
            return self.net.apply(parameters, statistics, inputs)[0]

        with ExitStack() as stack:
            if points:
                stack.enter_context(self.net.watch(points, seen))
            output, after = self.net.apply(w, statistics, x)
        if points:
            with self.net.watch(points, seen_received), torch.no_grad():
                elsewhere(received, x)
        total = loss = self.loss(output, y).mean()
        for i, term in enumerate(self.terms):
            sight = Sight(w, received, private[i], x, y, output, seen, seen_received, elsewhere, self.loss)
            total = total + strengths[i] * term.value(sight)
        return total, loss, after
