"""Parties that lie: a simulation of what a centre must stand up to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from ..core.algorithm import Aggregate, Aggregated, Algorithm, Metrics, Weigh
from ..core.settings import check, setting

_FAR = 1e30  # a lie that is not finite does not pass the gate


def Hostile(base: Algorithm, count: int = 1, scale: float = 1.0, reward: float | None = None) -> Algorithm:
    """Any method, with the first ``count`` of those who take part lying to the centre.

    Their models arrive multiplied by ``scale`` (-1 turns them round), and with ``reward`` they claim to have earned so
    much. Their reports pass the gate, as finite lies do. With all parties in every round the liars are always the same.

    >>> import torch
    >>> from descant.algorithms import FedAvg
    >>> Hostile(FedAvg(), 2, scale=-1.0).aggregate(torch.ones(4, 1), torch.ones(4)).point
    tensor([0.])
    """
    aggregate, weigh = Poisoned(base.aggregate, count, scale), Boasting(base.weigh, count, reward)
    for part in (aggregate, weigh):
        check(part, "Hostile")
    return replace(base, name=f"{base.name}, {count} hostile", aggregate=aggregate, weigh=weigh)


@dataclass(frozen=True)
class Poisoned:
    """An aggregate of models of which the first arrive changed."""

    aggregate: Aggregate = setting(help="what the reports add up to", apart=True)
    count: int = setting(1, "how many lie", least=1, whole=True)
    scale: float = setting(1.0, "what their models are multiplied by", least=-_FAR, most=_FAR)

    def __call__(self, models: Tensor, weights: Tensor | None = None) -> Aggregated:
        changed = models.clone()
        changed[: self.count] *= self.scale
        return self.aggregate(changed, weights)


@dataclass(frozen=True)
class Boasting:
    """Weights of reports of which the first have a reward of their own making."""

    weigh: Weigh = setting(help="how much a report counts", apart=True)
    count: int = setting(1, "how many lie", least=1, whole=True)
    reward: float | None = setting(None, "what they say that they have earned; None: the truth", least=-_FAR, most=_FAR)

    def __call__(self, metrics: Sequence[Metrics]) -> Tensor:
        if self.reward is None:
            return self.weigh(metrics)
        claimed = [{**one, "reward": self.reward} for one in metrics[: self.count]]
        return self.weigh([*claimed, *metrics[self.count :]])
