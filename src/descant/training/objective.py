"""What a party minimises, f_k + Σ terms, written for one party; `descent` computes it for a stack of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from ..core.algorithm import Loss, LossContext, LossTerm, NamedTensors
from ..core.settings import value_at
from ..models.flat import Net

ObjectiveResult: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]
"""What is minimised, the loss alone, the statistics afterwards, and the outputs."""


def private_columns(
    terms: Sequence[LossTerm], received: Tensor, memory: NamedTensors, draws: Callable[[str], np.random.Generator]
) -> list[Tensor]:
    """The private columns of each term: remembered, or begun from what was received."""
    columns = []
    for term in terms:
        private = memory.get(f"private.{term.name}")
        if private is None:
            private = (
                received.new_empty(0)
                if term.initial_values is None
                else term.initial_values(received, draws(term.name))
            )
        columns.append(private)
    return columns


@dataclass(frozen=True)
class Objective:
    """The local objective of a party: its loss and the terms that the algorithm adds."""

    net: Net
    loss: Loss
    terms: tuple[LossTerm, ...]
    widths: tuple[int, ...]  # how many private columns each term owns

    def strengths(self, round: int, names: Sequence[str], like: Tensor) -> Tensor:
        """The factor before each term for each party, ``[K, terms]``."""
        if not self.terms:
            return like.new_empty(len(names), 0)
        values = [[value_at(term.strength, round, name) for term in self.terms] for name in names]
        return like.new_tensor(values).reshape(len(names), len(self.terms))

    @cached_property
    def points(self) -> tuple[str, ...]:
        """The values of both models that some term reads."""
        return tuple(dict.fromkeys(point for term in self.terms for point in term.feature_names))

    def party_objective(
        self, columns: Tensor, statistics: Tensor, received: Tensor, strengths: Tensor, x: Tensor, y: Tensor
    ) -> ObjectiveResult:
        """What one party minimises on one batch."""
        parts = torch.split_with_sizes(columns, [received.shape[-1], *self.widths])
        features: dict[str, Tensor] = {}
        received_features: dict[str, Tensor] = {}
        if self.points:
            output, new_statistics, features = self.net.apply_with_points(parts[0], statistics, x, self.points)
            with torch.no_grad():
                received_features = self.net.apply_with_points(received, statistics, x, self.points)[2]
        else:
            output, new_statistics = self.net.apply(parts[0], statistics, x)
        loss = self.loss(output, y).mean()
        if not self.terms:
            return loss, loss, new_statistics, output
        terms = self.weighted_terms(parts, received, strengths, x, y, output, features, received_features, statistics)
        return loss + terms, loss, new_statistics, output

    def weighted_terms(
        self,
        columns: Sequence[Tensor],  # w, and the private columns of each term
        received: Tensor,
        strengths: Tensor,
        x: Tensor,
        y: Tensor,
        output: Tensor,
        features: Mapping[str, Tensor],
        received_features: Mapping[str, Tensor],
        statistics: Tensor | None = None,  # none where there are none, as in models that have a kernel
    ) -> Tensor:
        """What the terms add for one party: Σ strength · value."""

        def apply_module(parameters: Tensor, inputs: Tensor) -> Tensor:
            running = parameters.new_empty(0) if statistics is None else statistics
            return self.net.apply(parameters, running, inputs)[0]

        total = output.new_zeros(())
        for term, strength, private in zip(self.terms, strengths.unbind(), columns[1:], strict=True):
            context = LossContext(
                columns[0],
                received,
                private,
                x=x,
                y=y,
                output=output,
                features=features,
                received_features=received_features,
                apply=apply_module,
                loss=self.loss,
            )
            total = total + strength * term.value(context)
        return total
