"""Stochastic gradient descent over a stack of parties, with any element-wise torch optimizer."""

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
from ..core.settings import check_settings, document_parameters, setting
from ..errors import SettingError
from ..models.flat import Net
from ..parties.population import Party
from .batches import BatchSchedule, draw_batches, iterate_batches
from .evaluation import evaluate_test_sets
from .model_probe import PROBED_MODES, probe_model
from .stacked_descent import (
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
from .stacked_gradient import LOOPED, SINGLE, STACKED, VECTORIZED, supports_fused_step
from .stacked_optimizer import check_elementwise, grouping_key, is_plain_sgd, optimizer_factory


@document_parameters(optimizer="the torch optimizer, by name or class", options="its other arguments, such as momentum")
@dataclass(frozen=True)
class Sgd:
    """SGD: each party takes steps or epochs on its own data, τ steps of Tuor et al. (2021), eq. (2).

    >>> Sgd(lr=0.05, steps=20, batch=10).hyper
    Hyper(lr=0.05, work=20)
    """

    lr: float = setting(0.01, "the learning rate η", above=0)
    steps: int | None = setting(
        None, "local steps per round (20 if neither steps nor epochs is given)", least=0, whole=True
    )
    batch: int | None = setting(10, "samples per step; None takes all samples of the party", least=1, whole=True)
    epochs: int | None = setting(None, "local epochs per round, instead of steps", least=0, whole=True)
    optimizer: str | type[Optimizer] = "SGD"
    options: Mapping[str, Any] = field(default_factory=dict)
    moments: Literal["keep", "reset"] = setting(
        "keep", "the optimizer's moments between rounds", one_of=("keep", "reset")
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
        """Return the execution modes: a function of the model, the count and torch's version alone."""
        check_settings(self)
        if self.steps is not None and self.epochs is not None:
            raise SettingError(f"Give Sgd steps or epochs, not both. Got steps={self.steps} and epochs={self.epochs}.")
        check_elementwise(optimizer_factory(self.optimizer, self.options))
        size = party.samples if self.batch is None else min(self.batch, party.samples)
        capacity = stack_capacity(net.layout, self._supports_fused_step(net, STACKED))
        candidates = [mode for mode in PROBED_MODES if mode not in unprofitable_modes(net.layout, capacity, count)]
        x, y = party.x[:size].clone(), party.y[:size].clone()  # a module may write to its input
        reasons = probe_model(net, loss, terms, x=x, y=y, modes=candidates)
        return rank_modes(net.layout, reasons, capacity, count=count)

    def _supports_fused_step(self, net: Net, mode: str) -> bool:
        return is_plain_sgd(optimizer_factory(self.optimizer, self.options)) and supports_fused_step(net, mode)

    @property
    def metric(self) -> None:
        """None: the metric follows from the loss."""

    def evaluate(self, job: EvaluationJob) -> Sequence[EvaluationResult]:
        """Evaluate models on the test sets of the parties."""
        return evaluate_test_sets(job)

    def train(self, job: TrainJob) -> TrainResult:
        """Train every party of the job, in stacks as large as the execution mode allows."""
        job.net.module.train()
        fused_step = job.freeze is None and self._supports_fused_step(job.net, job.execution_mode)
        if job.execution_mode == STACKED and not fused_step and stack_capacity(job.net.layout, fused_step) == 1:
            return self.train(replace(job, execution_mode=SINGLE))  # frozen in part, and too large to stack
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
            job = replace(job, party_states=[drop_optimizer_state(state) for state in job.party_states])
        stack_keys = [self._stack_key(h, d, fused_step) for h, d in zip(job.hyperparameters, draws, strict=True)]
        keys = [
            (a, h.lr, len(d.lengths), grouping_key(m))
            for a, h, d, m in zip(stack_keys, job.hyperparameters, draws, job.party_states, strict=True)
        ]
        order = sorted(range(len(keys)), key=keys.__getitem__)  # groups rows of one age: see stacked_optimizer.py
        capacity = {STACKED: stack_capacity(job.net.layout, fused_step), VECTORIZED: len(order)}.get(
            job.execution_mode, 1
        )
        parts = list(split_stacks(order, stack_keys, capacity))
        if parts == [list(range(len(keys)))] and job.execution_mode != LOOPED:  # one stack holds all parties, in order
            if fused_step:
                return self._run_steps(job, draws, [], None)[0]
            trained, descent = self._run_steps(job, draws, keys, job.net.solver_cache.pop("descent", None))
            if descent.reusable:
                job.net.solver_cache["descent"] = descent
            return replace(trained, models=trained.models.clone())
        rows = torch.empty_like(job.start, memory_format=torch.contiguous_format)
        party_states: list[NamedTensors] = [{}] * len(order)
        metrics: list[Metrics] = [{}] * len(order)
        last_descent: GradientDescent | None = None
        for indices in parts:
            part_settings = [draws[i] for i in indices], [] if fused_step else [keys[i] for i in indices]
            with _party_random_state(job, indices):
                trained, last_descent = self._run_steps(subset_job(job, indices), *part_settings, last_descent)
            rows[indices] = trained.models
            for i, state, metric in zip(indices, trained.party_states, trained.metrics, strict=True):
                party_states[i], metrics[i] = state, metric
        return TrainResult(rows, party_states, metrics)

    def _stack_key(self, hyper: Hyper, draws: BatchSchedule, fused_step: bool) -> tuple[Any, ...]:
        """Return what parties of one stack must share; other differences cost less than splitting the stack."""
        if fused_step:
            return hyper.lr, draws.lengths
        return (draws.indices.shape[1],) if self.unit == "steps" else ()

    @torch.no_grad()
    @np.errstate(all="ignore")  # overflows are left to the validation of updates
    def _run_steps(
        self, job: TrainJob, draws: Sequence[BatchSchedule], keys: Sequence[Any], descent: GradientDescent | None
    ) -> tuple[TrainResult, GradientDescent]:
        """Train one stack; the `GradientDescent` of an earlier call is reused if it fits."""
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
        party_states: Sequence[NamedTensors] = [{}] * len(draws)
        if self.moments == "keep" and not descent.fused_step:
            party_states = descent.optimizer.optimizer_states()
        if job.terms:
            party_states = add_private_columns(party_states, columns[:, size:], descent.objective)
        metrics = [{"loss": loss, "samples": p.samples} for p, loss in zip(job.parties, losses.tolist(), strict=True)]
        rows = columns[:, :size]
        if stack_gradient.statistics.shape[1]:
            rows = torch.cat([rows, stack_gradient.statistics], 1)
        return TrainResult(rows, party_states, metrics), descent


@contextmanager
def _party_random_state(job: TrainJob, indices: Sequence[int]) -> Iterator[None]:
    """Seed torch by the party in looped mode, for layers such as dropout; other modes draw no random numbers."""
    if job.execution_mode != LOOPED:
        yield
        return
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seeds.torch_seed(job.seed, job.round, job.parties[indices[0]].name, "module"))
        yield
