"""FedRL: Federated Reinforcement Learning. Panda, Song, Vendrow (2018).

Agents explore on their own. At intervals all of them adopt the mean of their models, weighted by their rewards.
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
from ..core.settings import check_settings, document_parameters, setting
from ..errors import SettingError
from .components import fixed_hyper, uniform_weights
from .fedavg_and_baselines import FedAvg

RewardMode: TypeAlias = Literal["normalize", "shift", "softmax"]


@document_parameters(
    weights="how much each agent's model counts",
    mode="how rewards become weights: as they are, less the lowest, or by softmax",
    beta="β of softmax, per unit of reward",
    period="the work of the first round; None: the solver's own",
    factor="the factor on the work from round to round",
    total="the work after which training ends; None: no limit",
)
def FedRL(
    weights: Literal["reward", "uniform", "max"] = "reward",
    mode: RewardMode = "normalize",
    beta: float = 0.01,
    period: int | None = None,
    factor: float = 1.0,
    total: int | None = None,
) -> Algorithm:
    """Algorithm 1: the global model is the mean of the agents' models weighted by their rewards, Σ r·w / Σ r.

    "uniform" is the paper's dataset magnitude, "max" copies the best agent's model, and `Local` is its independent
    agents. ``period`` is the work of the first round; without it, each round has the solver's own work. Each round
    multiplies it by ``factor``: below 1 it decays (ADAComm), above 1 it grows (§6.3). Work ends at ``total``.

    >>> FedRL(mode="softmax", beta=0.1).compute_weights
    RewardWeights(mode='softmax', beta=0.1)
    """
    by_reward = RewardWeights(mode, beta)
    for part in (_FedRLSettings(weights, period, factor, total=total), by_reward):
        check_settings(part, "FedRL")
    if weights != "reward" and by_reward != RewardWeights():
        raise SettingError(f"The 'mode' and 'beta' of FedRL are for weights='reward'. Got {weights!r}: leave them out.")
    chosen: dict[str, ComputeWeights] = {"reward": by_reward, "uniform": uniform_weights, "max": best_agent_weights}
    if period is None and (factor != 1 or total is not None):
        raise SettingError("The 'factor' and 'total' of FedRL need a 'period': give one, too.")
    tune = fixed_hyper if period is None else Period(period, factor, total)
    return replace(FedAvg(), name="FedRL", compute_weights=chosen[weights], tune=tune)


@dataclass(frozen=True)
class _FedRLSettings:
    weights: str = setting("reward", "how much each agent's model counts", one_of=("reward", "uniform", "max"))
    period: int | None = setting(None, "the work of the first round; None: the solver's own", least=1, whole=True)
    factor: float = setting(1.0, "the factor on the work from round to round", above=0)
    total: int | None = setting(None, "the work after which training ends; None: no limit", least=1, whole=True)


@dataclass(frozen=True)
class RewardWeights:
    """Weights by reward: r_a of Algorithm 1, which prints Σ r·w; here it is divided by Σ r (ERRATA, row 36).

    "normalize" takes the rewards as they are; an agent with a negative one does not count. "shift" subtracts the lowest
    reward first, and "softmax" weights by e^(β·r): both accept rewards of any sign. An agent without a reward yet
    counts as the mean of the others.

    >>> RewardWeights()([{"reward": 30.0}, {"reward": 10.0}, {}])
    tensor([30., 10., 20.], dtype=torch.float64)
    """

    mode: RewardMode = setting(
        "normalize",
        "how rewards become weights: as they are, less the lowest, or by softmax",
        one_of=("normalize", "shift", "softmax"),
    )
    beta: float = setting(0.01, "β of softmax, per unit of reward", least=0)

    def __call__(self, metrics: Sequence[Metrics]) -> Tensor:
        rewards = _fill_unknown_rewards(metrics)
        if bool((rewards == rewards[0]).all()):
            return torch.ones_like(rewards)  # all rewards are equal: the plain mean, whatever the mode
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
    """Return weight 1 for the largest reward and 0 elsewhere (figure 3's "Max"); equal weights before any reward."""
    known = [float(metric.get("reward", math.nan)) for metric in metrics]
    rewards = torch.tensor([reward if math.isfinite(reward) else -math.inf for reward in known])
    if not bool(rewards.isfinite().any()):
        return torch.ones(len(rewards), dtype=torch.float64)
    return torch.nn.functional.one_hot(rewards.argmax(), len(rewards)).double()


def _fill_unknown_rewards(metrics: Sequence[Metrics]) -> Tensor:
    """Return the rewards ``[K]``, unknown ones replaced by the mean of the known."""
    rewards = [float(metric.get("reward", math.nan)) for metric in metrics]
    known = [reward for reward in rewards if math.isfinite(reward)]
    mean = sum(known) / len(known) if known else 0.0
    return torch.tensor([reward if math.isfinite(reward) else mean for reward in rewards], dtype=torch.float64)


_MAX_WORK = 10**12  # work in a round; more is a mistake


@dataclass(frozen=True)
class Period:
    """The work between two merges: c of §6.3, constant, decaying or growing.

    >>> Period(100, 2.0, total=500).lengths()
    [100, 200, 200]
    """

    initial: int = setting(400, "the work of the first round", least=1, whole=True)
    factor: float = setting(1.0, "the factor on the work from round to round", above=0)
    total: int | None = setting(None, "the work after which training ends; None: no limit", least=1, whole=True)

    def __call__(self, context: TuneContext) -> TuneResult:
        self._check()
        work = self._scheduled_length(context.round)
        note = ""
        if self.total is not None:
            done = sum(self._scheduled_length(before) for before in range(1, context.round))
            work = max(0, min(work, self.total - done))
            if not work and done - self._scheduled_length(context.round - 1) < self.total:
                note = f"the total of {self.total} is reached, and agents do nothing from here on"
        return TuneResult(replace(context.hyper, work=work), context.tuner_state, note=note)

    def lengths(self) -> list[int]:
        """Return the work of every round until the total is reached."""
        self._check()
        if self.total is None:
            raise SettingError("A 'period' without a 'total' has no end.")
        lengths = list[int]()
        done = 0
        while done < self.total:
            lengths.append(min(self._scheduled_length(len(lengths) + 1), self.total - done))
            done += lengths[-1]
        return lengths

    def _scheduled_length(self, round: int) -> int:
        """Return the period of a round before the total is applied; it never exceeds the total."""
        powers = math.log(self.initial) + (round - 1) * math.log(self.factor)
        if powers > math.log(self.total or _MAX_WORK) + 1:  # the power might overflow
            if self.total is None:
                raise SettingError(
                    f"A period of {self.initial} that is multiplied by {self.factor} each round exceeds "
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
