"""Portfolio policies over a stack of desks: a deterministic policy gradient on portfolio growth.

Jiang, Xu, Liang (2017), A deep reinforcement learning framework for the financial portfolio management problem; as in
Fed+ v1 §4.2, §9 and v2 §8.2.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from ..core import seeds
from ..core.algorithm import Hyper, Loss, LossTerm, NamedTensors
from ..core.interfaces import EvaluationJob, EvaluationResult, TrainJob, TrainResult
from ..core.messages import REAL_ONLY
from ..core.metrics import ANNUAL_RETURN, Metric
from ..core.settings import check_settings, document_parameters, setting
from ..errors import DescantWarning, PartyError
from ..models.flat import Net
from ..portfolio.desk import Desk
from ..portfolio.price_augmentation import FIT_FAILED, SAMPLES_UNUSABLE, make_augmenter, unusable_reason
from .agent_solver_helpers import LAST_MODEL, AgentProgress, check_outputs, mode_obstacles, random_probe, train_stacks
from .backtest_evaluation import evaluate_backtests
from .kernels.layers import Array
from .rl_losses import LogReturn, log_softmax
from .stacked_descent import (
    GradientDescent,
    StackedProximalStep,
    collect_party_states,
    freeze_parameters,
    mean_losses,
    rank_modes,
)

_WEIGHTS_KEY = "desk.weights"
_GENERATOR_KEY = "desk.generator"


@document_parameters(optimizer="the torch optimizer, by name or class", options="its other arguments, such as momentum")
@dataclass(frozen=True)
class Trader:
    """Portfolio training: each desk learns weights from batches of consecutive real and synthetic days.

    Later batches are more likely: the probability of a first day is that of the next day times 1 - ``recency_bias``.
    The weights held on a day are stored, and are the policy's input when that day comes up again (the portfolio-vector
    memory). Fed+ names no optimizer; with plain descent at this rate the weights would hardly change.

    >>> Trader(iterations=50).hyper
    Hyper(lr=5e-05, work=50)
    """

    lr: float = setting(5e-5, "the learning rate", above=0)
    iterations: int = setting(50, "E: gradient steps per round", least=0, whole=True)
    batch: int = setting(50, "consecutive days per gradient step", least=2, whole=True)
    recency_bias: float = setting(5e-5, "β: by how much later batches are more likely", above=0, below=1)
    regenerate_every: int = setting(1000, "gradient steps between two draws of synthetic prices", least=1, whole=True)
    synthetic_days: int = setting(252, "synthetic days per draw", least=1, whole=True)
    max_stack_size: int = setting(10, "the largest number of desks in one stack", least=1, whole=True)
    optimizer: str | type[Optimizer] = "Adam"  # not from the papers
    options: Mapping[str, Any] = field(default_factory=dict)
    moments: Literal["keep", "reset"] = setting(
        "keep", "the optimizer's moments after aggregation changed the model", one_of=("keep", "reset")
    )

    @property
    def hyper(self) -> Hyper:
        return Hyper(self.lr, self.iterations)

    @property
    def metric(self) -> Metric:
        """The annualized return of the test period."""
        return ANNUAL_RETURN

    def execution_modes(
        self, net: Net, loss: Loss, terms: tuple[LossTerm, ...], party: Any, count: int
    ) -> dict[str, str]:
        """Return the execution modes as `Sgd` does for parties with rows, but with this solver's own loss."""
        check_settings(self)
        if not isinstance(party, Desk):
            raise PartyError(
                f"Trader trains desks: give it parties.desks(...). Party {party.name!r} is something else."
            )
        days = len(party.prices)
        if days <= party.window + self.batch:
            raise PartyError(f"Party {party.name!r} has {days} days, too few for batches of {self.batch} days.")
        x = probe_days("Trader", net, party)
        y = random_probe((len(party.assets) + 1,)).mul_(0.02).add_(1)
        reasons = mode_obstacles(self, "Trader", net, loss=LogReturn(party.cost), terms=terms, x=x, y=y)
        return rank_modes(net.layout, reasons, self.max_stack_size, count=count)

    def evaluate(self, job: EvaluationJob) -> Sequence[EvaluationResult]:
        """Evaluate models in the desks' test periods."""
        return evaluate_backtests(job)

    def train(self, job: TrainJob) -> TrainResult:
        """Train every desk of the job."""
        progress = [AgentProgress.from_state(state) for state in job.party_states]
        costs = [desk.cost for desk in job.parties]
        return train_stacks(
            job,
            progress,
            self.moments == "reset",
            learn=self._train_stack,
            max_stack_size=self.max_stack_size,
            groups=costs,
        )

    def _train_stack(self, job: TrainJob, progress: Sequence[AgentProgress]) -> TrainResult:
        """Train a stack of desks that are at the same step and pay the same cost."""
        job = replace(job, loss=LogReturn(job.parties[0].cost))
        clock = progress[0].clock
        work = job.hyperparameters[0].work
        all_alive = [True] * len(progress)
        descent = GradientDescent(self, job, [0] * len(progress))
        proximal_step = StackedProximalStep(job, descent.w)
        batches = _DeskBatches(self, job, clock)
        draws_by_desk = [seeds.stream(job.seed, job.round, desk.name, "batch").random(work) for desk in job.parties]
        for step, draws in enumerate(zip(*draws_by_desk, strict=True)):
            if (clock + step) % self.regenerate_every == 0:
                batches.regenerate(clock + step)
            firsts, x, y = batches.next_batches(draws)
            descent.stack_gradient(torch.from_numpy(x), torch.from_numpy(y))
            batches.store_weights(firsts, np.asarray(descent.stack_gradient.output).reshape(y.shape))
            with freeze_parameters(descent.stack, job, step, lengths=[work] * len(progress)):
                descent.optimizer.step(all_alive)
                proximal_step(all_alive)
        party_states = list[NamedTensors]()
        metrics = list[dict[str, float]]()
        for k, (loss, state) in enumerate(
            zip(mean_losses(descent, work), collect_party_states(descent, job), strict=True)
        ):
            progress_after = progress[k].after_round(work, 0, 0.0, [-loss] if work else [])
            party_states.append(
                {**state, **batches.to_state(k), **progress_after.to_state(), LAST_MODEL: descent.w[k].clone()}
            )
            metrics.append(
                {"loss": loss, "samples": max(1, work * self.batch), **progress_after.metrics(), **batches.metrics(k)}
            )
        return TrainResult(descent.w.clone(), party_states, metrics)


def probe_days(owner: str, net: Net, desk: Desk) -> Tensor:
    """Return random days for a desk; raise if the model's outputs do not fit the desk's assets."""
    assets = len(desk.assets)
    x = random_probe((assets, desk.window + 1)).mul_(0.02).add_(1)
    check_outputs(
        owner, net, x, widths=[assets + 1], input_kind=f"days of {assets} assets, a window of {desk.window} days"
    )
    return x


class _DeskBatches:
    """Batches of a stack of desks: real and synthetic prices, and the weights held on each day."""

    def __init__(self, solver: Trader, job: TrainJob, clock: int) -> None:
        self._solver = solver
        self._job = job
        self._desks: list[Desk] = list(job.parties)
        self._generators = [_fit_generator(job, k) for k in range(len(self._desks))]
        self._weights: list[Array] = []
        self._real_only = set[int]()  # desks without usable synthetic prices
        if clock % solver.regenerate_every:  # in the middle of a synthetic year
            self._load_prices(clock)
        for desk, state in zip(self._desks, job.party_states, strict=True):
            days = len(desk.prices) + solver.synthetic_days
            assets = len(desk.assets)
            saved = state.get(_WEIGHTS_KEY)
            fresh = np.full((days, assets), 1 / assets, dtype=np.float32)
            self._weights.append(fresh if saved is None else saved.numpy().copy())

    def regenerate(self, clock: int) -> None:
        """Draw new synthetic prices; the weights held in them start uniform."""
        self._load_prices(clock)
        for desk, weights in zip(self._desks, self._weights, strict=True):
            weights[len(desk.prices) :] = 1 / len(desk.assets)

    def _load_prices(self, clock: int) -> None:
        window = self._desks[0].window
        self._prices = [self._all_prices(k, clock) for k in range(len(self._desks))]
        self._real_only |= {k for k, desk in enumerate(self._desks) if len(self._prices[k]) == len(desk.prices)}
        self._price_windows = [np.lib.stride_tricks.sliding_window_view(prices, window, 0) for prices in self._prices]

    def _all_prices(self, k: int, clock: int) -> Array:
        """Return the real prices of a desk, followed by the synthetic ones at a step."""
        desk = self._desks[k]
        number = clock // self._solver.regenerate_every
        key = (self._job.seed, number, self._solver.synthetic_days)
        if desk.cache.get("prices", (None,))[0] != key:
            year = self._synthetic_prices(k, number)
            desk.cache["prices"] = (key, np.concatenate([desk.prices, year]).astype(np.float32))
        prices: Array = desk.cache["prices"][1]
        return prices

    def _synthetic_prices(self, k: int, number: int) -> Array:
        """Return the synthetic prices of a desk; empty if they are unusable."""
        desk = self._desks[k]
        days = self._solver.synthetic_days
        rng = seeds.stream(self._job.seed, number, desk.name, "synthetic")
        try:
            if not len(self._generators[k]):  # no generator was fitted
                return desk.prices[:0]
            year = make_augmenter(desk.augment).draw(self._generators[k], desk.prices, days, rng)
            failure = unusable_reason(np.concatenate([desk.prices[-1:], year]), desk.assets) if len(year) else ""
        except (ArithmeticError, np.linalg.LinAlgError, PartyError) as error:
            failure = f"{type(error).__name__}: {error}"
        if not failure:
            return year
        message = f"Party {desk.name!r} trains on real prices alone for now: {desk.augment} fails ({failure})."
        warnings.warn(message, DescantWarning, stacklevel=2)
        return desk.prices[:0]

    def next_batches(self, draws: Sequence[float]) -> tuple[list[int], Array, Array]:
        """Return a batch of each desk: first days, policy inputs, and price relatives."""
        batch = self._solver.batch
        window = self._desks[0].window
        count = len(self._desks)
        assets = len(self._desks[0].assets)
        x = np.empty((count, batch, assets, window + 1), dtype=np.float32)
        y = np.ones((count, batch, 1 + assets), dtype=np.float32)
        firsts = []
        for k, (prices, chance) in enumerate(zip(self._prices, draws, strict=True)):
            first = first_day(chance, self._solver.recency_bias, window - 1, latest=len(prices) - 1 - batch)
            today = prices[first : first + batch]
            np.divide(self._price_windows[k][first - window + 1 :][:batch], today[..., None], out=x[k, ..., :window])
            x[k, ..., window] = self._weights[k][first - 1 : first - 1 + batch]
            y[k, :, 1:] = prices[first + 1 : first + 1 + batch] / today
            firsts.append(first)
        return firsts, x, y

    def store_weights(self, firsts: Sequence[int], outputs: Array) -> None:
        """Store the weights held on the days of a batch."""
        weights = np.exp(log_softmax(outputs))[..., 1:]
        for weights_by_day, first, chosen in zip(self._weights, firsts, weights, strict=True):
            weights_by_day[first : first + len(chosen)] = chosen

    def metrics(self, k: int) -> dict[str, float]:
        """Return the reason code if a desk that should augment had only real prices."""
        if k not in self._real_only or self._desks[k].augment == "none":
            return {}
        return {REAL_ONLY: SAMPLES_UNUSABLE if len(self._generators[k]) else FIT_FAILED}

    def to_state(self, k: int) -> dict[str, torch.Tensor]:
        fitted = self._generators[k]
        generator = {_GENERATOR_KEY: torch.from_numpy(fitted)} if len(fitted) else {}
        return {_WEIGHTS_KEY: torch.from_numpy(self._weights[k]), **generator}


def _fit_generator(job: TrainJob, k: int) -> Array:
    """Return the fitted generator of a desk, from its party state or fitted now."""
    desk = job.parties[k]
    saved = job.party_states[k].get(_GENERATOR_KEY)
    if saved is not None:
        generator: Array = saved.numpy()
        return generator
    key = ("generator", job.seed)
    if key not in desk.cache:
        rng = seeds.stream(job.seed, 0, desk.name, "generator")
        try:
            desk.cache[key] = make_augmenter(desk.augment).fit(desk.prices, rng)
        except (ArithmeticError, np.linalg.LinAlgError, PartyError) as error:
            failure = f"{type(error).__name__}: {error}"
            message = f"Party {desk.name!r} trains on real prices alone: {desk.augment} fails ({failure})."
            warnings.warn(message, DescantWarning, stacklevel=2)
            desk.cache[key] = np.empty(0, dtype=np.float32)
    learned: Array = desk.cache[key]
    return learned


def first_day(draw: float, bias: float, earliest: int, latest: int) -> int:
    """Return the first day of a batch: geometric, back from the latest day (Jiang et al., eq. 26).

    >>> [first_day(chance, 0.5, 10, 20) for chance in (0.0, 0.6, 0.8, 0.9999)]
    [20, 19, 18, 10]
    """
    total_probability = -np.expm1((latest - earliest + 1) * np.log1p(-bias))
    days_back = int(np.log1p(-draw * total_probability) / np.log1p(-bias))
    return latest - min(days_back, latest - earliest)
