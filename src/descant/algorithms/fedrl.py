"""FedRL: Federated Reinforcement Learning. Panda, Song, Vendrow (2018).

Agents explore on their own, and now and then all of them take the mean of their models, weighted by their rewards.
Observations never leave an agent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from ..core.algorithm import Algorithm, ComputeWeights, Metrics, TuneContext, TuneResult
from ..core.settings import check_settings, setting
from ..errors import SettingError
from .components import fixed_hyper, uniform_weights
from .fedavg import FedAvg

RewardMode: TypeAlias = Literal["normalize", "shift", "softmax"]


def FedRL(
    weights: Literal["reward", "uniform", "max"] = "reward",
    mode: RewardMode = "normalize",
    beta: float = 0.01,
    period: int | None = None,
    factor: float = 1.0,
    total: int | None = None,
) -> Algorithm:
    """Algorithm 1: the centre is the mean of the agents' models weighted by their rewards, Σ r·w / Σ r.

    "uniform" is the paper's dataset magnitude, "max" copies the best agent's model, and `Local` is its independent
    agents. ``period`` is the solver's work a round, if it is not the solver's own; it is multiplied by ``factor`` each
    round: below 1 it decays (ADAComm), above 1 it grows (§6.3). With ``total`` all work ends there.

    >>> FedRL(mode="softmax", beta=0.1).weigh
    ByReward(mode='softmax', beta=0.1)
    """
    by_reward = RewardWeights(mode, beta)
    for part in (_FedRLSettings(weights, period, factor, total=total), by_reward):
        check_settings(part, "FedRL")
    if weights != "reward" and by_reward != RewardWeights():
        raise SettingError(f"The 'mode' and 'beta' of FedRL are for weights='reward'. Got {weights!r}: leave them out.")
    chosen: dict[str, ComputeWeights] = {"reward": by_reward, "uniform": uniform_weights, "max": best_agent_weights}
    if period is None and (factor != 1 or total is not None):
        raise SettingError("The 'factor' and 'total' of FedRL go with a 'period': give that, too.")
    tune = fixed_hyper if period is None else Period(period, factor, total)
    return replace(FedAvg(), name="FedRL", compute_weights=chosen[weights], tune=tune)


@dataclass(frozen=True)
class _FedRLSettings:
    weights: str = setting("reward", "how much a report counts", one_of=("reward", "uniform", "max"))
    period: int | None = setting(None, "the solver's work in the first round", least=1, whole=True)
    factor: float = setting(1.0, "what it is multiplied by each round", above=0)
    total: int | None = setting(None, "all work there is", least=1, whole=True)


@dataclass(frozen=True)
class RewardWeights:
    """r_a of Algorithm 1, which prints Σ r·w: here it is divided by Σ r (ERRATA, row 36).

    "normalise" is that, where no reward is negative: who has a negative one does not count. "shift" takes the least
    reward off first, and "softmax" weighs by e^(β·r): both for rewards of any sign. An agent without a reward yet
    counts as the mean of the others.

    >>> ByReward()([{"reward": 30.0}, {"reward": 10.0}, {}])
    tensor([30., 10., 20.], dtype=torch.float64)
    """

    mode: RewardMode = setting("normalize", "how rewards become weights", one_of=("normalize", "shift", "softmax"))
    beta: float = setting(0.01, "β of softmax, for one unit of reward", least=0)

    def __call__(self, metrics: Sequence[Metrics]) -> Tensor:
        rewards = _fill_unknown_rewards(metrics)
        if bool((rewards == rewards[0]).all()):
            return torch.ones_like(rewards)  # the mean, whatever the mode: nobody is better
        if self.mode == "softmax":
            return torch.exp(self.beta * (rewards - rewards.max()))
        weights = rewards - rewards.min() if self.mode == "shift" else rewards.clamp(min=0)
        if not bool(weights.any()):
            raise SettingError(
                f"No reward is above 0 (they are from {rewards.min():.4g} to {rewards.max():.4g}): Σ r·w / Σ r is not "
                "a mean of the models. Use FedRL(mode='shift') or FedRL(mode='softmax')."
            )
        return weights


def best_agent_weights(metrics: Sequence[Metrics]) -> Tensor:
    """The one with the largest reward alone: figure 3's "Max"; all alike, before anybody has one."""
    known = [float(metric.get("reward", math.nan)) for metric in metrics]
    rewards = torch.tensor([reward if math.isfinite(reward) else -math.inf for reward in known])
    if not bool(rewards.isfinite().any()):
        return torch.ones(len(rewards), dtype=torch.float64)
    return torch.nn.functional.one_hot(rewards.argmax(), len(rewards)).double()


def _fill_unknown_rewards(metrics: Sequence[Metrics]) -> Tensor:
    """The rewards ``[K]``; the mean of those that are known stands for one that is not."""
    found = [float(metric.get("reward", math.nan)) for metric in metrics]
    known = [reward for reward in found if math.isfinite(reward)]
    mean = sum(known) / len(known) if known else 0.0
    return torch.tensor([reward if math.isfinite(reward) else mean for reward in found], dtype=torch.float64)


_MAX_WORK = 10**12  # work in a round; more is a mistake


@dataclass(frozen=True)
class Period:
    """How much agents do between two merges: c of §6.3, constant, decaying or growing.

    >>> Period(100, 2.0, total=500).lengths()
    [100, 200, 200]
    """

    initial: int = setting(400, "the solver's work in the first round", least=1, whole=True)
    factor: float = setting(1.0, "what it is multiplied by each round", above=0)
    total: int | None = setting(None, "all work there is: nothing is done after it", least=1, whole=True)

    def __call__(self, context: TuneContext) -> TuneResult:
        self._check()
        work = self._scheduled_length(context.round)
        note = ""
        if self.total is not None:
            done = sum(self._scheduled_length(before) for before in range(1, context.round))
            work = max(0, min(work, self.total - done))
            if not work and done - self._scheduled_length(context.round - 1) < self.total:
                note = f"the total of {self.total} is done, and agents do nothing from here on"
        return TuneResult(replace(context.hyper, work=work), context.tuner_state, note=note)

    def lengths(self) -> list[int]:
        """The work of every round until the total is done."""
        self._check()
        if self.total is None:
            raise SettingError("A 'period' without a 'total' has no end.")
        found = list[int]()
        done = 0
        while done < self.total:
            found.append(min(self._scheduled_length(len(found) + 1), self.total - done))
            done += found[-1]
        return found

    def _scheduled_length(self, round: int) -> int:
        """The period of a round, as if there were no total; one beyond the total is as long as that."""
        powers = math.log(self.initial) + (round - 1) * math.log(self.factor)
        if powers > math.log(self.total or _MAX_WORK) + 1:  # it might be larger than any number
            if self.total is None:
                raise SettingError(
                    f"A period of {self.initial} that is multiplied by {self.factor} each round has grown beyond "
                    f"{_MAX_WORK:,} in round {round}. Give a 'total' of work, or fewer rounds."
                )
            return self.total
        return max(1, math.floor(self.initial * self.factor ** (round - 1)))

    def _check(self) -> None:
        check_settings(self, "FedRL")
        if self.total is not None and self.initial > self.total:
            raise SettingError(
                f"A period of {self.initial} is longer than the run of {self.total}: its agents would never merge. "
                "Use a shorter period, or Local()."
            )
