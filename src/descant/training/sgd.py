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
from ..core.algorithm import Hyper, Loss, LossTerm, Metrics, NamedTensors
from ..core.interfaces import EvaluationJob, EvaluationResult, TrainJob, TrainResult
from ..core.settings import check_settings, setting
from ..errors import SettingError
from ..models.flat import Net
from ..parties.population import Party
from .batches import BatchSchedule, draw_batches, iterate_batches
from .evaluation import evaluate_test_sets
from .gradient_descent import (
    GradientDescent,
    StackedProximalStep,
    add_private_columns,
    drop_optimizer_state,
    freeze_parameters,
    limit_threads,
    rank_modes,
    split_stacks,
    stack_capacity,
    subset_job,
    unprofitable_modes,
)
from .model_probe import PROBED_MODES, probe_model
from .stacked_gradient import LOOPED, SINGLE, STACKED, VECTORIZED, supports_fused_step
from .stacked_optimizer import check_elementwise, grouping_key, is_plain_sgd, optimizer_factory


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

    def execution_modes(
        self, net: Net, loss: Loss, terms: tuple[LossTerm, ...], party: Party, count: int
    ) -> dict[str, str]:
        """A function of the model's shapes, the count and torch's version alone."""
        check_settings(self)
        if self.steps is not None and self.epochs is not None:
            raise SettingError(f"Give Sgd steps or epochs, not both. Got steps={self.steps} and epochs={self.epochs}.")
        check_elementwise(optimizer_factory(self.optimizer, self.options))
        size = party.samples if self.batch is None else min(self.batch, party.samples)
        capacity = stack_capacity(net.layout, self._supports_fused_step(net, STACKED))
        candidates = [way for way in PROBED_MODES if way not in unprofitable_modes(net.layout, capacity, count)]
        reasons = probe_model(
            net, loss, terms, x=party.x[:size].clone(), y=party.y[:size].clone(), modes=candidates
        )  # a module may write
        return rank_modes(net.layout, reasons, capacity, count=count)

    def _supports_fused_step(self, net: Net, way: str) -> bool:
        return is_plain_sgd(optimizer_factory(self.optimizer, self.options)) and supports_fused_step(net, way)

    @property
    def metric(self) -> None:
        """What the loss tells."""

    def evaluate(self, job: EvaluationJob) -> Sequence[EvaluationResult]:
        """On the test sets of the parties."""
        return evaluate_test_sets(job)

    def train(self, job: TrainJob) -> TrainResult:
        """The local work of every party in the job, as many at once as the way allows."""
        job.net.module.train()
        fused_step = job.freeze is None and self._supports_fused_step(job.net, job.execution_mode)
        if job.execution_mode == STACKED and not fused_step and stack_capacity(job.net.layout, fused_step) == 1:
            return self.train(replace(job, execution_mode=SINGLE))  # a part of it stands still, and all of it is large
        with limit_threads(job.execution_mode, fused_step):
            return self._train(job, fused_step)

    def _train(self, job: TrainJob, fused_step: bool) -> TrainResult:
        draws_of = partial(seeds.stream, job.seed, job.round)
        draws = [
            draw_batches(
                p.samples, self.batch, h.work, unit=self.unit, rng=draws_of(p.name, "batch"), weights=p.weights
            )
            for p, h in zip(job.parties, job.hyperparameters, strict=True)
        ]
        if self.moments == "reset":
            job = replace(job, party_states=[drop_optimizer_state(memory) for memory in job.party_states])
        stack_keys = [self._stack_key(h, d, fused_step) for h, d in zip(job.hyperparameters, draws, strict=True)]
        keys = [
            (a, h.lr, len(d.lengths), grouping_key(m))
            for a, h, d, m in zip(stack_keys, job.hyperparameters, draws, job.party_states, strict=True)
        ]
        order = sorted(range(len(keys)), key=keys.__getitem__)  # rows of one age stand together: see moments.py
        capacity = {STACKED: stack_capacity(job.net.layout, fused_step), VECTORIZED: len(order)}.get(
            job.execution_mode, 1
        )
        parts = list(split_stacks(order, stack_keys, capacity))
        if parts == [list(range(len(keys)))] and job.execution_mode != LOOPED:  # nothing to put together
            if fused_step:
                return self._run_steps(job, draws, [], None)[0]
            trained, descent = self._run_steps(job, draws, keys, job.net.solver_cache.pop("descent", None))
            if descent.reusable:
                job.net.solver_cache["descent"] = descent
            return replace(trained, models=trained.models.clone())
        rows = torch.empty_like(job.start, memory_format=torch.contiguous_format)
        memories: list[NamedTensors] = [{}] * len(order)
        metrics: list[Metrics] = [{}] * len(order)
        last_descent: GradientDescent | None = None
        for indices in parts:
            part_settings = [draws[i] for i in indices], [] if fused_step else [keys[i] for i in indices]
            with _party_random_state(job, indices):
                trained, last_descent = self._run_steps(subset_job(job, indices), *part_settings, last_descent)
            rows[indices] = trained.models
            for i, memory, metric in zip(indices, trained.party_states, trained.metrics, strict=True):
                memories[i], metrics[i] = memory, metric
        return TrainResult(rows, memories, metrics)

    def _stack_key(self, hyper: Hyper, draws: BatchSchedule, fused_step: bool) -> tuple[Any, ...]:
        """What parties of one stack have in common; what differs beside costs less than to take them apart."""
        if fused_step:
            return hyper.lr, draws.lengths
        return (draws.indices.shape[1],) if self.unit == "steps" else ()

    @torch.no_grad()
    @np.errstate(all="ignore")  # numbers that overflow are the gate's business
    def _run_steps(
        self, job: TrainJob, draws: Sequence[BatchSchedule], keys: Sequence[Any], descent: GradientDescent | None
    ) -> tuple[TrainResult, GradientDescent]:
        """The local work of some parties; the slope that an earlier call used serves again where it can."""
        if descent is None or not descent.can_reuse_for(self, job, keys):
            descent = GradientDescent(self, job, keys)
        else:
            descent.restart(job)
        stack_gradient = descent.stack_gradient
        columns = descent.stack.columns
        size = job.net.layout.trainable_width
        proximal_step = StackedProximalStep(job, columns[:, :size])
        lengths = [len(d.lengths) for d in draws]
        all_alive = [True] * len(draws)
        shortest = min(lengths)
        for step, groups in enumerate(iterate_batches(job.parties, draws)):
            for group in groups:
                if group.rows is None:
                    stack_gradient(group.x, group.y)
                else:
                    stack_gradient.compute_rows(group.rows, group.x, group.y)
            alive = all_alive if step < shortest else [step < length for length in lengths]
            with freeze_parameters(descent.stack, job, step, lengths=lengths):
                descent.optimizer.step(alive)
                proximal_step(alive)
        losses = stack_gradient.losses.total / columns.new_tensor(lengths)  # nan for a party that took no step
        kept: Sequence[NamedTensors] = [{}] * len(draws)
        if self.moments == "keep" and not descent.fused_step:
            kept = descent.optimizer.optimizer_states()
        if job.terms:
            kept = add_private_columns(kept, columns[:, size:], descent.objective)
        metrics = [{"loss": loss, "samples": p.samples} for p, loss in zip(job.parties, losses.tolist(), strict=True)]
        rows = columns[:, :size]
        if stack_gradient.statistics.shape[1]:
            rows = torch.cat([rows, stack_gradient.statistics], 1)
        return TrainResult(rows, kept, metrics), descent


@contextmanager
def _party_random_state(job: TrainJob, indices: Sequence[int]) -> Iterator[None]:
    """What a looped module draws by itself is keyed by its party, too; in other ways modules do not draw."""
    if job.execution_mode != LOOPED:
        yield
        return
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seeds.torch_seed(job.seed, job.round, job.parties[indices[0]].name, "module"))
        yield
