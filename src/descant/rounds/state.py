"""The state of a run, and the record of one round."""

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
from .aggregation_diagnostics import Diagnostics
from .party_evaluation import LOCAL_SCORE_NAMES
from .plan import RECEIVED_MODEL_LOSS, VALIDATION_LOSS, Plan
from .validation import Rejection

STALENESS = "staleness"
"""The metric with the staleness of a reply: the versions of the global model since its task."""

USABLE_SHARE = "used"
"""The metric with the share of a round's received models that were usable."""

PRESENT = "p"
PROXIED = "s"
ABSENT = "a"
NEVER_SEEN = "."
"""Presence of a party in a round: trained, by proxy, absent, or absent and never trained before."""
MAX_PARTIES_SHOWN = 100  # parties whose presence a round records: as many as a plot can show

_BY_PARTY_INDEX = ("participation", "proxy", "reset")  # server state with one number a party; 0: nothing yet
_RECORDED_METRICS = (VALIDATION_LOSS, RECEIVED_MODEL_LOSS, STALENESS, "clock")


@dataclass(frozen=True)
class LocalScores:
    """A party's test score before and after its local training of one round."""

    round: int
    before: float
    after: float


@dataclass(frozen=True)
class State:
    """The state from which a run continues, without the party states, which the engine keeps."""

    round: int
    global_model: Tensor  # [width] w̃
    initial_model: Tensor  # [width] the initial model of all parties
    execution_mode: str  # chosen once, and kept on resume
    personal_models: Store  # w_k of the parties that ever trained, if the algorithm has personal models
    server_state: Mapping[str, NamedTensors] = field(default_factory=dict)  # by component
    feedback: Metrics = field(default_factory=dict)  # the metrics of the last round, for `tune`
    local_scores: Mapping[str, LocalScores] = field(default_factory=dict)  # by party: its last scored local training

    def rounds_trained(self, plan: Plan) -> Tensor:
        """Return the number of rounds in which each party has trained, ``[parties]``."""
        counted = self.server_state.get("participation", {}).get("rounds")
        return torch.zeros(len(plan.population), dtype=torch.int32) if counted is None else counted


def pad_for_parties(state: State, count: int) -> State:
    """Extend a state to ``count`` parties: parties that joined later come last."""
    server_state = {
        part: {name: _pad_with_zeros(tensor, count) for name, tensor in tensors.items()}
        if part in _BY_PARTY_INDEX
        else tensors
        for part, tensors in state.server_state.items()
    }
    return replace(state, server_state=server_state)


def _pad_with_zeros(tensor: Tensor, count: int) -> Tensor:
    return torch.cat([tensor, tensor.new_zeros(count - len(tensor), *tensor.shape[1:])])


@dataclass(frozen=True)
class Round:
    """The record of one round, and the state after it."""

    index: int
    state: State
    participants: Mapping[str, Hyper]
    accepted: tuple[str, ...]
    rejections: tuple[Rejection, ...]
    gap: float  # the aggregate's distance from optimality
    change: float  # ‖w̃ after - w̃ before‖₂
    seconds: float
    note: str = ""  # why the model did not change, if it did not
    norm: float = math.nan  # ‖w̃‖₂ after the round
    diagnostics: Diagnostics = field(default_factory=Diagnostics)
    locally_scored: tuple[str, ...] = ()  # parties that scored their local training
    tuning: Metrics = field(default_factory=dict)  # lr, work and the tuner's metrics, if there is a tuner
    tuner_note: str = ""  # a rollback, if there was one
    proxied: tuple[str, ...] = ()  # parties whose coreset proxy replied
    presence: str = ""  # one code a party: p, s, a or . (see PRESENT); "" for too many parties
    metrics: Mapping[str, Metrics] = field(default_factory=dict)  # metrics of each accepted reply

    @property
    def loss(self) -> float:
        """Return the mean training loss over the accepted replies; nan if no party took a step."""
        return self.state.feedback.get("loss", math.nan)

    @property
    def summary(self) -> str:
        """Return a short summary for a progress bar: the loss, and for agents reward and speed."""
        parts = [] if math.isnan(self.loss) else [f"loss {self.loss:.4f}"]
        steps = sum(metrics.get("samples", 0) for metrics in self.metrics.values())
        if "reward" in self.state.feedback:
            parts.append(f"reward {self.state.feedback['reward']:.4g}")
            parts += [f"{steps / self.seconds:,.0f} steps/s"] if self.seconds else []
        return ", ".join(parts) or "–"

    def to_record(self) -> dict[str, Any]:
        """Return the round as one flat record, without scores, validation or tuning that did not happen."""
        record = {name: getattr(self, name) for name in ("loss", "gap", "change", "norm")}
        record |= {"participants": len(self.participants), "accepted": len(self.accepted), "seconds": self.seconds}
        record |= self._rewards()
        local_scores = [self.state.local_scores[name] for name in self.locally_scored]
        means = {
            name: sum(getattr(scores, name) for scores in local_scores) / len(local_scores)
            for name in LOCAL_SCORE_NAMES
            if local_scores
        }
        measured = {name: value for name, value in self.state.feedback.items() if name in _RECORDED_METRICS}
        record |= {**vars(self.diagnostics), **means, **measured, **self.tuning}
        record |= {"proxied": len(self.proxied)} if "proxy" in self.state.server_state else {}
        texts = {"tuner_note": self.tuner_note, "presence": self.presence, REAL_ONLY: self.real_only}
        return {"round": self.index, **record, **{name: text for name, text in texts.items() if text}}

    @property
    def real_only(self) -> dict[str, float]:
        return {party: metrics[REAL_ONLY] for party, metrics in self.metrics.items() if REAL_ONLY in metrics}

    def _rewards(self) -> dict[str, Any]:
        """Return the agents' mean reward and steps, and the reward of each while a plot can show them."""
        if "reward" not in self.state.feedback:
            return {}
        each = {party: metrics["reward"] for party, metrics in self.metrics.items() if "reward" in metrics}
        steps = sum(metrics.get("samples", 0) for metrics in self.metrics.values()) / max(1, len(self.metrics))
        shown = {"rewards": each} if len(self.metrics) <= MAX_PARTIES_SHOWN else {}
        return {"reward": self.state.feedback["reward"], "steps": steps, **shown}


def mean_metrics(accepted: Sequence[Reply]) -> dict[str, float]:
    """Return the mean of every metric over the replies that have it; non-finite values are left out."""
    values: dict[str, list[float]] = {}
    hidden = (*LOCAL_SCORE_NAMES, CORESET_KEY)  # evaluation must not change the feedback of a tuner
    for reply in accepted:
        for name, value in reply.metrics.items():
            if math.isfinite(value) and name not in hidden:
                values.setdefault(name, []).append(float(value))
    return {name: sum(value / len(numbers) for value in numbers) for name, numbers in values.items()}


def usable_share(accepted: Sequence[Reply], rejections: Sequence[Rejection], note: str) -> dict[str, float]:
    """Return the share of the received models that were usable; diverged models are not. Unknown without a model.

    Failures of a party or a connection are not counted.
    """
    received_count = len(accepted) + sum(bool(rejection.tensor) for rejection in rejections)
    return {USABLE_SHARE: 0.0 if note else len(accepted) / received_count} if received_count else {}


def local_scores_of(accepted: Sequence[Reply], index: int) -> dict[str, LocalScores]:
    """Return the parties' scores of their local training, for parties with a test set."""
    scored_replies = [reply for reply in accepted if all(name in reply.metrics for name in LOCAL_SCORE_NAMES)]
    return {
        reply.party: LocalScores(index, *(float(reply.metrics[name]) for name in LOCAL_SCORE_NAMES))
        for reply in scored_replies
    }


def presence_letters(plan: Plan, after: State, counted: Sequence[str], proxied: Sequence[str]) -> str:
    """Return the presence code of every party in the round before a state."""
    if len(plan.population) > MAX_PARTIES_SHOWN:
        return ""
    known = {**dict.fromkeys(proxied, PROXIED), **dict.fromkeys(counted, PRESENT)}
    seen = after.rounds_trained(plan).tolist()
    return "".join(known.get(name, ABSENT if seen[k] else NEVER_SEEN) for k, name in enumerate(plan.population))


def presence_from_arrays(accepted: NDArray[np.bool_], proxied: NDArray[np.bool_]) -> list[str]:
    """Return the presence codes of recorded rounds; the arrays are ``[rounds, parties]``."""
    if accepted.shape[1] > MAX_PARTIES_SHOWN:
        return []
    seen = np.maximum.accumulate(accepted, axis=0)
    codes = np.select([accepted, proxied, seen], [PRESENT, PROXIED, ABSENT], NEVER_SEEN)
    return ["".join(row) for row in codes.tolist()]
