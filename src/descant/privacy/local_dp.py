"""The party's side of local privacy: what leaves it is clipped and noised, and says nothing else of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..core.algorithm import SECRET_STATE, Memory
from ..core.messages import Report, Task
from ..errors import BudgetError
from ..rounds.validation import finite
from . import gaussian_mechanism
from .gaussian_mechanism import Privacy

if TYPE_CHECKING:
    from ..rounds.party_side import Answer
    from ..rounds.plan import Plan

_OWN = f"{SECRET_STATE}noise"


def disguised(plan: Plan, task: Task, before: Memory, center: Tensor, answer: Answer) -> Answer:
    """An answer to training as it may leave the party."""
    privacy, (report, memory) = plan.algorithm.privacy, answer
    if privacy is None or privacy.at == "center" or report.status != "ok":
        return answer
    check_budget(privacy, task.round)
    received = {name: tensor.double() for name, tensor in plan.net.layout.split(center).items()}
    from_center = plan.algorithm.report == "model"
    changes = {name: sent.double() - received[name] * from_center for name, sent in report.arrays.items()}
    change = torch.cat([part.reshape(-1) for part in changes.values()])
    secret = before.get(_OWN)
    if privacy.source == "system" and secret is None:
        secret = gaussian_mechanism.new_secret()
    clipped = clip(privacy, change)
    hidden = clipped + noise(privacy, task, clipped, secret)
    parts = torch.split_with_sizes(hidden, [part.numel() for part in changes.values()])
    arrays = {
        name: (received[name] * from_center + part.view_as(sent)).to(sent.dtype)
        for (name, sent), part in zip(report.arrays.items(), parts, strict=True)
    }
    if torch.equal(hidden, change):  # bit for bit as without
        arrays = dict(report.arrays)
    told = Report(task.party, task.round, task.kind, arrays=arrays, metrics={"samples": 1})
    return told, memory if memory is None or secret is None else {**memory, _OWN: secret}


def check_budget(privacy: Privacy, round: int) -> None:
    """Raise if a party may not answer in a round; or cannot count that, for want of what counts it."""
    if privacy.at == "party" and privacy.budget is not None and privacy.epsilon(round) > privacy.budget:
        raise BudgetError(f"its budget of ε={privacy.budget:g} does not allow an answer in round {round}")


def clip(privacy: Privacy, change: Tensor) -> Tensor:
    """A change ``[d]``, no longer than it may be; one that is not finite is none."""
    if not finite(change):
        return torch.zeros_like(change)
    return change * privacy.factors(torch.linalg.vector_norm(change))


def noise(privacy: Privacy, task: Task, clipped: Tensor, secret: Tensor | None) -> Tensor:
    """What is added to a clipped change."""
    if not privacy.deviation:
        return torch.zeros_like(clipped)
    if secret is None:
        drawn = gaussian_mechanism.by_seed(task.settings["seed"], task.round, task.party, len(clipped))
    else:
        drawn = gaussian_mechanism.by_secret(secret.numpy().tobytes(), task.round, task.party, clipped)
    return privacy.deviation * drawn
