"""The party's side of secure aggregation: a key before training, and a masked update after it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ...algorithms.components import sample_weights
from ...core.algorithm import SecureSettings
from ...core.messages import Reply, Task
from ...errors import DescantError, EngineError, SettingError
from ...storage.vault.private_keys import PrivateKey
from . import pairwise_masks
from .pairwise_masks import Cohort

if TYPE_CHECKING:
    from ...rounds.party_side import TaskResult
    from ...rounds.plan import Plan

KEY_ARRAY = "key"
SAMPLES_METRIC = "samples"
"""The array and the metric of a reply to a task of the kind "keys"."""
COHORT_SETTING = "cohort"
KEYS_ARRAY = "keys"
WEIGHTS_ARRAY = "weights"
"""The setting and the arrays of a training task that describe the cohort."""


def key_reply(plan: Plan, task: Task) -> TaskResult:
    """Return a party's public key of a round, and its sample count if updates are weighted by it."""
    _secure_settings(plan)
    public = torch.frombuffer(bytearray(_round_key(plan, task).public), dtype=torch.uint8)
    is_weighted = plan.algorithm.compute_weights is sample_weights
    metrics = {SAMPLES_METRIC: _party_weight(plan, task.party)} if is_weighted else {}
    return Reply(task.party, task.round, task.kind, arrays={KEY_ARRAY: public}, metrics=metrics), None


def mask_reply(plan: Plan, task: Task, answer: TaskResult) -> TaskResult:
    """Return a training reply with masked arrays, or a declined reply with the reason."""
    report, party_state = answer
    if plan.algorithm.secure_aggregation is None or report.status != "ok":
        return answer
    try:
        return replace(report, arrays=_masked_arrays(plan, task, report)), party_state
    except DescantError as error:
        return Reply(task.party, task.round, task.kind, status="declined", reason=str(error)), None


def _masked_arrays(plan: Plan, task: Task, report: Reply) -> dict[str, Tensor]:
    key = _round_key(plan, task)
    global_model = task.arrays["global_model"]
    cohort = _checked_cohort(plan, task, key.public)
    received = plan.net.layout.split(global_model)
    sends_model = plan.algorithm.reply_content == "model"
    changes = [sent.double() - received[name].double() * sends_model for name, sent in report.arrays.items()]
    numbers = pairwise_masks.to_fixed_point(
        torch.cat([change.reshape(-1) for change in changes]), cohort.share(task.party)
    )
    masked = pairwise_masks.add_masks(numbers, task.party, key, cohort, cohort.digest(task.round, global_model))
    parts = torch.split(torch.from_numpy(masked.view(np.int64)), [change.numel() for change in changes])
    return {name: part.view(sent.shape) for (name, sent), part in zip(report.arrays.items(), parts, strict=True)}


def _checked_cohort(plan: Plan, task: Task, public: bytes) -> Cohort:
    """Return the task's cohort, checked against everything that the party knows itself."""
    cohort = _read_cohort(task)
    min_parties = _secure_settings(plan).min_parties
    own_weight = _party_weight(plan, task.party)
    count = len(cohort.names)
    if count < min_parties:
        raise EngineError(f"a sum of {count} does not hide its update: it requires at least {min_parties}.")
    if len({cohort.key(name) for name in cohort.names}) < count:
        raise EngineError("two parties of the cohort have the same key: one of them may be forged.")
    if cohort.key(task.party) != public:
        raise EngineError("the cohort has another key for it than the one that it sent.")
    if cohort.weight(task.party) != own_weight:
        raise EngineError(
            f"the cohort gives it the weight {cohort.weight(task.party)}, and its weight is {own_weight}."
        )
    return cohort


def _read_cohort(task: Task) -> Cohort:
    """Parse the cohort of a task, whose content is untrusted."""
    names: object = task.settings.get(COHORT_SETTING)
    keys, weights = (task.arrays.get(name, torch.empty(0)) for name in (KEYS_ARRAY, WEIGHTS_ARRAY))
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names) or task.party not in names:
        raise EngineError(f"it is asked to train without a cohort that includes {task.party!r}.")
    found = (len(set(names)), keys.dtype, tuple(keys.shape), weights.dtype, tuple(weights.shape))
    count = len(names)
    if found != (count, torch.uint8, (count, pairwise_masks.KEY_BYTES), torch.int64, (count,)) or bool(
        (weights < 1).any()
    ):
        raise EngineError(f"a cohort of {count} names must come with a key and a weight for each. Got {found}.")
    return Cohort(tuple(names), keys, weights)


def _round_key(plan: Plan, task: Task) -> PrivateKey:
    """Return the party's key of the round; a simulation hides nothing and uses the run's seed as secret."""
    return pairwise_masks.round_key(plan.secret or str(plan.seed).encode(), plan.seed, task.round, task.party)


def _party_weight(plan: Plan, party: str) -> int:
    return plan.population[party].samples if plan.algorithm.compute_weights is sample_weights else 1


def _secure_settings(plan: Plan) -> SecureSettings:
    if plan.algorithm.secure_aggregation is None:
        raise SettingError(
            f"{plan.algorithm.name} has no secure aggregation. Wrap it: algorithms.SecureAggregation(...)."
        )
    return plan.algorithm.secure_aggregation
