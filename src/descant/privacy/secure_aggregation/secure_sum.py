"""The driver's side of secure aggregation: keys before the work, and of the work the sum alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...core.algorithm import Hyper
from ...core.interfaces import Engine
from ...core.messages import Report, Task
from ...errors import DescantError
from ...rounds.dispatch import gather
from ...rounds.plan import Plan
from ...rounds.validation import Refusal, counts
from ...storage.vault.private_keys import PrivateKey
from .pairwise_masks import KEY_BYTES, Cohort, summed
from .party_masking import COHORT, KEY, KEYS, SAMPLES, WEIGHTS


@dataclass(frozen=True)
class Gathered:
    """Who takes part in a round once keys are exchanged, where that is done, and who does not, and why."""

    present: Mapping[str, Hyper]
    cohort: Cohort | None = None
    refusals: tuple[Refusal, ...] = ()

    def told(self, tasks: Iterable[Task]) -> list[Task]:
        """Tasks of training that say with whom a party's work is added up."""
        if self.cohort is None:
            return list(tasks)
        arrays, names = {KEYS: self.cohort.keys, WEIGHTS: self.cohort.weights}, list(self.cohort.names)
        return [
            replace(task, arrays={**task.arrays, **arrays}, settings={**task.settings, COHORT: names}) for task in tasks
        ]


def gathered(plan: Plan, engine: Engine, present: Mapping[str, Hyper], index: int) -> Gathered:
    """Ask all who would take part for their keys, where work is added up unseen; too few of them are nobody."""
    secure = plan.algorithm.secure
    if secure is None:
        return Gathered(present)
    settings = {"seed": plan.seed, "layout": plan.net.layout.digest}
    found, refusals = dict[str, Report](), list[Refusal]()
    for report in gather(engine, [Task(party, index, "keys", {}, settings, plan.deadline) for party in present]):
        why = _refused(report, present, index)
        if why:
            refusals.append(Refusal(str(report.party), index, why))
        else:
            found[report.party] = report
    times = Counter(_key(report) for report in found.values())
    refusals += [Refusal(name, index, "another has its key, too") for name, r in found.items() if times[_key(r)] > 1]
    names = [name for name in present if name in found and times[_key(found[name])] == 1]
    if len(names) < secure.least:
        return Gathered({}, None, tuple(refusals))
    keys = torch.stack([found[name].arrays[KEY] for name in names])
    weights = torch.tensor([int(found[name].metrics.get(SAMPLES, 1)) for name in names])
    return Gathered({name: present[name] for name in names}, Cohort(tuple(names), keys, weights), tuple(refusals))


def _key(report: Report) -> bytes:
    return bytes(report.arrays[KEY].numpy())


def _refused(report: Report, asked: Collection[str], index: int) -> str:
    """Why an answer has no key that could be used; "" if it has one. Whatever came over a wire may be anything."""
    if report.status != "ok":
        return f"it gave no key: {report.status}: {report.reason}"
    if report.party not in asked or report.round != index or report.kind != "keys":
        return f"an answer to another task: {report.kind!r:.40} of round {report.round!r:.40}"
    key = report.arrays.get(KEY)
    if not isinstance(key, Tensor) or key.dtype != torch.uint8 or tuple(key.shape) != (KEY_BYTES,):
        return f"its key has not {KEY_BYTES} bytes"
    if not counts(report.metrics.get(SAMPLES, 1)):
        return f"absurd sample count: {report.metrics[SAMPLES]!r:.40}"
    try:
        PrivateKey.new().agree(_key(report))
    except DescantError as error:
        return str(error)
    return ""


def unopened(plan: Plan, accepted: Sequence[Report], asked: Collection[str]) -> str:
    """Why nothing can be added up; "" if it can."""
    secure, heard = plan.algorithm.secure, {report.party for report in accepted}
    if secure is not None and len(asked) < secure.least:
        return f"fewer than {secure.least} parties gave keys for a sum that hides each of them"
    missing = [name for name in asked if name not in heard]
    if not missing:
        return ""
    more = "" if len(missing) <= 10 else f" and {len(missing) - 10} more"
    return f"the sum cannot be opened without the work of {', '.join(map(repr, missing[:10]))}{more}"


def mean_of(plan: Plan, center: Tensor, accepted: Sequence[Report]) -> Tensor:
    """The mean of all models ``[width]``, of which nobody has seen one; private columns keep the centre's values."""
    row = center.to(torch.float64, copy=True)
    for name in accepted[0].arrays:
        begin, end = plan.net.layout.range_of(name)
        row[begin:end] += summed([report.arrays[name] for report in accepted]).reshape(-1)
        if name.endswith("running_var"):
            row[begin:end].clamp_(min=0)  # a mean of zeros is a step below them, now and then
    return row.to(center.dtype)
