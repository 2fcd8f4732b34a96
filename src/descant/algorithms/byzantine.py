"""A simulation of Byzantine parties, which send false updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from ..core.algorithm import Aggregate, AggregateResult, Algorithm, ComputeWeights, Metrics
from ..core.settings import check_settings, document_parameters, setting

_MAX_SCALE = 1e30  # a value that is not finite would be rejected by validation


@document_parameters(
    base="the method to wrap",
    count="how many parties are Byzantine",
    scale="the factor on their models",
    claimed_reward="the reward that they claim; None: the true one",
)
def ByzantineParties(
    base: Algorithm, count: int = 1, scale: float = 1.0, claimed_reward: float | None = None
) -> Algorithm:
    """Wrap a method so that the first ``count`` participants of a round send false updates.

    Their models arrive multiplied by ``scale`` (-1 reverses them). With ``claimed_reward`` they claim that reward.
    False values are finite, so their replies pass validation. With all parties in every round, the Byzantine parties
    are always the same.

    >>> import torch
    >>> from descant.algorithms import FedAvg
    >>> ByzantineParties(FedAvg(), 2, scale=-1.0).aggregate(torch.ones(4, 1), torch.ones(4)).point
    tensor([0.])
    """
    aggregate = PoisonedAggregator(base.aggregate, count, scale)
    compute_weights = FalseRewardWeights(base.compute_weights, count, claimed_reward)
    for part in (aggregate, compute_weights):
        check_settings(part, "ByzantineParties")
    return replace(base, name=f"{base.name}, {count} hostile", aggregate=aggregate, compute_weights=compute_weights)


@dataclass(frozen=True)
class PoisonedAggregator:
    """An aggregator under attack: it scales the models of the first ``count`` parties before it combines all."""

    aggregate: Aggregate = setting(help="the aggregator that is attacked", own_message=True)
    count: int = setting(1, "how many parties are Byzantine", least=1, whole=True)
    scale: float = setting(1.0, "the factor on their models", least=-_MAX_SCALE, most=_MAX_SCALE)

    def __call__(self, models: Tensor, weights: Tensor | None = None) -> AggregateResult:
        poisoned = models.clone()
        poisoned[: self.count] *= self.scale
        return self.aggregate(poisoned, weights)


@dataclass(frozen=True)
class FalseRewardWeights:
    """A weight function under attack: the first ``count`` parties claim a reward, which may be false."""

    compute_weights: ComputeWeights = setting(help="the weight function that is attacked", own_message=True)
    count: int = setting(1, "how many parties are Byzantine", least=1, whole=True)
    claimed_reward: float | None = setting(
        None, "the reward that they claim; None: the true one", least=-_MAX_SCALE, most=_MAX_SCALE
    )

    def __call__(self, metrics: Sequence[Metrics]) -> Tensor:
        if self.claimed_reward is None:
            return self.compute_weights(metrics)
        falsified = [{**one, "reward": self.claimed_reward} for one in metrics[: self.count]]
        return self.compute_weights([*falsified, *metrics[self.count :]])
