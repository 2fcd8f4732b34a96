"""Stochastic gradient descent over a stack of parties, with any element-wise torch optimiser."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from .. import seeds
from ..core import Hyper, Job, Loss, Memory, Term, Trained
from ..errors import SettingError
from ..flat import Net
from ..parties.people import Party
from ..settings import check, setting
from .batches import Draws, draw, feed
from .moments import Moments, age, check_elementwise, maker
from .objective import LOOPED, STACKED, VECTORISED, Objective, private_columns
from .probe import probe

# The largest model, in parameters, for each way of computing parties at once, the faster way first; above it one party
# fills the machine by itself. Measured by `python benchmarks/ways.py`.
MOST = {STACKED: 100_000, VECTORISED: 100_000}


@dataclass(frozen=True)
class Sgd:
    """Each party takes some steps (or epochs) on batches of its own data.

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

    def choose(self, net: Net, loss: Loss, terms: tuple[Term, ...], party: Party, count: int) -> str:
        """How stacks of parties are computed: a function of the model's shapes, the count and torch's version alone."""
        check(self)
        if self.steps is not None and self.epochs is not None:
            raise SettingError(f"Give Sgd steps or epochs, not both. Got steps={self.steps} and epochs={self.epochs}.")
        check_elementwise(maker(self.optimizer, self.options))
        size = party.samples if self.batch is None else min(self.batch, party.samples)
        reasons = probe(net, loss, terms, party.x[:size], party.y[:size])
        fitting = [way for way, most in MOST.items() if net.layout.size <= most and not reasons[way]]
        return fitting[0] if fitting and count > 1 else LOOPED

    def train(self, job: Job) -> Trained:
        """The local work of every party in the job."""
        job.net.module.train()
        if job.way != LOOPED:
            return self._train_stack(job)
        parts = []
        for row, party in enumerate(job.parties):
            with torch.random.fork_rng(devices=[]):  # what the module itself draws is keyed by party, too
                torch.manual_seed(seeds.torch_seed(job.seed, job.round, party.name, "module"))
                parts.append(self._train_stack(_rows(job, [row])))
        memories = [memory for part in parts for memory in part.memories]
        metrics = [metric for part in parts for metric in part.metrics]
        return Trained(torch.cat([part.rows for part in parts]), memories, metrics)

    def _train_stack(self, job: Job) -> Trained:
        draws = [
            draw(p.samples, self.batch, h.work, self.unit, seeds.stream(job.seed, job.round, p.name, "batch"))
            for p, h in zip(job.parties, job.hypers, strict=True)
        ]
        memories = job.memories if self.moments == "keep" else [_without_moments(m) for m in job.memories]
        keys = [(h.lr, len(d.lengths), age(memory)) for h, d, memory in zip(job.hypers, draws, memories, strict=True)]
        order = sorted(range(len(keys)), key=lambda row: keys[row])
        if order != list(range(len(keys))):  # rows of one age stand together: see moments.py
            trained = self._train_stack(_rows(job, order))
            back = sorted(range(len(order)), key=order.__getitem__)
            return Trained(trained.rows[back], [trained.memories[i] for i in back], [trained.metrics[i] for i in back])
        return self._descend(replace(job, memories=memories), draws, keys)

    def _descend(self, job: Job, draws: Sequence[Draws], keys: Sequence[Any]) -> Trained:
        size = job.net.layout.size
        received = job.received[:, :size]
        private = [_private(job, row) for row in range(len(draws))]
        objective = Objective(job.net, job.loss, job.terms, tuple(len(part) for part in private[0]))
        columns = torch.stack([torch.cat([w, *own]) for w, own in zip(job.start[:, :size], private, strict=True)])
        statistics = job.start[:, size:].clone()
        strengths = objective.strengths(job.round, [party.name for party in job.parties], columns)
        lrs = [hyper.lr for hyper in job.hypers]
        moments = Moments(maker(self.optimizer, self.options), columns, lrs, job.memories, keys)
        lengths = [len(d.lengths) for d in draws]
        losses = columns.new_zeros(len(draws))
        gradient = torch.zeros_like(columns)
        for step, groups in enumerate(feed(job.parties, draws)):
            for group in groups:
                rows = slice(None) if group.rows is None else group.rows
                parts = (statistics[rows], received[rows], strengths[rows], group.x, group.y)
                found, values, after = objective.descent(job.way, columns[rows], *parts)
                if group.rows is None:
                    gradient = found
                else:
                    gradient[rows] = found
                statistics[rows] = after
                losses[rows] += values
            alive = [step < length for length in lengths]
            with _held(columns[:, :size], gradient[:, :size], job, step, lengths):
                moments.step(gradient, alive)
                _pull(columns[:, :size], job, lrs, alive)
        losses /= losses.new_tensor(lengths)  # nan for a party that took no step
        return Trained(
            torch.cat([columns[:, :size], statistics], 1),
            _kept(columns[:, size:], objective, moments.memories() if self.moments == "keep" else [{}] * len(draws)),
            [{"loss": loss, "samples": p.samples} for p, loss in zip(job.parties, losses.tolist(), strict=True)],
        )


def _private(job: Job, row: int) -> list[Tensor]:
    received = job.received[row, : job.net.layout.size]
    draws = partial(seeds.stream, job.seed, job.round, job.parties[row].name)
    return private_columns(job.terms, received, job.memories[row], draws)


@contextmanager
def _held(w: Tensor, gradient: Tensor, job: Job, step: int, lengths: Sequence[int]) -> Iterator[None]:
    """Parameters that stand still in this step have no gradient, and are afterwards what they were before."""
    if job.hold is None:
        yield
        return
    still, before = ~job.hold.moving(step, lengths, w.shape[1]), w.clone()
    gradient[still] = 0
    yield
    w[still] = before[still]


def _pull(w: Tensor, job: Job, lrs: Sequence[float], alive: Sequence[bool]) -> None:
    """w ← θ·w + (1-θ)·z in place, Fed+ v2 eq. (6), with θ = 1/(1+αη) of Proposition 2."""
    if job.anchor is None or job.alphas is None:
        return
    eta = w.new_tensor(lrs).unsqueeze(1)
    alpha = job.alphas * w.new_tensor(alive).unsqueeze(1)
    theta = 1 / (1 + alpha * eta)
    w.mul_(theta).addcmul_(1 - theta, job.anchor)


def _kept(private: Tensor, objective: Objective, moments: Sequence[Memory]) -> list[Memory]:
    kept: list[Memory] = []
    for own, memory in zip(private, moments, strict=True):
        parts = zip(objective.terms, torch.split_with_sizes(own, list(objective.widths)), strict=True)
        kept.append({**memory, **{f"private.{term.name}": part.clone() for term, part in parts if len(part)}})
    return kept


def _without_moments(memory: Memory) -> Memory:
    return {name: tensor for name, tensor in memory.items() if name.startswith("private.")}


def _rows(job: Job, rows: list[int]) -> Job:
    """The same job for some of its parties."""
    return replace(
        job,
        parties=[job.parties[row] for row in rows],
        hypers=[job.hypers[row] for row in rows],
        memories=[job.memories[row] for row in rows],
        start=job.start[rows],
        received=job.received[rows],
        anchor=None if job.anchor is None else job.anchor[rows],
        alphas=None if job.alphas is None else job.alphas[rows],
    )
