"""What the tuner of adaptive hyper-parameters remembers from round to round, as tensors that are saved with the run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...core.algorithm import Memory
from .discrete_gaussian import Numbers


@dataclass(frozen=True)
class Past:
    """All of it, before a round."""

    psi: Numbers  # [P] ψ_t
    waiting: Numbers  # [m, P] scores of draws whose reward is not known yet, the oldest first
    scores: Numbers  # [n, P] of the last draws whose reward is known, each at its own ψ_τ
    rewards: Numbers  # [n] theirs
    loss: float = math.nan  # L_t, the last that is known
    first: float = math.nan  # L_1
    lowest: float = math.inf
    lowest_at: int = 0  # the round that ended with it
    silent: int = 0  # rounds without a loss
    level: Numbers | None = None  # [1] the running mean of clients' losses; None: none since it began, or went back
    psi_there: Numbers | None = None  # [P] ψ when the loss was lowest
    there: Tensor | None = None  # [width] the centre with the lowest loss
    begun: Tensor | None = None  # [width] the centre that the last round began with

    @classmethod
    def of(cls, memory: Memory) -> Past:
        found: dict[str, Any] = {n: t if n in ("there", "begun") else t.numpy() for n, t in memory.items()}
        loss, first, lowest, lowest_at, silent = found.pop("numbers").tolist()
        return cls(**found, loss=loss, first=first, lowest=lowest, lowest_at=int(lowest_at), silent=int(silent))

    def memory(self) -> dict[str, Tensor]:
        numbers = np.array([self.loss, self.first, self.lowest, self.lowest_at, self.silent])
        names = ("psi", "waiting", "scores", "rewards", "level", "psi_there", "there", "begun")
        parts = {name: getattr(self, name) for name in names} | {"numbers": numbers}
        held = {name: part for name, part in parts.items() if part is not None}
        return {name: part if isinstance(part, Tensor) else torch.tensor(part) for name, part in held.items()}
