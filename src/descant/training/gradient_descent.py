"""What a solver goes down by gradients, whatever its batches are: a stack's columns, their gradient, the optimiser.

A solver makes batches; a :class:`Slope` takes them. So a term, a pull, a hold and an optimiser's memory are the same
for all solvers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..core import seeds
from ..core.algorithm import Hold, Memory
from ..core.interfaces import Job
from ..models.flat import Layout
from .kernels.traced_kernel import Stack
from .objective import Objective, private_columns
from .stacked_gradient import LOOPED, SINGLE, STACKED, VECTORISED, Descent
from .stacked_optimizer import Moments, is_plain, maker

CACHE = 2**20  # bytes of parameters that are stacked at once
FAR = 2**24  # the same where they step at once, and need not stay in the nearest cache from step to step
MOST_VECTORISED = 100_000  # parameters; above it one party fills the machine by itself
# Both measured by `python benchmarks/ways.py`.


class Optimised(Protocol):
    """A solver that steps by an optimiser of torch's."""

    @property
    def optimizer(self) -> str | type[Optimizer]: ...
    @property
    def options(self) -> Mapping[str, Any]: ...


class Slope:
    """What some parties go down: their columns, the gradient of their objective, and the optimiser."""

    def __init__(self, solver: Optimised, job: Job, keys: Sequence[Any]) -> None:
        size, names = job.net.layout.size, [party.name for party in job.parties]
        private = [_private(job, row) for row in range(len(names))]
        self.objective = Objective(job.net, job.loss, job.terms, tuple(len(part) for part in private[0]))
        beside = [torch.stack(parts) for parts in zip(*private, strict=True)]
        self.stack = Stack(job.net.layout, [job.start[:, :size], *beside], lead=int(job.way != SINGLE))
        make, rates = maker(solver.optimizer, solver.options), [hyper.lr for hyper in job.hypers]
        self.at_once = not keys
        self._for = (solver, keys, rates, job.way, job.loss)
        self.reusable = is_plain(make) and not job.terms and job.way in (STACKED, SINGLE)
        strengths = self.objective.strengths(job.round, names, self.stack.columns)
        parts = (job.start[:, size:].clone(), job.received[:, :size], strengths)
        self.descent = Descent(self.objective, job.way, self.stack, *parts, rates[0] if self.at_once else None)
        self.moments = Moments(make, self.stack, rates, job.memories, keys)

    @property
    def w(self) -> Tensor:
        """The parameters ``[K, d]``, without the private columns beside them."""
        return self.stack.columns[:, : self.stack.layout.size]

    def clip(self, most: float) -> None:
        """Shorten the gradient of every party whose norm is above ``most``."""
        norms = torch.linalg.vector_norm(self.stack.gradient, dim=1, keepdim=True)
        self.stack.gradient.mul_((most / norms).clamp_(max=1))

    def serves(self, solver: Optimised, job: Job, keys: Sequence[Any]) -> bool:
        """Whether the same can be done with other parties' numbers: with as many, and no memory of them."""
        same = (solver, keys, [hyper.lr for hyper in job.hypers], job.way, job.loss)
        return self.reusable and not job.terms and self._for == same

    def begin(self, job: Job) -> None:
        """Put some parties' numbers in place of others'."""
        self.stack.columns.copy_(job.start[:, : job.net.layout.size])
        self.descent.begin()


def together(layout: Layout, at_once: bool) -> int:
    """How many parties are stacked at once: as many as a cache holds, since every step goes through all of them."""
    return max(1, (FAR if at_once else CACHE) // (layout.size * layout.dtype.itemsize))


def barred(layout: Layout, most: int, count: int) -> dict[str, str]:
    """The ways that do not pay for ``count`` parties of which ``most`` are stacked at once, and why: by size alone."""
    alone = "" if count > 1 else "one party a round works alone"
    megabytes = layout.size * layout.dtype.itemsize / 1e6
    full = "" if most > 1 else f"one model of {megabytes:.1f} MB fills the cache by itself"
    large = "" if layout.size <= MOST_VECTORISED else f"above {MOST_VECTORISED} parameters it is slower than a loop"
    reasons = {STACKED: full or alone, VECTORISED: large or alone}
    return {way: reason for way, reason in reasons.items() if reason}


def ways_of(layout: Layout, reasons: Mapping[str, str], most: int, count: int) -> dict[str, str]:
    """The ways to compute stacks of ``count`` parties, the best first, and why each cannot be taken or does not pay."""
    by_size = barred(layout, most, count)
    found = {way: reasons.get(way) or by_size.get(way, "") for way in (STACKED, SINGLE, VECTORISED)}
    return {**found, LOOPED: ""}


def parts_of(order: Sequence[int], keys: Sequence[Any], most: int) -> Iterator[list[int]]:
    """Some parties at a time, all of one key."""
    for _, rows in groupby(order, key=keys.__getitem__):
        run = list(rows)
        yield from (run[first : first + most] for first in range(0, len(run), most))


@contextmanager
def threads(way: str, at_once: bool) -> Iterator[None]:
    """Small stacks are too small to share: a second thread gains nothing, and loses much on busy cores."""
    before = torch.get_num_threads()
    if way == STACKED and not at_once:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _private(job: Job, row: int) -> list[Tensor]:
    received = job.received[row, : job.net.layout.size]
    draws = partial(seeds.stream, job.seed, job.round, job.parties[row].name)
    return private_columns(job.terms, received, job.memories[row], draws)


_NOTHING_HELD = nullcontext()


def held(stack: Stack, job: Job, step: int, lengths: Sequence[int]) -> AbstractContextManager[None]:
    """Parameters that stand still in this step have no gradient, and are afterwards what they were before."""
    return _NOTHING_HELD if job.hold is None else _holding(stack, job.hold, step, lengths)


@contextmanager
def _holding(stack: Stack, hold: Hold, step: int, lengths: Sequence[int]) -> Iterator[None]:
    w = stack.columns[:, : stack.layout.size]
    still, before = ~hold.moving(step, lengths, w.shape[1]), w.clone()
    stack.gradient[:, : stack.layout.size][still] = 0
    yield
    w[still] = before[still]


class Pulling:
    """w ← θ·w + (1-θ)·z in place, Fed+ v2 eq. (6), with θ = 1/(1+αη) of Proposition 2."""

    def __init__(self, job: Job, w: Tensor) -> None:
        self._job, self._w = job, w
        self._alive: Sequence[bool] | None = None

    def __call__(self, alive: Sequence[bool]) -> None:
        """Draw every party back that still works."""
        if self._job.anchor is None or self._job.alphas is None:
            return
        if alive != self._alive:
            eta = self._w.new_tensor([h.lr * works for h, works in zip(self._job.hypers, alive, strict=True)])
            product = self._job.alphas * eta.unsqueeze(1)
            self._alive, self._share = alive, product / (1 + product)  # 1-θ
        self._w.lerp_(self._job.anchor, self._share)


def with_private(moments: Sequence[Memory], private: Tensor, objective: Objective) -> list[Memory]:
    kept: list[Memory] = []
    for own, memory in zip(private, moments, strict=True):
        parts = zip(objective.terms, torch.split_with_sizes(own, list(objective.widths)), strict=True)
        kept.append({**memory, **{f"private.{term.name}": part.clone() for term, part in parts if len(part)}})
    return kept


def memories_of(slope: Slope, job: Job) -> list[Memory]:
    """What the parties of a job remember of how they stepped: moments, and private columns."""
    kept = slope.moments.memories()
    return with_private(kept, slope.stack.columns[:, slope.w.shape[1] :], slope.objective) if job.terms else list(kept)


def losses_of(slope: Slope, steps: int) -> list[float]:
    """The mean loss of every party over its steps; nan if there were none."""
    losses: list[float] = (slope.descent.losses.total / (steps or torch.nan)).tolist()
    return losses


def without_moments(memory: Memory) -> Memory:
    return {name: tensor for name, tensor in memory.items() if not name.startswith("moment.")}


def rows_of(job: Job, rows: list[int]) -> Job:
    """The same job for some of its parties."""
    at: slice | list[int] = rows
    if rows == list(range(rows[0], rows[-1] + 1)):
        at = slice(rows[0], rows[-1] + 1)  # a view
    return replace(
        job,
        parties=[job.parties[row] for row in rows],
        hypers=[job.hypers[row] for row in rows],
        memories=[job.memories[row] for row in rows],
        start=job.start[at],
        received=job.received[at],
        anchor=None if job.anchor is None else job.anchor[at],
        alphas=None if job.alphas is None else job.alphas[at],
    )
