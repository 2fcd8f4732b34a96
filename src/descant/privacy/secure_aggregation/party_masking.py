"""The party's side of secure aggregation: a key before the work, and work that says nothing but in the sum of all."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ...algorithms.components import by_samples
from ...core.algorithm import Secure
from ...core.messages import Report, Task
from ...errors import DescantError, EngineError, SettingError
from ...storage.vault.private_keys import PrivateKey
from . import pairwise_masks
from .pairwise_masks import Cohort

if TYPE_CHECKING:
    from ...rounds.party_side import Answer
    from ...rounds.plan import Plan

KEY, SAMPLES = "key", "samples"
"""The array and the metric of an answer to a task of the kind "keys"."""
COHORT, KEYS, WEIGHTS = "cohort", "keys", "weights"
"""The setting and the arrays by which a task of training tells with whom a party's work is added up."""


def keyed(plan: Plan, task: Task) -> Answer:
    """A party's public key of a round; and how many samples it has, where work counts by them."""
    _secure(plan)
    public = torch.frombuffer(bytearray(_key(plan, task).public), dtype=torch.uint8)
    metrics = {SAMPLES: _weight(plan, task.party)} if plan.algorithm.weigh is by_samples else {}
    return Report(task.party, task.round, task.kind, arrays={KEY: public}, metrics=metrics), None


def masked(plan: Plan, task: Task, answer: Answer) -> Answer:
    """An answer to training as it may leave the party; where it may not, why."""
    report, memory = answer
    if plan.algorithm.secure is None or report.status != "ok":
        return answer
    try:
        return replace(report, arrays=_hidden(plan, task, report)), memory
    except DescantError as error:
        return Report(task.party, task.round, task.kind, "refused", reason=str(error)), None


def _hidden(plan: Plan, task: Task, report: Report) -> dict[str, Tensor]:
    key, center = _key(plan, task), task.arrays["center"]
    cohort = _checked(plan, task, key.public)
    received, from_center = plan.net.layout.split(center), plan.algorithm.report == "model"
    changes = [sent.double() - received[name].double() * from_center for name, sent in report.arrays.items()]
    numbers = pairwise_masks.fixed(torch.cat([change.reshape(-1) for change in changes]), cohort.share(task.party))
    hidden = pairwise_masks.masked(numbers, task.party, key, cohort, cohort.digest(task.round, center))
    parts = torch.split(torch.from_numpy(hidden.view(np.int64)), [change.numel() for change in changes])
    return {name: part.view(sent.shape) for (name, sent), part in zip(report.arrays.items(), parts, strict=True)}


def _checked(plan: Plan, task: Task, public: bytes) -> Cohort:
    """With whom a party's work is added up, if that hides it; it believes nothing of it that it can know better."""
    cohort, least, own = _cohort(task), _secure(plan).least, _weight(plan, task.party)
    count = len(cohort.names)
    if count < least:
        raise EngineError(f"a sum of {count} does not hide its work: it adds up with {least} at least.")
    if len({cohort.key(name) for name in cohort.names}) < count:
        raise EngineError("two parties of the cohort have the same key: one of them may be made up.")
    if cohort.key(task.party) != public:
        raise EngineError("the cohort has another key for it than the one that it gave.")
    if cohort.weight(task.party) != own:
        raise EngineError(f"the cohort counts it by {cohort.weight(task.party)}, and it counts by {own}.")
    return cohort


def _cohort(task: Task) -> Cohort:
    """As a task tells it, which may be anything."""
    names: object = task.settings.get(COHORT)
    keys, weights = (task.arrays.get(name, torch.empty(0)) for name in (KEYS, WEIGHTS))
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names) or task.party not in names:
        raise EngineError(f"it is asked to train without a cohort that {task.party!r} is in.")
    found = (len(set(names)), keys.dtype, tuple(keys.shape), weights.dtype, tuple(weights.shape))
    count = len(names)
    if found != (count, torch.uint8, (count, pairwise_masks.KEY_BYTES), torch.int64, (count,)) or bool(
        (weights < 1).any()
    ):
        raise EngineError(f"a cohort of {count} names must come with a key and a weight for each. Got {found}.")
    return Cohort(tuple(names), keys, weights)


def _key(plan: Plan, task: Task) -> PrivateKey:
    """Where all parties are simulated nobody is hidden from anybody, and the run's seed will do for a secret."""
    return pairwise_masks.key_of(plan.secret or str(plan.seed).encode(), plan.seed, task.round, task.party)


def _weight(plan: Plan, party: str) -> int:
    return plan.people[party].samples if plan.algorithm.weigh is by_samples else 1


def _secure(plan: Plan) -> Secure:
    if plan.algorithm.secure is None:
        raise SettingError(f"{plan.algorithm.name} hides no work in sums. Wrap it: algorithms.SecureAggregation(...).")
    return plan.algorithm.secure
