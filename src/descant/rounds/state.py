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

from ..core.algorithm import Hyper, Metrics, NamedTensors
from ..core.interfaces import Store
from ..core.messages import CORESET_KEY, REAL_ONLY, Reply
from .diagnostics import Diagnostics
from .party_evaluation import LOCAL_SCORE_NAMES
from .plan import RECEIVED_MODEL_LOSS, VALIDATION_LOSS, Plan
from .validation import Rejection

STALENESS = "staleness"
"""The metric that says by how many versions of the centre a report is late."""

USABLE_SHARE = "used"
"""The share of the models that came in a round which could be used."""

PRESENT = "p"
PROXIED = "s"
ABSENT = "a"
NEVER_SEEN = "."
"""What a party was in a round: it trained, a stand-in did, nobody did, or it had never trained before either."""
MAX_PARTIES_SHOWN = 100  # parties whose presence a round keeps: as many as a picture can show


_BY_PARTY_INDEX = (
    "participation",
    "proxy",
    "reset",
)  # what remembers a number a party, in the parties' order; 0: nothing yet
_RECORDED_METRICS = (VALIDATION_LOSS, RECEIVED_MODEL_LOSS, STALENESS, "clock")


@dataclass(frozen=True)
class LocalScores:
    """A party's test score before and after its local work of one round."""

    round: int
    before: float
    after: float


@dataclass(frozen=True)
class State:
    """All that a run needs to go on, beside the parties' memories, which the engine keeps."""

    round: int
    global_model: Tensor  # [width] w̃
    initial_model: Tensor  # [width] the model that everybody began with
    execution_mode: str  # how stacks are computed: chosen once, and kept on resume
    personal_models: (
        Store  # w_k of the parties that ever trained, where the algorithm keeps them: there is one, at one round
    )
    server_state: Mapping[str, NamedTensors] = field(
        default_factory=dict
    )  # what the server's answers remember, by their name
    feedback: Metrics = field(default_factory=dict)  # the metrics of the last round, for `tune`
    local_scores: Mapping[str, LocalScores] = field(
        default_factory=dict
    )  # by party: its last local work that was judged

    def rounds_trained(self, plan: Plan) -> Tensor:
        """How many rounds each party has trained in, ``[parties]``, in their order."""
        counted = self.server_state.get("participation", {}).get("rounds")
        return torch.zeros(len(plan.population), dtype=torch.int32) if counted is None else counted


def pad_for_parties(state: State, count: int) -> State:
    """The same state for so many parties: those who have come since stand behind the others."""
    memories = {
        answer: {name: _pad_with_zeros(tensor, count) for name, tensor in memory.items()}
        if answer in _BY_PARTY_INDEX
        else memory
        for answer, memory in state.server_state.items()
    }
    return replace(state, server_state=memories)


def _pad_with_zeros(tensor: Tensor, count: int) -> Tensor:
    return torch.cat([tensor, tensor.new_zeros(count - len(tensor), *tensor.shape[1:])])


@dataclass(frozen=True)
class Round:
    """What happened in one round, and the state after it."""

    index: int
    state: State
    participants: Mapping[str, Hyper]
    accepted: tuple[str, ...]
    rejections: tuple[Rejection, ...]
    gap: float  # the centre's distance from optimality
    change: float  # ‖w̃ after - w̃ before‖₂
    seconds: float
    note: str = ""  # why the model did not change, if it did not
    norm: float = math.nan  # ‖w̃‖₂ after the round
    diagnostics: Diagnostics = field(default_factory=Diagnostics)
    locally_scored: tuple[str, ...] = ()  # who judged its own local work
    tuning: Metrics = field(default_factory=dict)  # lr, work and the tuner's own numbers, where a tuner is at work
    tuner_note: str = ""  # what the tuner did beyond tuning, if it did
    proxied: tuple[str, ...] = ()  # for whom somebody else answered
    presence: str = ""  # a letter a party, in their order: p, s, a or . (see PRESENT); "" where there are too many
    metrics: Mapping[str, Metrics] = field(default_factory=dict)  # what each of the accepted reports says of itself

    @property
    def loss(self) -> float:
        """The mean training loss over the accepted reports; nan if nobody took a step."""
        return self.state.feedback.get("loss", math.nan)

    @property
    def summary(self) -> str:
        """The round in a few words, for a progress bar: the loss, and of agents what they reach and how fast."""
        found = [] if math.isnan(self.loss) else [f"loss {self.loss:.4f}"]
        steps = sum(metrics.get("samples", 0) for metrics in self.metrics.values())
        if "reward" in self.state.feedback:
            found.append(f"reward {self.state.feedback['reward']:.4g}")
            found += [f"{steps / self.seconds:,.0f} steps/s"] if self.seconds else []
        return ", ".join(found) or "–"

    def to_record(self) -> dict[str, Any]:
        """The round as one flat record; what was not judged, not validated or not tuned is not in it."""
        record = {name: getattr(self, name) for name in ("loss", "gap", "change", "norm")}
        record |= {"participants": len(self.participants), "accepted": len(self.accepted), "seconds": self.seconds}
        record |= self._rewards()
        local_scores = [self.state.local_scores[name] for name in self.locally_scored]
        means = {
            name: sum(getattr(found, name) for found in local_scores) / len(local_scores)
            for name in LOCAL_SCORE_NAMES
            if local_scores
        }
        measured = {name: value for name, value in self.state.feedback.items() if name in _RECORDED_METRICS}
        record |= {**vars(self.diagnostics), **means, **measured, **self.tuning}
        record |= {"proxied": len(self.proxied)} if "proxy" in self.state.server_state else {}
        texts = {"tuner_note": self.tuner_note, "presence": self.presence, REAL_ONLY: self.real_only}
        return {"round": self.index, **record, **{name: found for name, found in texts.items() if found}}

    @property
    def real_only(self) -> dict[str, float]:
        return {party: said[REAL_ONLY] for party, said in self.metrics.items() if REAL_ONLY in said}

    def _rewards(self) -> dict[str, Any]:
        """Of agents: what they earned, all together and, while a picture can show them, each; and their steps."""
        if "reward" not in self.state.feedback:
            return {}
        each = {party: said["reward"] for party, said in self.metrics.items() if "reward" in said}
        steps = sum(said.get("samples", 0) for said in self.metrics.values()) / max(1, len(self.metrics))
        shown = {"rewards": each} if len(self.metrics) <= MAX_PARTIES_SHOWN else {}
        return {"reward": self.state.feedback["reward"], "steps": steps, **shown}


def mean_metrics(accepted: Sequence[Reply]) -> dict[str, float]:
    """The mean of every metric over the reports that have it; one that is not finite says nothing."""
    values: dict[str, list[float]] = {}
    for report in accepted:
        for name, value in report.metrics.items():
            if math.isfinite(value) and name not in (
                *LOCAL_SCORE_NAMES,
                CORESET_KEY,
            ):  # who looks must not change what `tune` sees
                values.setdefault(name, []).append(float(value))
    return {name: sum(value / len(found) for value in found) for name, found in values.items()}


def usable_share(accepted: Sequence[Reply], rejections: Sequence[Rejection], note: str) -> dict[str, float]:
    """The share of the models that came which could be used: not of those who diverged. Without a model it is unknown.

    What a party or a line failed at says nothing of its model.
    """
    received_count = len(accepted) + sum(bool(refusal.tensor) for refusal in rejections)
    return {USABLE_SHARE: 0.0 if note else len(accepted) / received_count} if received_count else {}


def local_scores_of(accepted: Sequence[Reply], index: int) -> dict[str, LocalScores]:
    """What parties said of their own local work, as far as they have a test set."""
    scored_replies = [report for report in accepted if all(name in report.metrics for name in LOCAL_SCORE_NAMES)]
    return {
        report.party: LocalScores(index, *(float(report.metrics[name]) for name in LOCAL_SCORE_NAMES))
        for report in scored_replies
    }


def presence_letters(plan: Plan, after: State, counted: Sequence[str], proxied: Sequence[str]) -> str:
    """What everybody was in the round that led to a state, a letter a party."""
    if len(plan.population) > MAX_PARTIES_SHOWN:
        return ""
    known = {**dict.fromkeys(proxied, PROXIED), **dict.fromkeys(counted, PRESENT)}
    seen = after.rounds_trained(plan).tolist()
    return "".join(known.get(name, ABSENT if seen[k] else NEVER_SEEN) for k, name in enumerate(plan.population))


def presence_from_arrays(accepted: NDArray[np.bool_], proxied: NDArray[np.bool_]) -> list[str]:
    """The same of rounds that were recorded, ``[rounds, parties]`` each."""
    if accepted.shape[1] > MAX_PARTIES_SHOWN:
        return []
    seen = np.maximum.accumulate(accepted, axis=0)
    letters = np.select([accepted, proxied, seen], [PRESENT, PROXIED, ABSENT], NEVER_SEEN)
    return ["".join(row) for row in letters.tolist()]
