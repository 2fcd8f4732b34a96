"""Stochastic gradient descent over a stack of parties, with any element-wise torch optimiser."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch.optim import Optimizer

from ..core import seeds
from ..core.algorithm import Hyper, Loss, Memory, Metrics, Term
from ..core.interfaces import Exam, Job, Judgement, Trained
from ..core.settings import check, setting
from ..errors import SettingError
from ..models.flat import Net
from ..parties.population import Party
from .batches import Draws, draw, feed
from .evaluation import on_test_sets
from .gradient_descent import (
    Pulling,
    Slope,
    barred,
    held,
    parts_of,
    rows_of,
    threads,
    together,
    ways_of,
    with_private,
    without_moments,
)
from .model_probe import WAYS, probe
from .stacked_gradient import LOOPED, SINGLE, STACKED, VECTORISED, steps_at_once
from .stacked_optimizer import age, check_elementwise, is_plain, maker


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
        most = together(net.layout, self._steps_at_once(net, STACKED))
        tried = [way for way in WAYS if way not in barred(net.layout, most, count)]
        reasons = probe(net, loss, terms, party.x[:size].clone(), party.y[:size].clone(), tried)  # a module may write
        return ways_of(net.layout, reasons, most, count)

    def _steps_at_once(self, net: Net, way: str) -> bool:
        return is_plain(maker(self.optimizer, self.options)) and steps_at_once(net, way)

    @property
    def metric(self) -> None:
        """What the loss tells."""

    def examine(self, exam: Exam) -> Sequence[Judgement]:
        """On the test sets of the parties."""
        return on_test_sets(exam)

    def train(self, job: Job) -> Trained:
        """The local work of every party in the job, as many at once as the way allows."""
        job.net.module.train()
        at_once = job.hold is None and self._steps_at_once(job.net, job.way)
        if job.way == STACKED and not at_once and together(job.net.layout, at_once) == 1:
            return self.train(replace(job, way=SINGLE))  # a part of it stands still, and all of it is large
        with threads(job.way, at_once):
            return self._train(job, at_once)

    def _train(self, job: Job, at_once: bool) -> Trained:
        draws_of = partial(seeds.stream, job.seed, job.round)
        draws = [
            draw(p.samples, self.batch, h.work, self.unit, draws_of(p.name, "batch"), p.weights)
            for p, h in zip(job.parties, job.hypers, strict=True)
        ]
        if self.moments == "reset":
            job = replace(job, memories=[without_moments(memory) for memory in job.memories])
        alike = [self._alike(h, d, at_once) for h, d in zip(job.hypers, draws, strict=True)]
        keys = [
            (a, h.lr, len(d.lengths), age(m)) for a, h, d, m in zip(alike, job.hypers, draws, job.memories, strict=True)
        ]
        order = sorted(range(len(keys)), key=keys.__getitem__)  # rows of one age stand together: see moments.py
        most = {STACKED: together(job.net.layout, at_once), VECTORISED: len(order)}.get(job.way, 1)
        parts = list(parts_of(order, alike, most))
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
                trained, last = self._descend(rows_of(job, part), *some, last)
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
            with held(slope.stack, job, step, lengths):
                slope.moments.step(alive)
                pull(alive)
        losses = descent.losses.total / columns.new_tensor(lengths)  # nan for a party that took no step
        kept: Sequence[Memory] = [{}] * len(draws)
        if self.moments == "keep" and not slope.at_once:
            kept = slope.moments.memories()
        if job.terms:
            kept = with_private(kept, columns[:, size:], slope.objective)
        metrics = [{"loss": loss, "samples": p.samples} for p, loss in zip(job.parties, losses.tolist(), strict=True)]
        rows = columns[:, :size]
        if descent.statistics.shape[1]:
            rows = torch.cat([rows, descent.statistics], 1)
        return Trained(rows, kept, metrics), slope


@contextmanager
def _own_draws(job: Job, part: Sequence[int]) -> Iterator[None]:
    """What a looped module draws by itself is keyed by its party, too; in other ways modules do not draw."""
    if job.way != LOOPED:
        yield
        return
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seeds.torch_seed(job.seed, job.round, job.parties[part[0]].name, "module"))
        yield
