"""The party's side of local differential privacy: it clips and noises its update before sending it."""

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
    """Return a training reply in the form in which it may leave the party."""
    privacy = plan.algorithm.privacy
    report, new_party_state = answer
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
    if torch.equal(noised, change):  # without effect, send the reply unchanged, bit for bit
        arrays = dict(report.arrays)
    private_reply = Reply(task.party, task.round, task.kind, arrays=arrays, metrics={"samples": 1})
    if new_party_state is None or secret is None:
        return private_reply, new_party_state
    return private_reply, {**new_party_state, _NOISE_SECRET: secret}


def check_budget(privacy: PrivacySettings, round: int) -> None:
    """Raise if a reply in this round would exceed the party's budget, or if ε cannot be computed."""
    if privacy.at == "party" and privacy.budget is not None and privacy.epsilon(round) > privacy.budget:
        raise BudgetError(f"its budget of ε={privacy.budget:g} does not allow a reply in round {round}")


def clip_update(privacy: PrivacySettings, update: Tensor) -> Tensor:
    """Return a change ``[d]`` clipped to its maximum norm; zeros if it is not finite."""
    if not is_finite(update):
        return torch.zeros_like(update)
    return update * privacy.clip_factors(torch.linalg.vector_norm(update))


def update_noise(privacy: PrivacySettings, task: Task, clipped: Tensor, secret: Tensor | None) -> Tensor:
    """Return the noise for a clipped change."""
    if not privacy.noise_std:
        return torch.zeros_like(clipped)
    if secret is None:
        drawn = gaussian_mechanism.seeded_noise(task.settings["seed"], task.round, task.party, len(clipped))
    else:
        drawn = gaussian_mechanism.secret_noise(secret.numpy().tobytes(), task.round, task.party, clipped)
    return privacy.noise_std * drawn
