"""The state of the hyper-parameter tuner, as tensors that are saved with the run."""

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
    """The state of the tuner before a round."""

    psi: Numbers  # [P] ψ_t
    pending_scores: Numbers  # [m, P] scores of draws whose reward is not known yet, oldest first
    scores: Numbers  # [n, P] of the last draws whose reward is known, each at its own ψ_τ
    rewards: Numbers  # [n] their rewards
    loss: float = math.nan  # L_t, the last known
    first_loss: float = math.nan  # L_1
    lowest_loss: float = math.inf
    lowest_loss_round: int = 0  # the round that ended with the lowest loss
    silent_rounds: int = 0  # rounds without a loss
    # [1] the running mean of clients' losses; None: no loss since the start or the last rollback
    loss_average: Numbers | None = None
    lowest_loss_psi: Numbers | None = None  # [P] ψ at the lowest loss
    lowest_loss_model: Tensor | None = None  # [width] the global model with the lowest loss
    start_model: Tensor | None = None  # [width] the global model at the start of the last round

    @classmethod
    def from_tensors(cls, tensors: NamedTensors) -> TunerState:
        fields: dict[str, Any] = {
            n: t if n in ("lowest_loss_model", "start_model") else t.numpy() for n, t in tensors.items()
        }
        loss, first, lowest, lowest_at, silent = fields.pop("numbers").tolist()
        return cls(
            **fields,
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
