"""The local objective f_k + Σ terms, written for one party; `stacked_gradient` computes it for a stack."""

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
"""The objective, the loss alone, the new statistics, and the outputs."""


def private_columns(
    terms: Sequence[LossTerm], received: Tensor, party_state: NamedTensors, draws: Callable[[str], np.random.Generator]
) -> list[Tensor]:
    """Return the private columns of each term, from the party state or initialized from the received model."""
    columns = []
    for term in terms:
        private = party_state.get(f"private.{term.name}")
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
    widths: tuple[int, ...]  # number of private columns of each term

    def strengths(self, round: int, names: Sequence[str], like: Tensor) -> Tensor:
        """Return the factor of each term for each party, ``[K, terms]``."""
        if not self.terms:
            return like.new_empty(len(names), 0)
        values = [[value_at(term.strength, round, name) for term in self.terms] for name in names]
        return like.new_tensor(values).reshape(len(names), len(self.terms))

    @cached_property
    def points(self) -> tuple[str, ...]:
        """The points whose values at least one term reads, in the trained and in the received model."""
        return tuple(dict.fromkeys(point for term in self.terms for point in term.feature_names))

    def party_objective(
        self, columns: Tensor, statistics: Tensor, received: Tensor, strengths: Tensor, x: Tensor, y: Tensor
    ) -> ObjectiveResult:
        """Return the objective of one party on one batch."""
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
        statistics: Tensor | None = None,  # None for models without statistics, as all that have a kernel
    ) -> Tensor:
        """Return Σ strength · value of the terms for one party."""

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
