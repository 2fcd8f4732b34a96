"""Gradient descent shared by all solvers: a stack's columns, their gradient, the optimizer and the proximal step.

A solver makes batches, and a :class:`GradientDescent` takes them. Loss terms, proximal steps, freezing and optimizer
moments are therefore the same for all solvers.
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

# All three are measured by `python benchmarks/execution_modes.py`.
STACK_BYTES = 2**20  # bytes of parameters per stack
FUSED_STACK_BYTES = 2**24  # with fused steps, which do not need the parameters in the nearest cache between steps
MAX_VECTORIZED_PARAMETERS = 100_000  # above it, one party fills the machine by itself


class GradientSolver(Protocol):
    """A solver that steps by a torch optimizer."""

    @property
    def optimizer(self) -> str | type[Optimizer]: ...
    @property
    def options(self) -> Mapping[str, Any]: ...


class GradientDescent:
    """The columns of some parties, the gradient of their objective, and the optimizer."""

    def __init__(self, solver: GradientSolver, job: TrainJob, keys: Sequence[Any]) -> None:
        size = job.net.layout.trainable_width
        names = [party.name for party in job.parties]
        private = [_private_columns(job, row) for row in range(len(names))]
        self.objective = Objective(job.net, job.loss, job.terms, widths=tuple(len(part) for part in private[0]))
        private_stacks = [torch.stack(parts) for parts in zip(*private, strict=True)]
        self.stack = Stack(
            job.net.layout, [job.start[:, :size], *private_stacks], lead=int(job.execution_mode != SINGLE)
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
        """Scale down the gradient of every party whose norm exceeds ``max_norm``."""
        norms = torch.linalg.vector_norm(self.stack.gradient, dim=1, keepdim=True)
        self.stack.gradient.mul_((max_norm / norms).clamp_(max=1))

    def can_reuse_for(self, solver: GradientSolver, job: TrainJob, keys: Sequence[Any]) -> bool:
        """Return whether this object can serve other parties: equally many, with equal settings and no state."""
        key = (solver, keys, [hyper.lr for hyper in job.hyperparameters], job.execution_mode, job.loss)
        return self.reusable and not job.terms and self._reuse_key == key

    def restart(self, job: TrainJob) -> None:
        """Replace the columns by those of other parties, and reset the losses."""
        self.stack.columns.copy_(job.start[:, : job.net.layout.trainable_width])
        self.stack_gradient.reset_losses()


def stack_capacity(layout: Layout, fused_step: bool) -> int:
    """Return the number of parties per stack: as many as fit in the cache."""
    return max(
        1, (FUSED_STACK_BYTES if fused_step else STACK_BYTES) // (layout.trainable_width * layout.dtype.itemsize)
    )


def unprofitable_modes(layout: Layout, capacity: int, count: int) -> dict[str, str]:
    """Return the modes that are slower by size alone for ``count`` parties, and why."""
    alone_reason = "" if count > 1 else "a round has only one party"
    megabytes = layout.trainable_width * layout.dtype.itemsize / 1e6
    size_reason = "" if capacity > 1 else f"one model of {megabytes:.1f} MB fills the cache by itself"
    vectorized_reason = (
        ""
        if layout.trainable_width <= MAX_VECTORIZED_PARAMETERS
        else f"above {MAX_VECTORIZED_PARAMETERS} parameters it is slower than a loop"
    )
    reasons = {STACKED: size_reason or alone_reason, VECTORIZED: vectorized_reason or alone_reason}
    return {mode: reason for mode, reason in reasons.items() if reason}


def rank_modes(layout: Layout, reasons: Mapping[str, str], capacity: int, count: int) -> dict[str, str]:
    """Return the execution modes for ``count`` parties, best first, and why each is impossible or slower."""
    by_size = unprofitable_modes(layout, capacity, count)
    ranked = {mode: reasons.get(mode) or by_size.get(mode, "") for mode in (STACKED, SINGLE, VECTORIZED)}
    return {**ranked, LOOPED: ""}


def split_stacks(order: Sequence[int], keys: Sequence[Any], capacity: int) -> Iterator[list[int]]:
    """Yield the indices of stacks of at most ``capacity`` parties with one key each."""
    for _, rows in groupby(order, key=keys.__getitem__):
        run = list(rows)
        yield from (run[first : first + capacity] for first in range(0, len(run), capacity))


@contextmanager
def limit_threads(mode: str, fused_step: bool) -> Iterator[None]:
    """Use one thread for stacks without fused steps: a second one gains nothing, and loses much on busy cores."""
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
    """Return a context in which frozen parameters get no gradient and are restored after the step."""
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
        """Move every active party towards its anchor."""
        if self._job.anchor is None or self._job.alphas is None:
            return
        if alive != self._alive:
            eta = self._w.new_tensor(
                [h.lr * active for h, active in zip(self._job.hyperparameters, alive, strict=True)]
            )
            product = self._job.alphas * eta.unsqueeze(1)
            self._alive = alive
            self._pull_share = product / (1 + product)  # 1-θ
        self._w.lerp_(self._job.anchor, self._pull_share)


def add_private_columns(
    optimizer_states: Sequence[NamedTensors], private: Tensor, objective: Objective
) -> list[NamedTensors]:
    party_states: list[NamedTensors] = []
    for columns, state in zip(private, optimizer_states, strict=True):
        parts = zip(objective.terms, torch.split_with_sizes(columns, list(objective.widths)), strict=True)
        party_states.append({**state, **{f"private.{term.name}": part.clone() for term, part in parts if len(part)}})
    return party_states


def collect_party_states(descent: GradientDescent, job: TrainJob) -> list[NamedTensors]:
    """Return the party states of a job: optimizer moments and private columns."""
    states = descent.optimizer.optimizer_states()
    return (
        add_private_columns(states, descent.stack.columns[:, descent.w.shape[1] :], descent.objective)
        if job.terms
        else list(states)
    )


def mean_losses(descent: GradientDescent, steps: int) -> list[float]:
    """Return the mean loss of every party over its steps; nan without steps."""
    losses: list[float] = (descent.stack_gradient.losses.total / (steps or torch.nan)).tolist()
    return losses


def drop_optimizer_state(state: NamedTensors) -> NamedTensors:
    return {name: tensor for name, tensor in state.items() if not name.startswith("moment.")}


def subset_job(job: TrainJob, indices: list[int]) -> TrainJob:
    """Return the job restricted to some of its parties."""
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
