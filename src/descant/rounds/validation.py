"""Validation of replies before aggregation.

A bad reply never changes a model, and the other replies are used. Rewards and losses are metrics: they become weights
later and may have any sign. A finite but Byzantine model passes: robust aggregation handles it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from ..core.messages import Reply, Task, TaskKind
from ..models.flat import Layout

MAX_SAMPLES = 10**12
_MAX_SHOWN_CHARS = 300  # characters of received texts


@dataclass(frozen=True)
class Rejection:
    """The reason why a reply did not count."""

    party: str
    round: int
    reason: str
    tensor: str = ""
    expected: str = ""
    found: str = ""

    def __str__(self) -> str:
        where = f", tensor {self.tensor!r}" if self.tensor else ""
        numbers = f": expected {self.expected}, found {self.found}" if self.expected else ""
        reason = self.reason.rstrip(".")  # it stands within sentences
        return f"round {self.round}, party {self.party!r}{where}: {reason}{numbers}"


@dataclass
class UpdateValidator:
    """Validate replies against the sent tasks, as far back as the algorithm's staleness allows."""

    layout: Layout
    known_parties: Collection[str]  # the parties of the federation
    private_layers: Collection[str] = ()  # tensors that must not arrive: they never leave their party
    max_staleness: int = 0
    max_coreset_bytes: int = 0  # of an encrypted coreset; 0: none was requested
    is_masked: bool = False  # whether replies are masked integers
    update_base: Tensor | None = None  # [width] the base of the updates, if replies carry updates
    asked: dict[tuple[str, int], TaskKind] = field(default_factory=dict)
    answered: set[tuple[str, int]] = field(default_factory=set)

    def expect(self, tasks: Iterable[Task], round: int) -> None:
        """Start a round: expect replies to these tasks and forget tasks that are too old."""
        oldest = round - self.max_staleness
        self.asked = {(party, at): kind for (party, at), kind in self.asked.items() if at >= oldest}
        self.answered = {(party, at) for party, at in self.answered if at >= oldest}
        self.asked |= {(task.party, task.round): task.kind for task in tasks}

    def validate(self, reply: Reply, round: int) -> Rejection | None:
        """Return None if the reply may count, else its rejection."""
        rejection = self._check_types(reply) or self._check_address(reply, round) or self._check_samples(reply)
        rejection = rejection or self._check_coreset_size(reply) or self.check_model(reply)
        if rejection is None:
            self.answered.add((reply.party, reply.round))
        return rejection

    def _check_types(self, r: Reply) -> Rejection | None:
        """Check the types of all fields: a received message may hold anything."""
        plain = (
            isinstance(r.party, str) and type(r.round) is int and isinstance(r.kind, str) and isinstance(r.status, str)
        )
        if not plain or not isinstance(r.arrays, Mapping) or not isinstance(r.metrics, Mapping):
            expected = "a party's name, a whole round, a kind, a status, arrays and metrics"
            found = f"{r.party!r:.40}, {r.round!r:.40}, {r.kind!r:.40}, {r.status!r:.40}"
            return Rejection(f"{r.party!s:.40}", -1, "malformed reply", tensor="", expected=expected, found=found)
        for name, value in r.metrics.items():
            if name != "samples" and not is_number(value):  # samples are checked later
                return Rejection(
                    r.party,
                    r.round,
                    f"the metric {name!r:.40} is not a number",
                    tensor="",
                    expected="numbers",
                    found=f"{value!r:.40}",
                )
        return None

    def _check_address(self, r: Reply, round: int) -> Rejection | None:
        if r.party not in self.known_parties:
            return Rejection(r.party, r.round, "unknown party")
        if r.status != "ok":
            return Rejection(r.party, r.round, f"{r.status}: {r.reason}" if r.reason else r.status)
        kind = self.asked.get((r.party, r.round), "train")
        if r.kind != kind:
            return Rejection(
                r.party, r.round, "a reply to another kind of task", tensor="", expected=kind, found=r.kind
            )
        if (r.party, r.round) in self.answered:
            return Rejection(r.party, r.round, "replayed: this party has already replied in this round")
        age = round - r.round
        if not 0 <= age <= self.max_staleness:
            allowed = f"round {round}" if not self.max_staleness else f"rounds {round - self.max_staleness} to {round}"
            return Rejection(
                r.party,
                r.round,
                "stale" if age > 0 else "from the future",
                tensor="",
                expected=allowed,
                found=f"round {r.round}",
            )
        if (r.party, r.round) not in self.asked:
            return Rejection(r.party, r.round, "not asked in this round")
        return None

    def _check_samples(self, r: Reply) -> Rejection | None:
        samples = r.metrics.get("samples")
        if not is_sample_count(samples):
            expected = f"a whole number from 1 to {MAX_SAMPLES:.0e}"
            return Rejection(
                r.party, r.round, "absurd sample count", tensor="", expected=expected, found=f"{samples!r:.40}"
            )
        return None

    def _check_coreset_size(self, r: Reply) -> Rejection | None:
        size = len(r.encrypted_coreset) if isinstance(r.encrypted_coreset, bytes) else math.inf
        if size > (self.max_coreset_bytes if r.kind == "train" else 0):
            reason = (
                "its encrypted coreset is too large"
                if self.max_coreset_bytes
                else "an encrypted coreset was not requested"
            )
            return Rejection(
                r.party, r.round, reason, tensor="", expected=f"at most {self.max_coreset_bytes} bytes", found=f"{size}"
            )
        return None

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor of a complete reply."""
        shapes = zip(self.layout.names, self.layout.shapes, strict=True)
        return {name: shape for name, shape in shapes if name not in self.private_layers}

    def check_model(self, r: Reply) -> Rejection | None:
        """Return None if the reply has a complete and finite model, else its rejection."""
        shapes = self._shapes
        for name in r.arrays:
            if name not in shapes:
                reason = "private tensor" if name in self.private_layers else "unexpected tensor"
                return Rejection(
                    r.party, r.round, reason, tensor=printable(name), expected=", ".join(shapes), found=printable(name)
                )
        for name, shape in shapes.items():
            if name not in r.arrays:
                found = printable(", ".join(r.arrays)) or "none"
                return Rejection(
                    r.party, r.round, "missing tensor", tensor=name, expected=", ".join(shapes), found=found
                )
            rejection = self._check_tensor(r, name, shape, r.arrays[name])
            if rejection is not None:
                return rejection
        return None

    def _check_tensor(self, r: Reply, name: str, shape: tuple[int, ...], tensor: Tensor) -> Rejection | None:
        dense = isinstance(tensor, Tensor) and tensor.layout == torch.strided and not tensor.is_nested
        if not dense or tensor.device.type != "cpu":
            found = f"{type(tensor).__name__} {getattr(tensor, 'layout', '')} {getattr(tensor, 'device', '')}"
            return Rejection(
                r.party, r.round, "not a dense tensor", tensor=name, expected="a dense tensor in memory", found=found
            )
        if tuple(tensor.shape) != shape:
            return Rejection(
                r.party, r.round, "wrong shape", tensor=name, expected=str(list(shape)), found=str(list(tensor.shape))
            )
        dtype = torch.int64 if self.is_masked else self.layout.dtype
        if tensor.dtype != dtype:
            return Rejection(r.party, r.round, "wrong dtype", tensor=name, expected=str(dtype), found=str(tensor.dtype))
        if self.is_masked:
            return None
        if not is_finite(tensor):
            bad = tensor[~torch.isfinite(tensor)]
            found = f"{len(bad)} of {tensor.numel()}, the first {bad[0]}"
            return Rejection(r.party, r.round, "not finite", tensor=name, expected="finite numbers", found=found)
        least = self._least_variance(name, tensor) if name.endswith("running_var") else 0.0
        if least < 0:
            return Rejection(r.party, r.round, "negative variance", tensor=name, expected=">= 0", found=str(least))
        return None

    def _least_variance(self, name: str, tensor: Tensor) -> float:
        if self.update_base is None:
            return float(tensor.min())
        begin, end = self.layout.column_range(name)
        return float((self.update_base[begin:end] + tensor.detach().reshape(-1)).min())


def is_finite(tensor: Tensor) -> bool:
    """Return whether every number is finite; a finite sum shows it at a tenth of the cost.

    >>> is_finite(torch.tensor([3e38, 3e38])), is_finite(torch.tensor([1.0, torch.nan]))
    (True, False)
    """
    return math.isfinite(tensor.detach().sum()) or bool(torch.isfinite(tensor).all())


def is_number(value: object) -> bool:
    """Return whether a received value is a float, nan included, or an integer within the range of a float."""
    try:
        return (isinstance(value, int | float) and float(value) == float(value)) or isinstance(value, float)
    except OverflowError:
        return False


def is_sample_count(samples: object) -> bool:
    """Return whether a received value is a plausible number of samples."""
    if isinstance(samples, bool) or not isinstance(samples, int | float):
        return False
    return 0 < samples <= MAX_SAMPLES and samples == int(samples)  # nan compares false


def printable(text: str) -> str:
    r"""Return a received text as it may be shown: short, and without control characters.

    >>> printable("gone\x1b[2J")
    'gone?[2J'
    """
    return "".join(character if character.isprintable() else "?" for character in text[:_MAX_SHOWN_CHARS])
