"""What a party minimises, f_k + Σ terms, written for one party; `descent` computes it for a stack of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from ..core import Loss, Memory, Sight, Term
from ..flat import Net
from ..settings import value_at

Outcome: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""What is minimised, the loss alone, and the statistics afterwards."""


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
        if not self.terms:
            return like.new_empty(len(names), 0)
        values = [[value_at(term.strength, round, name) for term in self.terms] for name in names]
        return like.new_tensor(values).reshape(len(names), len(self.terms))

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
