"""What the tuner of adaptive hyper-parameters remembers from round to round, as tensors that are saved with the run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...core.algorithm import NamedTensors
from .discrete_gaussian import Numbers


@dataclass(frozen=True)
class TunerState:
    """All of it, before a round."""

    psi: Numbers  # [P] ψ_t
    pending_scores: Numbers  # [m, P] scores of draws whose reward is not known yet, the oldest first
    scores: Numbers  # [n, P] of the last draws whose reward is known, each at its own ψ_τ
    rewards: Numbers  # [n] theirs
    loss: float = math.nan  # L_t, the last that is known
    first_loss: float = math.nan  # L_1
    lowest_loss: float = math.inf
    lowest_loss_round: int = 0  # the round that ended with it
    silent_rounds: int = 0  # rounds without a loss
    loss_average: Numbers | None = (
        None  # [1] the running mean of clients' losses; None: none since it began, or went back
    )
    lowest_loss_psi: Numbers | None = None  # [P] ψ when the loss was lowest
    lowest_loss_model: Tensor | None = None  # [width] the centre with the lowest loss
    start_model: Tensor | None = None  # [width] the centre that the last round began with

    @classmethod
    def from_tensors(cls, tensors: NamedTensors) -> TunerState:
        found: dict[str, Any] = {
            n: t if n in ("lowest_loss_model", "start_model") else t.numpy() for n, t in tensors.items()
        }
        loss, first, lowest, lowest_at, silent = found.pop("numbers").tolist()
        return cls(
            **found,
            loss=loss,
            first_loss=first,
            lowest_loss=lowest,
            lowest_loss_round=int(lowest_at),
            silent_rounds=int(silent),
        )

    def to_tensors(self) -> dict[str, Tensor]:
        numbers = np.array([self.loss, self.first_loss, self.lowest_loss, self.lowest_loss_round, self.silent_rounds])
        names = (
            "psi",
            "pending_scores",
            "scores",
            "rewards",
            "loss_average",
            "lowest_loss_psi",
            "lowest_loss_model",
            "start_model",
        )
        parts = {name: getattr(self, name) for name in names} | {"numbers": numbers}
        present = {name: part for name, part in parts.items() if part is not None}
        return {name: part if isinstance(part, Tensor) else torch.tensor(part) for name, part in present.items()}
