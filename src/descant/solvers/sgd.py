"""Stochastic gradient descent over a stack of parties, with any element-wise torch optimiser."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from .. import seeds
from ..core import Hold, Hyper, Job, Loss, Memory, Metrics, Term, Trained
from ..errors import SettingError
from ..flat import Layout, Net
from ..parties.people import Party
from ..settings import check, setting
from .batches import Draws, draw, feed
from .descent import LOOPED, SINGLE, STACKED, VECTORISED, Descent, Losses, steps_at_once
from .moments import Moments, age, check_elementwise, is_plain, maker
from .objective import Objective, private_columns
from .probe import probe
from .stacked import Stack

CACHE = 2**20  # bytes of parameters that are stacked at once
FAR = 2**24  # the same where they step at once, and need not stay in the nearest cache from step to step
MOST_VECTORISED = 100_000  # parameters; above it one party fills the machine by itself
# Both measured by `python benchmarks/ways.py`.


@dataclass(frozen=True)
class Sgd:
    """Each party takes some steps (or epochs) on batches of its own data: τ steps of Tuor et al. (2021), eq. (2).

    >>> Sgd(lr=0.05, steps=20, batch=10).hyper
    Hyper(lr=0.05, work=20)
    """

    lr: float = setting(0.01, "the learning rate η", above=0)
    steps: int | None = setting(
        None, "local steps a round (20 if neither steps nor epochs is given)", least=0, whole=True
    )
    batch: int | None = setting(10, "samples a step; None takes all that a party has", least=1, whole=True)
    epochs: int | None = setting(None, "local epochs a round, instead of steps", least=0, whole=True)
    optimizer: str | type[Optimizer] = "SGD"
    options: Mapping[str, Any] = field(default_factory=dict)
    moments: Literal["keep", "reset"] = setting(
        "keep", "the optimiser's memory between rounds", one_of=("keep", "reset")
    )

    @property
    def unit(self) -> str:
        return "steps" if self.epochs is None else "epochs"

    @property
    def hyper(self) -> Hyper:
        if self.epochs is not None:
            return Hyper(self.lr, self.epochs)
        return Hyper(self.lr, 20 if self.steps is None else self.steps)

    def ways(self, net: Net, loss: Loss, terms: tuple[Term, ...], party: Party, count: int) -> dict[str, str]:
        """A function of the model's shapes, the count and torch's version alone."""
        check(self)
        if self.steps is not None and self.epochs is not None:
            raise SettingError(f"Give Sgd steps or epochs, not both. Got steps={self.steps} and epochs={self.epochs}.")
        check_elementwise(maker(self.optimizer, self.options))
        size = party.samples if self.batch is None else min(self.batch, party.samples)
        reasons = probe(net, loss, terms, party.x[:size].clone(), party.y[:size].clone())  # a module may write
        alone = "" if count > 1 else "one party a round works alone"
        megabytes = net.layout.size * net.layout.dtype.itemsize / 1e6
        most = together(net.layout, self._steps_at_once(net, STACKED))
        full = "" if most > 1 else f"one model of {megabytes:.1f} MB fills the cache by itself"
        large = (
            "" if net.layout.size <= MOST_VECTORISED else f"above {MOST_VECTORISED} parameters it is slower than a loop"
        )
        return {
            STACKED: reasons[STACKED] or full or alone,
            SINGLE: reasons[SINGLE],
            VECTORISED: reasons[VECTORISED] or large or alone,
            LOOPED: "",
        }

    def _steps_at_once(self, net: Net, way: str) -> bool:
        return is_plain(maker(self.optimizer, self.options)) and steps_at_once(net, way)

    def train(self, job: Job) -> Trained:
        """The local work of every party in the job, as many at once as the way allows."""
        job.net.module.train()
        at_once = job.hold is None and self._steps_at_once(job.net, job.way)
        if job.way == STACKED and not at_once and together(job.net.layout, at_once) == 1:
            return self.train(replace(job, way=SINGLE))  # a part of it stands still, and all of it is large
        with _threads(job.way, at_once):
            return self._train(job, at_once)

    def _train(self, job: Job, at_once: bool) -> Trained:
        draws_of = partial(seeds.stream, job.seed, job.round)
        draws = [
            draw(p.samples, self.batch, h.work, self.unit, draws_of(p.name, "batch"), p.weights)
            for p, h in zip(job.parties, job.hypers, strict=True)
        ]
        if self.moments == "reset":
            job = replace(job, memories=[_without_moments(memory) for memory in job.memories])
        alike = [self._alike(h, d, at_once) for h, d in zip(job.hypers, draws, strict=True)]
        keys = [
            (a, h.lr, len(d.lengths), age(m)) for a, h, d, m in zip(alike, job.hypers, draws, job.memories, strict=True)
        ]
        order = sorted(range(len(keys)), key=keys.__getitem__)  # rows of one age stand together: see moments.py
        most = {STACKED: together(job.net.layout, at_once), VECTORISED: len(order)}.get(job.way, 1)
        parts = list(_parts(order, alike, most))
        if parts == [list(range(len(keys)))] and job.way != LOOPED:  # nothing to put together
            if at_once:
                return self._descend(job, draws, [], None)[0]
            trained, slope = self._descend(job, draws, keys, job.net.kept.pop("slope", None))
            if slope.reusable:
                job.net.kept["slope"] = slope
            return replace(trained, rows=trained.rows.clone())
        rows = torch.empty_like(job.start, memory_format=torch.contiguous_format)
        memories: list[Memory] = [{}] * len(order)
        metrics: list[Metrics] = [{}] * len(order)
        last: Slope | None = None
        for part in parts:
            some = [draws[i] for i in part], [] if at_once else [keys[i] for i in part]
            with _own_draws(job, part):
                trained, last = self._descend(_rows(job, part), *some, last)
            rows[part] = trained.rows
            for i, memory, metric in zip(part, trained.memories, trained.metrics, strict=True):
                memories[i], metrics[i] = memory, metric
        return Trained(rows, memories, metrics)

    def _alike(self, hyper: Hyper, draws: Draws, at_once: bool) -> tuple[Any, ...]:
        """What parties of one stack have in common; what differs beside costs less than to take them apart."""
        if at_once:
            return hyper.lr, draws.lengths
        return (draws.index.shape[1],) if self.unit == "steps" else ()

    @torch.no_grad()
    @np.errstate(all="ignore")  # numbers that overflow are the gate's business
    def _descend(
        self, job: Job, draws: Sequence[Draws], keys: Sequence[Any], slope: Slope | None
    ) -> tuple[Trained, Slope]:
        """The local work of some parties; the slope that an earlier call used serves again where it can."""
        if slope is None or not slope.serves(self, job, keys):
            slope = Slope(self, job, keys)
        else:
            slope.begin(job)
        descent, columns, size = slope.descent, slope.stack.columns, job.net.layout.size
        pull = Pulling(job, columns[:, :size])
        lengths = [len(d.lengths) for d in draws]
        everybody, shortest = [True] * len(draws), min(lengths)
        for step, groups in enumerate(feed(job.parties, draws)):
            for group in groups:
                if group.rows is None:
                    descent(group.x, group.y)
                else:
                    descent.of(group.rows, group.x, group.y)
            alive = everybody if step < shortest else [step < length for length in lengths]
            with _held(slope.stack, job, step, lengths):
                slope.moments.step(alive)
                pull(alive)
        losses = descent.losses.total / columns.new_tensor(lengths)  # nan for a party that took no step
        kept: Sequence[Memory] = [{}] * len(draws)
        if self.moments == "keep" and not slope.at_once:
            kept = slope.moments.memories()
        if job.terms:
            kept = _with_private(kept, columns[:, size:], slope.objective)
        metrics = [{"loss": loss, "samples": p.samples} for p, loss in zip(job.parties, losses.tolist(), strict=True)]
        rows = columns[:, :size]
        if descent.statistics.shape[1]:
            rows = torch.cat([rows, descent.statistics], 1)
        return Trained(rows, kept, metrics), slope


class Slope:
    """What some parties go down: their columns, the gradient of their objective, and the optimiser."""

    def __init__(self, solver: Sgd, job: Job, keys: Sequence[Any]) -> None:
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

    def serves(self, solver: Sgd, job: Job, keys: Sequence[Any]) -> bool:
        """Whether the same can be done with other parties' numbers: with as many, and no memory of them."""
        same = (solver, keys, [hyper.lr for hyper in job.hypers], job.way, job.loss)
        return self.reusable and not job.terms and self._for == same

    def begin(self, job: Job) -> None:
        """Put some parties' numbers in place of others'."""
        self.stack.columns.copy_(job.start[:, : job.net.layout.size])
        self.descent.losses = Losses(torch.zeros_like(self.stack.columns[:, 0]))


def together(layout: Layout, at_once: bool) -> int:
    """How many parties are stacked at once: as many as a cache holds, since every step goes through all of them."""
    return max(1, (FAR if at_once else CACHE) // (layout.size * layout.dtype.itemsize))


def _parts(order: Sequence[int], keys: Sequence[Any], most: int) -> Iterator[list[int]]:
    """Some parties at a time, all of one key."""
    for _, rows in groupby(order, key=keys.__getitem__):
        run = list(rows)
        yield from (run[first : first + most] for first in range(0, len(run), most))


@contextmanager
def _threads(way: str, at_once: bool) -> Iterator[None]:
    """Small stacks are too small to share: a second thread gains nothing, and loses much on busy cores."""
    before = torch.get_num_threads()
    if way == STACKED and not at_once:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _own_draws(job: Job, part: Sequence[int]) -> Iterator[None]:
    """What a looped module draws by itself is keyed by its party, too; in other ways modules do not draw."""
    if job.way != LOOPED:
        yield
        return
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seeds.torch_seed(job.seed, job.round, job.parties[part[0]].name, "module"))
        yield


def _private(job: Job, row: int) -> list[Tensor]:
    received = job.received[row, : job.net.layout.size]
    draws = partial(seeds.stream, job.seed, job.round, job.parties[row].name)
    return private_columns(job.terms, received, job.memories[row], draws)


_NOTHING_HELD = nullcontext()


def _held(stack: Stack, job: Job, step: int, lengths: Sequence[int]) -> AbstractContextManager[None]:
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


def _with_private(moments: Sequence[Memory], private: Tensor, objective: Objective) -> list[Memory]:
    kept: list[Memory] = []
    for own, memory in zip(private, moments, strict=True):
        parts = zip(objective.terms, torch.split_with_sizes(own, list(objective.widths)), strict=True)
        kept.append({**memory, **{f"private.{term.name}": part.clone() for term, part in parts if len(part)}})
    return kept


def _without_moments(memory: Memory) -> Memory:
    return {name: tensor for name, tensor in memory.items() if name.startswith("private.")}


def _rows(job: Job, rows: list[int]) -> Job:
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
