"""Where a run stands, and what happened in one round of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .core import Hyper, Memory, Metrics, Store
from .gate import Refusal
from .gauges import Gauges
from .piece import JUDGED, Plan


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
    metrics: Mapping[str, Metrics] = field(default_factory=dict)  # what each of the accepted reports says of itself

    @property
    def loss(self) -> float:
        """The mean training loss over the accepted reports; nan if nobody took a step."""
        return self.state.feedback.get("loss", math.nan)

    @property
    def told(self) -> str:
        """The round in a few words, for a progress bar: the loss, and of agents what they reach and how fast."""
        found = self.state.feedback
        if "reward" not in found:
            return f"{self.loss:.4f}"
        steps = sum(metrics.get("samples", 0) for metrics in self.metrics.values())
        speed = f", {steps / self.seconds:,.0f} steps/s" if self.seconds else ""
        return f"{self.loss:.4f}, reward {found['reward']:.1f}{speed}"

    def numbers(self) -> dict[str, Any]:
        """The round as one flat record; "before" and "after" only where parties were judged."""
        record = {name: getattr(self, name) for name in ("loss", "gap", "change", "norm")}
        record |= {"present": len(self.present), "accepted": len(self.accepted), "seconds": self.seconds}
        record |= {"reward": self.state.feedback["reward"]} if "reward" in self.state.feedback else {}
        judged = [self.state.judged[name] for name in self.judged]
        means = {name: sum(getattr(found, name) for found in judged) / len(judged) for name in JUDGED if judged}
        return {"round": self.index, **record, **vars(self.gauges), **means}
