"""The party's side of local privacy: what leaves it is clipped and noised, and says nothing else of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..core.algorithm import SECRET_STATE, NamedTensors
from ..core.messages import Reply, Task
from ..errors import BudgetError
from ..rounds.validation import is_finite
from . import gaussian_mechanism
from .gaussian_mechanism import PrivacySettings

if TYPE_CHECKING:
    from ..rounds.party_side import TaskResult
    from ..rounds.plan import Plan

_NOISE_SECRET = f"{SECRET_STATE}noise"


def privatize_reply(
    plan: Plan, task: Task, party_state: NamedTensors, global_model: Tensor, answer: TaskResult
) -> TaskResult:
    """An answer to training as it may leave the party."""
    privacy, (report, new_party_state) = plan.algorithm.privacy, answer
    if privacy is None or privacy.at == "server" or report.status != "ok":
        return answer
    check_budget(privacy, task.round)
    received = {name: tensor.double() for name, tensor in plan.net.layout.split(global_model).items()}
    sends_model = plan.algorithm.reply_content == "model"
    changes = {name: sent.double() - received[name] * sends_model for name, sent in report.arrays.items()}
    change = torch.cat([part.reshape(-1) for part in changes.values()])
    secret = party_state.get(_NOISE_SECRET)
    if privacy.source == "system" and secret is None:
        secret = gaussian_mechanism.new_secret()
    clipped = clip_update(privacy, change)
    noised = clipped + update_noise(privacy, task, clipped, secret=secret)
    parts = torch.split_with_sizes(noised, [part.numel() for part in changes.values()])
    arrays = {
        name: (received[name] * sends_model + part.view_as(sent)).to(sent.dtype)
        for (name, sent), part in zip(report.arrays.items(), parts, strict=True)
    }
    if torch.equal(noised, change):  # bit for bit as without
        arrays = dict(report.arrays)
    private_reply = Reply(task.party, task.round, task.kind, arrays=arrays, metrics={"samples": 1})
    return private_reply, new_party_state if new_party_state is None or secret is None else {
        **new_party_state,
        _NOISE_SECRET: secret,
    }


def check_budget(privacy: PrivacySettings, round: int) -> None:
    """Raise if a party may not answer in a round; or cannot count that, for want of what counts it."""
    if privacy.at == "party" and privacy.budget is not None and privacy.epsilon(round) > privacy.budget:
        raise BudgetError(f"its budget of ε={privacy.budget:g} does not allow an answer in round {round}")


def clip_update(privacy: PrivacySettings, update: Tensor) -> Tensor:
    """A change ``[d]``, no longer than it may be; one that is not finite is none."""
    if not is_finite(update):
        return torch.zeros_like(update)
    return update * privacy.clip_factors(torch.linalg.vector_norm(update))


def update_noise(privacy: PrivacySettings, task: Task, clipped: Tensor, secret: Tensor | None) -> Tensor:
    """What is added to a clipped change."""
    if not privacy.noise_std:
        return torch.zeros_like(clipped)
    if secret is None:
        drawn = gaussian_mechanism.seeded_noise(task.settings["seed"], task.round, task.party, len(clipped))
    else:
        drawn = gaussian_mechanism.secret_noise(secret.numpy().tobytes(), task.round, task.party, clipped)
    return privacy.noise_std * drawn
