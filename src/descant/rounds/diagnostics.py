"""What a round says about itself, from numbers that it has at hand anyway: at most two differences ``[K, d]``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..aggregation.penalties import Norm1, Norm2
from ..algorithms.components import FedPlusPull, TowardProx
from ..core.algorithm import Algorithm

Length = Callable[[Tensor], Tensor]
_AT_ONCE = 2**17  # numbers of a difference at a time: so few stay in the cache, and no memory is found anew
_LONGEST = 2**20  # numbers of a row, or of rows that are put together, at a time


@dataclass(frozen=True)
class Gauges:
    """How far the parties were thrown by an aggregation, and how far from the centre they were."""

    jump: float = math.nan  # mean over parties of ‖where the next local work begins - where the last one ended‖₂
    jump_sd: float = math.nan  # its standard deviation over parties
    reach: float = math.nan  # how far the farthest party was from the centre, in the norm that ρ bounds, if one does

    def reaching(self, other: float) -> Gauges:
        """The same, with the farther of two."""
        return self if math.isnan(other) or other <= self.reach else replace(self, reach=other)


def gauged(algorithm: Algorithm, models: Tensor, kept: Tensor, center: Tensor, d: int) -> Gauges:
    """The change at aggregation of Fed+ v2, fig. 1a, over the models ``[K, width]`` that were reported.

    The paper says "the change in neural network parameter values before and after a federated learning aggregation
    step"; we take its length ‖·‖₂ party by party. Where nobody is moved (λ=0) it is 0, not the noise of a difference.
    """
    start = algorithm.start(kept, center.expand_as(models))
    lengths = torch.zeros(len(models)) if start is models else distances(models[:, :d], start[:, :d])
    spread, mean = torch.std_mean(lengths, correction=0)
    return Gauges(float(mean), float(spread), reach(algorithm, models, center, d))


def reach(algorithm: Algorithm, models: Tensor | Sequence[Tensor], center: Tensor, d: int) -> float:
    """How far the farthest model is from the centre, in the norm that the ρ of Fed+ is compared with; else nan.

    While it is at most ρ, prox(w_k - w̃) is 0: the party is drawn to the centre, and the centre is the mean.
    """
    bound = bound_of(algorithm)
    if bound is None or not len(models):
        return math.nan
    length = euclidean if isinstance(bound.penalty, Norm2) else largest
    step = len(models) if isinstance(models, Tensor) else max(1, _LONGEST // d)
    some = (models[at : at + step] for at in range(0, len(models), step))
    stacks = (rows if isinstance(rows, Tensor) else torch.stack(list(rows)) for rows in some)
    return max(float(distances(rows[:, :d], center[:d].expand(len(rows), d), length).max()) for rows in stacks)


def bound_of(algorithm: Algorithm) -> TowardProx | None:
    """The anchor of a Fed+ method whose ρ may or may not bind: FedGeoMed+ and FedCoMed+."""
    toward = algorithm.pull.toward if isinstance(algorithm.pull, FedPlusPull) else None
    return toward if isinstance(toward, TowardProx) and isinstance(toward.penalty, Norm1 | Norm2) else None


def euclidean(difference: Tensor) -> Tensor:
    """‖·‖₂ of every row."""
    lengths: Tensor = torch.linalg.vector_norm(difference, dim=1)
    return lengths


def largest(difference: Tensor) -> Tensor:
    """‖·‖∞ of every row; torch's own takes ten times as long."""
    return difference.abs().amax(1)


def distances(rows: Tensor, others: Tensor, length: Length = euclidean) -> Tensor:
    """The length of every row's difference, ``[K]``, a few rows at a time.

    >>> distances(torch.tensor([[3.0, 4.0], [1.0, 0.0]]), torch.zeros(2, 2))
    tensor([5., 1.])
    """
    step = max(1, _AT_ONCE // max(1, rows.shape[1]))
    if rows.shape[1] > _LONGEST:  # the length of a row is that of the lengths of its pieces
        pieces = zip(torch.split(rows, _LONGEST, 1), torch.split(others, _LONGEST, 1), strict=True)
        return length(torch.stack([distances(a, b, length) for a, b in pieces], 1))
    if len(rows) <= step:
        return length(rows - others)
    parts = zip(torch.split(rows, step), torch.split(others, step), strict=True)
    return torch.cat([length(a - b) for a, b in parts])
