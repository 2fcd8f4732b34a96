"""Parties that lie: a simulation of what a centre must stand up to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from ..core.algorithm import Aggregate, AggregateResult, Algorithm, ComputeWeights, Metrics
from ..core.settings import check_settings, setting

_MAX_SCALE = 1e30  # a lie that is not finite does not pass the gate


def ByzantineParties(
    base: Algorithm, count: int = 1, scale: float = 1.0, claimed_reward: float | None = None
) -> Algorithm:
    """Any method, with the first ``count`` of those who take part lying to the centre.

    Their models arrive multiplied by ``scale`` (-1 turns them round), and with ``reward`` they claim to have earned so
    much. Their reports pass the gate, as finite lies do. With all parties in every round the liars are always the same.

    >>> import torch
    >>> from descant.algorithms import FedAvg
    >>> Hostile(FedAvg(), 2, scale=-1.0).aggregate(torch.ones(4, 1), torch.ones(4)).point
    tensor([0.])
    """
    aggregate = PoisonedAggregator(base.aggregate, count, scale)
    compute_weights = FalseRewardWeights(base.compute_weights, count, claimed_reward)
    for part in (aggregate, compute_weights):
        check_settings(part, "ByzantineParties")
    return replace(base, name=f"{base.name}, {count} hostile", aggregate=aggregate, compute_weights=compute_weights)


@dataclass(frozen=True)
class PoisonedAggregator:
    """An aggregate of models of which the first arrive changed."""

    aggregate: Aggregate = setting(help="what the reports add up to", apart=True)
    count: int = setting(1, "how many lie", least=1, whole=True)
    scale: float = setting(1.0, "what their models are multiplied by", least=-_MAX_SCALE, most=_MAX_SCALE)

    def __call__(self, models: Tensor, weights: Tensor | None = None) -> AggregateResult:
        poisoned = models.clone()
        poisoned[: self.count] *= self.scale
        return self.aggregate(poisoned, weights)


@dataclass(frozen=True)
class FalseRewardWeights:
    """Weights of reports of which the first have a reward of their own making."""

    compute_weights: ComputeWeights = setting(help="how much a report counts", apart=True)
    count: int = setting(1, "how many lie", least=1, whole=True)
    claimed_reward: float | None = setting(
        None, "what they say that they have earned; None: the truth", least=-_MAX_SCALE, most=_MAX_SCALE
    )

    def __call__(self, metrics: Sequence[Metrics]) -> Tensor:
        if self.claimed_reward is None:
            return self.compute_weights(metrics)
        falsified = [{**one, "reward": self.claimed_reward} for one in metrics[: self.count]]
        return self.compute_weights([*falsified, *metrics[self.count :]])
