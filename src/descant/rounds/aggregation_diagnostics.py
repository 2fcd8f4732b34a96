"""Diagnostics of an aggregation, from numbers that the round has computed: at most two differences ``[K, d]``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..aggregation.penalties import Norm1, Norm2
from ..algorithms.components import FedPlusStep, ProximalAnchor
from ..core.algorithm import Algorithm

RowNorm = Callable[[Tensor], Tensor]
_BLOCK_NUMBERS = 2**17  # numbers of a difference at a time: they fit into the cache
_MAX_ROW_NUMBERS = 2**20  # numbers of a row, or of stacked rows, at a time


@dataclass(frozen=True)
class Diagnostics:
    """The jump of the parties' models at an aggregation, and their distance from the global model."""

    jump: float = math.nan  # mean over parties of ‖start of the next local training - end of the last‖₂
    jump_sd: float = math.nan  # its standard deviation over parties
    max_distance: float = math.nan  # the largest distance from the global model, in the norm that ρ bounds

    def with_max_distance(self, other: float) -> Diagnostics:
        """Return the diagnostics with the larger of two distances."""
        return self if math.isnan(other) or other <= self.max_distance else replace(self, max_distance=other)


def aggregation_diagnostics(
    algorithm: Algorithm, models: Tensor, personal_models: Tensor, global_model: Tensor, d: int
) -> Diagnostics:
    """Return the change at aggregation of Fed+ v2, fig. 1a, over the reported models ``[K, width]``.

    The paper says "the change in neural network parameter values before and after a federated learning aggregation
    step"; we take its length ‖·‖₂ party by party. Where no model moves (λ=0) it is exactly 0.
    """
    start = algorithm.local_start(personal_models, global_model.expand_as(models))
    jumps = torch.zeros(len(models)) if start is models else row_distances(models[:, :d], start[:, :d])
    spread, mean = torch.std_mean(jumps, correction=0)
    return Diagnostics(float(mean), float(spread), max_distance(algorithm, models, global_model, d=d))


def max_distance(algorithm: Algorithm, models: Tensor | Sequence[Tensor], global_model: Tensor, d: int) -> float:
    """Return the largest distance from the global model in the norm that Fed+ compares with ρ; else nan.

    While it is at most ρ, prox(w_k - w̃) is 0: the anchor is the global model, and the aggregate is the mean.
    """
    bound = rho_bounded_anchor(algorithm)
    if bound is None or not len(models):
        return math.nan
    row_norm = euclidean_norms if isinstance(bound.penalty, Norm2) else max_norms
    step = len(models) if isinstance(models, Tensor) else max(1, _MAX_ROW_NUMBERS // d)
    some = (models[at : at + step] for at in range(0, len(models), step))
    stacks = (rows if isinstance(rows, Tensor) else torch.stack(list(rows)) for rows in some)
    return max(
        float(row_distances(rows[:, :d], global_model[:d].expand(len(rows), d), row_norm).max()) for rows in stacks
    )


def rho_bounded_anchor(algorithm: Algorithm) -> ProximalAnchor | None:
    """Return the anchor of a Fed+ method whose ρ may or may not bind: FedGeoMed+ and FedCoMed+."""
    toward = algorithm.proximal_step.anchor_rule if isinstance(algorithm.proximal_step, FedPlusStep) else None
    return toward if isinstance(toward, ProximalAnchor) and isinstance(toward.penalty, Norm1 | Norm2) else None


def euclidean_norms(difference: Tensor) -> Tensor:
    """Return ‖·‖₂ of every row."""
    lengths: Tensor = torch.linalg.vector_norm(difference, dim=1)
    return lengths


def max_norms(difference: Tensor) -> Tensor:
    """Return ‖·‖∞ of every row; torch's own function takes ten times as long."""
    return difference.abs().amax(1)


def row_distances(rows: Tensor, others: Tensor, row_norm: RowNorm = euclidean_norms) -> Tensor:
    """Return the norm of every row's difference, ``[K]``, a few rows at a time.

    >>> row_distances(torch.tensor([[3.0, 4.0], [1.0, 0.0]]), torch.zeros(2, 2))
    tensor([5., 1.])
    """
    step = max(1, _BLOCK_NUMBERS // max(1, rows.shape[1]))
    if rows.shape[1] > _MAX_ROW_NUMBERS:  # the norm of a row is the norm of the norms of its pieces
        pieces = zip(torch.split(rows, _MAX_ROW_NUMBERS, 1), torch.split(others, _MAX_ROW_NUMBERS, 1), strict=True)
        return row_norm(torch.stack([row_distances(a, b, row_norm) for a, b in pieces], 1))
    if len(rows) <= step:
        return row_norm(rows - others)
    parts = zip(torch.split(rows, step), torch.split(others, step), strict=True)
    return torch.cat([row_norm(a - b) for a, b in parts])
