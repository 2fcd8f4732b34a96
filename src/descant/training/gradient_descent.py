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
from ..core.algorithm import FreezeSchedule, NamedTensors
from ..core.interfaces import TrainJob
from ..models.flat import Layout
from .kernels.traced_kernel import Stack
from .objective import Objective, private_columns
from .stacked_gradient import LOOPED, SINGLE, STACKED, VECTORIZED, StackGradient
from .stacked_optimizer import StackedOptimizer, is_plain_sgd, optimizer_factory

STACK_BYTES = 2**20  # bytes of parameters that are stacked at once
FUSED_STACK_BYTES = 2**24  # the same where they step at once, and need not stay in the nearest cache from step to step
MAX_VECTORIZED_PARAMETERS = 100_000  # parameters; above it one party fills the machine by itself
# Both measured by `python benchmarks/ways.py`.


class GradientSolver(Protocol):
    """A solver that steps by an optimiser of torch's."""

    @property
    def optimizer(self) -> str | type[Optimizer]: ...
    @property
    def options(self) -> Mapping[str, Any]: ...


class GradientDescent:
    """What some parties go down: their columns, the gradient of their objective, and the optimiser."""

    def __init__(self, solver: GradientSolver, job: TrainJob, keys: Sequence[Any]) -> None:
        size = job.net.layout.trainable_width
        names = [party.name for party in job.parties]
        private = [_private_columns(job, row) for row in range(len(names))]
        self.objective = Objective(job.net, job.loss, job.terms, widths=tuple(len(part) for part in private[0]))
        private_columns_of_stack = [torch.stack(parts) for parts in zip(*private, strict=True)]
        self.stack = Stack(
            job.net.layout, [job.start[:, :size], *private_columns_of_stack], lead=int(job.execution_mode != SINGLE)
        )
        make = optimizer_factory(solver.optimizer, solver.options)
        rates = [hyper.lr for hyper in job.hyperparameters]
        self.fused_step = not keys
        self._reuse_key = (solver, keys, rates, job.execution_mode, job.loss)
        self.reusable = is_plain_sgd(make) and not job.terms and job.execution_mode in (STACKED, SINGLE)
        strengths = self.objective.strengths(job.round, names, self.stack.columns)
        parts = (job.start[:, size:].clone(), job.received[:, :size], strengths)
        self.stack_gradient = StackGradient(
            self.objective, job.execution_mode, self.stack, *parts, rates[0] if self.fused_step else None
        )
        self.optimizer = StackedOptimizer(make, self.stack, rates, party_states=job.party_states, keys=keys)

    @property
    def w(self) -> Tensor:
        """The parameters ``[K, d]``, without the private columns beside them."""
        return self.stack.columns[:, : self.stack.layout.trainable_width]

    def clip_gradients(self, max_norm: float) -> None:
        """Shorten the gradient of every party whose norm is above ``most``."""
        norms = torch.linalg.vector_norm(self.stack.gradient, dim=1, keepdim=True)
        self.stack.gradient.mul_((max_norm / norms).clamp_(max=1))

    def can_reuse_for(self, solver: GradientSolver, job: TrainJob, keys: Sequence[Any]) -> bool:
        """Whether the same can be done with other parties' numbers: with as many, and no memory of them."""
        key = (solver, keys, [hyper.lr for hyper in job.hyperparameters], job.execution_mode, job.loss)
        return self.reusable and not job.terms and self._reuse_key == key

    def restart(self, job: TrainJob) -> None:
        """Put some parties' numbers in place of others'."""
        self.stack.columns.copy_(job.start[:, : job.net.layout.trainable_width])
        self.stack_gradient.reset_losses()


def stack_capacity(layout: Layout, fused_step: bool) -> int:
    """How many parties are stacked at once: as many as a cache holds, since every step goes through all of them."""
    return max(
        1, (FUSED_STACK_BYTES if fused_step else STACK_BYTES) // (layout.trainable_width * layout.dtype.itemsize)
    )


def unprofitable_modes(layout: Layout, capacity: int, count: int) -> dict[str, str]:
    """The ways that do not pay for ``count`` parties of which ``most`` are stacked at once, and why: by size alone."""
    alone_reason = "" if count > 1 else "one party a round works alone"
    megabytes = layout.trainable_width * layout.dtype.itemsize / 1e6
    size_reason = "" if capacity > 1 else f"one model of {megabytes:.1f} MB fills the cache by itself"
    vectorized_reason = (
        ""
        if layout.trainable_width <= MAX_VECTORIZED_PARAMETERS
        else f"above {MAX_VECTORIZED_PARAMETERS} parameters it is slower than a loop"
    )
    reasons = {STACKED: size_reason or alone_reason, VECTORIZED: vectorized_reason or alone_reason}
    return {way: reason for way, reason in reasons.items() if reason}


def rank_modes(layout: Layout, reasons: Mapping[str, str], capacity: int, count: int) -> dict[str, str]:
    """The ways to compute stacks of ``count`` parties, the best first, and why each cannot be taken or does not pay."""
    by_size = unprofitable_modes(layout, capacity, count)
    found = {way: reasons.get(way) or by_size.get(way, "") for way in (STACKED, SINGLE, VECTORIZED)}
    return {**found, LOOPED: ""}


def split_stacks(order: Sequence[int], keys: Sequence[Any], capacity: int) -> Iterator[list[int]]:
    """Some parties at a time, all of one key."""
    for _, rows in groupby(order, key=keys.__getitem__):
        run = list(rows)
        yield from (run[first : first + capacity] for first in range(0, len(run), capacity))


@contextmanager
def limit_threads(mode: str, fused_step: bool) -> Iterator[None]:
    """Small stacks are too small to share: a second thread gains nothing, and loses much on busy cores."""
    before = torch.get_num_threads()
    if mode == STACKED and not fused_step:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _private_columns(job: TrainJob, row: int) -> list[Tensor]:
    received = job.received[row, : job.net.layout.trainable_width]
    draws = partial(seeds.stream, job.seed, job.round, job.parties[row].name)
    return private_columns(job.terms, received, job.party_states[row], draws=draws)


_NOTHING_FROZEN = nullcontext()


def freeze_parameters(stack: Stack, job: TrainJob, step: int, lengths: Sequence[int]) -> AbstractContextManager[None]:
    """Parameters that stand still in this step have no gradient, and are afterwards what they were before."""
    return _NOTHING_FROZEN if job.freeze is None else _frozen_parameters(stack, job.freeze, step, lengths=lengths)


@contextmanager
def _frozen_parameters(stack: Stack, freeze: FreezeSchedule, step: int, lengths: Sequence[int]) -> Iterator[None]:
    w = stack.columns[:, : stack.layout.trainable_width]
    frozen = ~freeze.trainable_mask(step, lengths, w.shape[1])
    before = w.clone()
    stack.gradient[:, : stack.layout.trainable_width][frozen] = 0
    yield
    w[frozen] = before[frozen]


class StackedProximalStep:
    """w ← θ·w + (1-θ)·z in place, Fed+ v2 eq. (6), with θ = 1/(1+αη) of Proposition 2."""

    def __init__(self, job: TrainJob, w: Tensor) -> None:
        self._job = job
        self._w = w
        self._alive: Sequence[bool] | None = None

    def __call__(self, alive: Sequence[bool]) -> None:
        """Draw every party back that still works."""
        if self._job.anchor is None or self._job.alphas is None:
            return
        if alive != self._alive:
            eta = self._w.new_tensor([h.lr * works for h, works in zip(self._job.hyperparameters, alive, strict=True)])
            product = self._job.alphas * eta.unsqueeze(1)
            self._alive = alive
            self._pull_share = product / (1 + product)  # 1-θ
        self._w.lerp_(self._job.anchor, self._pull_share)


def add_private_columns(
    optimizer_states: Sequence[NamedTensors], private: Tensor, objective: Objective
) -> list[NamedTensors]:
    kept: list[NamedTensors] = []
    for columns, memory in zip(private, optimizer_states, strict=True):
        parts = zip(objective.terms, torch.split_with_sizes(columns, list(objective.widths)), strict=True)
        kept.append({**memory, **{f"private.{term.name}": part.clone() for term, part in parts if len(part)}})
    return kept


def collect_party_states(descent: GradientDescent, job: TrainJob) -> list[NamedTensors]:
    """What the parties of a job remember of how they stepped: moments, and private columns."""
    kept = descent.optimizer.optimizer_states()
    return (
        add_private_columns(kept, descent.stack.columns[:, descent.w.shape[1] :], descent.objective)
        if job.terms
        else list(kept)
    )


def mean_losses(descent: GradientDescent, steps: int) -> list[float]:
    """The mean loss of every party over its steps; nan if there were none."""
    losses: list[float] = (descent.stack_gradient.losses.total / (steps or torch.nan)).tolist()
    return losses


def drop_optimizer_state(memory: NamedTensors) -> NamedTensors:
    return {name: tensor for name, tensor in memory.items() if not name.startswith("moment.")}


def subset_job(job: TrainJob, indices: list[int]) -> TrainJob:
    """The same job for some of its parties."""
    selection: slice | list[int] = indices
    if indices == list(range(indices[0], indices[-1] + 1)):
        selection = slice(indices[0], indices[-1] + 1)  # a view
    return replace(
        job,
        parties=[job.parties[row] for row in indices],
        hyperparameters=[job.hyperparameters[row] for row in indices],
        party_states=[job.party_states[row] for row in indices],
        start=job.start[selection],
        received=job.received[selection],
        anchor=None if job.anchor is None else job.anchor[selection],
        alphas=None if job.alphas is None else job.alphas[selection],
    )
