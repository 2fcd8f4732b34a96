"""Where a run stands, and what happened in one round of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..core.algorithm import Hyper, Memory, Metrics
from ..core.interfaces import Store
from ..core.messages import ASKED, REAL_ONLY, Report
from .diagnostics import Gauges
from .party_evaluation import JUDGED
from .plan import RECEIVED, VALIDATION, Plan
from .validation import Refusal

STALENESS = "staleness"
"""The metric that says by how many versions of the centre a report is late."""

USED = "used"
"""The share of the models that came in a round which could be used."""

PRESENT, STOOD_IN, ABSENT, NEVER_SEEN = "p", "s", "a", "."
"""What a party was in a round: it trained, a stand-in did, nobody did, or it had never trained before either."""
MOST_SHOWN = 100  # parties whose presence a round keeps: as many as a picture can show


_BY_PLACE = ("attend", "stand_in", "anew")  # what remembers a number a party, in the parties' order; 0: nothing yet
_RECORDED = (VALIDATION, RECEIVED, STALENESS, "clock")


@dataclass(frozen=True)
class Judged:
    """A party's test score before and after its local work of one round."""

    round: int
    before: float
    after: float


@dataclass(frozen=True)
class State:
    """All that a run needs to go on, beside the parties' memories, which the engine keeps."""

    round: int
    center: Tensor  # [width] w̃
    initial: Tensor  # [width] the model that everybody began with
    way: str  # how stacks are computed: chosen once, and kept on resume
    own: Store  # w_k of the parties that ever trained, where the algorithm keeps them: there is one, at one round
    memories: Mapping[str, Memory] = field(default_factory=dict)  # what the server's answers remember, by their name
    feedback: Metrics = field(default_factory=dict)  # the metrics of the last round, for `tune`
    judged: Mapping[str, Judged] = field(default_factory=dict)  # by party: its last local work that was judged

    def attended(self, plan: Plan) -> Tensor:
        """How many rounds each party has trained in, ``[parties]``, in their order."""
        counted = self.memories.get("attend", {}).get("rounds")
        return torch.zeros(len(plan.people), dtype=torch.int32) if counted is None else counted


def with_room(state: State, count: int) -> State:
    """The same state for so many parties: those who have come since stand behind the others."""
    memories = {
        answer: {name: _padded(tensor, count) for name, tensor in memory.items()} if answer in _BY_PLACE else memory
        for answer, memory in state.memories.items()
    }
    return replace(state, memories=memories)


def _padded(tensor: Tensor, count: int) -> Tensor:
    return torch.cat([tensor, tensor.new_zeros(count - len(tensor), *tensor.shape[1:])])


@dataclass(frozen=True)
class Round:
    """What happened in one round, and the state after it."""

    index: int
    state: State
    present: Mapping[str, Hyper]
    accepted: tuple[str, ...]
    refusals: tuple[Refusal, ...]
    gap: float  # the centre's distance from optimality
    change: float  # ‖w̃ after - w̃ before‖₂
    seconds: float
    note: str = ""  # why the model did not change, if it did not
    norm: float = math.nan  # ‖w̃‖₂ after the round
    gauges: Gauges = field(default_factory=Gauges)
    judged: tuple[str, ...] = ()  # who judged its own local work
    tuning: Metrics = field(default_factory=dict)  # lr, work and the tuner's own numbers, where a tuner is at work
    tuned: str = ""  # what the tuner did beyond tuning, if it did
    stood_in: tuple[str, ...] = ()  # for whom somebody else answered
    presence: str = ""  # a letter a party, in their order: p, s, a or . (see PRESENT); "" where there are too many
    metrics: Mapping[str, Metrics] = field(default_factory=dict)  # what each of the accepted reports says of itself

    @property
    def loss(self) -> float:
        """The mean training loss over the accepted reports; nan if nobody took a step."""
        return self.state.feedback.get("loss", math.nan)

    @property
    def told(self) -> str:
        """The round in a few words, for a progress bar: the loss, and of agents what they reach and how fast."""
        found = [] if math.isnan(self.loss) else [f"loss {self.loss:.4f}"]
        steps = sum(metrics.get("samples", 0) for metrics in self.metrics.values())
        if "reward" in self.state.feedback:
            found.append(f"reward {self.state.feedback['reward']:.4g}")
            found += [f"{steps / self.seconds:,.0f} steps/s"] if self.seconds else []
        return ", ".join(found) or "–"

    def numbers(self) -> dict[str, Any]:
        """The round as one flat record; what was not judged, not validated or not tuned is not in it."""
        record = {name: getattr(self, name) for name in ("loss", "gap", "change", "norm")}
        record |= {"present": len(self.present), "accepted": len(self.accepted), "seconds": self.seconds}
        record |= self._rewards()
        judged = [self.state.judged[name] for name in self.judged]
        means = {name: sum(getattr(found, name) for found in judged) / len(judged) for name in JUDGED if judged}
        measured = {name: value for name, value in self.state.feedback.items() if name in _RECORDED}
        record |= {**vars(self.gauges), **means, **measured, **self.tuning}
        record |= {"stood_in": len(self.stood_in)} if "stand_in" in self.state.memories else {}
        said = {"tuned": self.tuned, "presence": self.presence, REAL_ONLY: self.real_only}
        return {"round": self.index, **record, **{name: found for name, found in said.items() if found}}

    @property
    def real_only(self) -> dict[str, float]:
        return {party: said[REAL_ONLY] for party, said in self.metrics.items() if REAL_ONLY in said}

    def _rewards(self) -> dict[str, Any]:
        """Of agents: what they earned, all together and, while a picture can show them, each; and their steps."""
        if "reward" not in self.state.feedback:
            return {}
        each = {party: said["reward"] for party, said in self.metrics.items() if "reward" in said}
        steps = sum(said.get("samples", 0) for said in self.metrics.values()) / max(1, len(self.metrics))
        shown = {"rewards": each} if len(self.metrics) <= MOST_SHOWN else {}
        return {"reward": self.state.feedback["reward"], "steps": steps, **shown}


def feedback_of(accepted: Sequence[Report]) -> dict[str, float]:
    """The mean of every metric over the reports that have it; one that is not finite says nothing."""
    values: dict[str, list[float]] = {}
    for report in accepted:
        for name, value in report.metrics.items():
            if math.isfinite(value) and name not in (*JUDGED, ASKED):  # who looks must not change what `tune` sees
                values.setdefault(name, []).append(float(value))
    return {name: sum(value / len(found) for value in found) for name, found in values.items()}


def used_of(accepted: Sequence[Report], refusals: Sequence[Refusal], note: str) -> dict[str, float]:
    """The share of the models that came which could be used: not of those who diverged. Without a model it is unknown.

    What a party or a line failed at says nothing of its model.
    """
    came = len(accepted) + sum(bool(refusal.tensor) for refusal in refusals)
    return {USED: 0.0 if note else len(accepted) / came} if came else {}


def judgements_of(accepted: Sequence[Report], index: int) -> dict[str, Judged]:
    """What parties said of their own local work, as far as they have a test set."""
    judged = [report for report in accepted if all(name in report.metrics for name in JUDGED)]
    return {report.party: Judged(index, *(float(report.metrics[name]) for name in JUDGED)) for report in judged}


def presence_of(plan: Plan, after: State, counted: Sequence[str], stood_in: Sequence[str]) -> str:
    """What everybody was in the round that led to a state, a letter a party."""
    if len(plan.people) > MOST_SHOWN:
        return ""
    known = {**dict.fromkeys(stood_in, STOOD_IN), **dict.fromkeys(counted, PRESENT)}
    seen = after.attended(plan).tolist()
    return "".join(known.get(name, ABSENT if seen[k] else NEVER_SEEN) for k, name in enumerate(plan.people))


def presence_in(accepted: NDArray[np.bool_], stood_in: NDArray[np.bool_]) -> list[str]:
    """The same of rounds that were recorded, ``[rounds, parties]`` each."""
    if accepted.shape[1] > MOST_SHOWN:
        return []
    seen = np.maximum.accumulate(accepted, axis=0)
    letters = np.select([accepted, stood_in, seen], [PRESENT, STOOD_IN, ABSENT], NEVER_SEEN)
    return ["".join(row) for row in letters.tolist()]
