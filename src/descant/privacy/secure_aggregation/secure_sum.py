"""The server's side of secure aggregation: it exchanges keys before training and sees only the sum."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...core.algorithm import Hyper
from ...core.interfaces import Engine
from ...core.messages import Reply, Task
from ...errors import DescantError
from ...rounds.dispatch import iterate_replies
from ...rounds.plan import Plan
from ...rounds.validation import Rejection, is_sample_count
from ...storage.vault.private_keys import PrivateKey
from .pairwise_masks import KEY_BYTES, Cohort, unmasked_sum
from .party_masking import COHORT_SETTING, KEY_ARRAY, KEYS_ARRAY, SAMPLES_METRIC, WEIGHTS_ARRAY


@dataclass(frozen=True)
class KeyExchange:
    """The participants of a round after the key exchange, their cohort, and the rejected parties."""

    participants: Mapping[str, Hyper]
    cohort: Cohort | None = None
    rejections: tuple[Rejection, ...] = ()

    def add_cohort(self, tasks: Iterable[Task]) -> list[Task]:
        """Return training tasks that carry the cohort, if there is one."""
        if self.cohort is None:
            return list(tasks)
        arrays = {KEYS_ARRAY: self.cohort.keys, WEIGHTS_ARRAY: self.cohort.weights}
        names = list(self.cohort.names)
        return [
            replace(task, arrays={**task.arrays, **arrays}, settings={**task.settings, COHORT_SETTING: names})
            for task in tasks
        ]


def exchange_keys(plan: Plan, engine: Engine, participants: Mapping[str, Hyper], index: int) -> KeyExchange:
    """Ask all participants for their keys, if the method needs them; with too few keys no party takes part."""
    secure = plan.algorithm.secure_aggregation
    if secure is None:
        return KeyExchange(participants)
    settings = {"seed": plan.seed, "layout": plan.net.layout.digest}
    replies = dict[str, Reply]()
    rejections = list[Rejection]()
    tasks = [Task(party, index, "keys", arrays={}, settings=settings, deadline=plan.deadline) for party in participants]
    for report in iterate_replies(engine, tasks):
        reason = _key_fault(report, participants, index)
        if reason:
            rejections.append(Rejection(str(report.party), index, reason))
        else:
            replies[report.party] = report
    key_counts = Counter(_key_bytes(report) for report in replies.values())
    rejections += [
        Rejection(name, index, "another party has the same key")
        for name, reply in replies.items()
        if key_counts[_key_bytes(reply)] > 1
    ]
    names = [name for name in participants if name in replies and key_counts[_key_bytes(replies[name])] == 1]
    if len(names) < secure.min_parties:
        return KeyExchange({}, None, tuple(rejections))
    keys = torch.stack([replies[name].arrays[KEY_ARRAY] for name in names])
    weights = torch.tensor([int(replies[name].metrics.get(SAMPLES_METRIC, 1)) for name in names])
    return KeyExchange(
        {name: participants[name] for name in names}, Cohort(tuple(names), keys, weights), tuple(rejections)
    )


def _key_bytes(report: Reply) -> bytes:
    return bytes(report.arrays[KEY_ARRAY].numpy())


def _key_fault(report: Reply, asked: Collection[str], index: int) -> str:
    """Return why a reply, which is untrusted, has no usable key; "" if it has one."""
    if report.status != "ok":
        return f"it sent no key: {report.status}: {report.reason}"
    if report.party not in asked or report.round != index or report.kind != "keys":
        return f"a reply to another task: {report.kind!r:.40} of round {report.round!r:.40}"
    key = report.arrays.get(KEY_ARRAY)
    if not isinstance(key, Tensor) or key.dtype != torch.uint8 or tuple(key.shape) != (KEY_BYTES,):
        return f"its key does not have {KEY_BYTES} bytes"
    if not is_sample_count(report.metrics.get(SAMPLES_METRIC, 1)):
        return f"invalid sample count: {report.metrics[SAMPLES_METRIC]!r:.40}"
    try:
        PrivateKey.new().exchange(_key_bytes(report))
    except DescantError as error:
        return str(error)
    return ""


def missing_masks_reason(plan: Plan, accepted: Sequence[Reply], asked: Collection[str]) -> str:
    """Return why the sum cannot be computed; "" if it can."""
    secure = plan.algorithm.secure_aggregation
    replied = {report.party for report in accepted}
    if secure is not None and len(asked) < secure.min_parties:
        return f"fewer than {secure.min_parties} parties sent keys, too few for a sum that hides each of them"
    missing = [name for name in asked if name not in replied]
    if not missing:
        return ""
    more = "" if len(missing) <= 10 else f" and {len(missing) - 10} more"
    return f"the sum cannot be unmasked without the updates of {', '.join(map(repr, missing[:10]))}{more}"


def secure_mean(plan: Plan, global_model: Tensor, accepted: Sequence[Reply]) -> Tensor:
    """Return the mean of all models ``[width]``; private columns keep the global model's values."""
    row = global_model.to(torch.float64, copy=True)
    for name in accepted[0].arrays:
        begin, end = plan.net.layout.column_range(name)
        row[begin:end] += unmasked_sum([report.arrays[name] for report in accepted]).reshape(-1)
        if name.endswith("running_var"):
            row[begin:end].clamp_(min=0)  # rounding can put a mean of zeros one step below 0
    return row.to(global_model.dtype)
