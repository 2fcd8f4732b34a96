"""Portfolio policies over a stack of desks: deterministic policy gradient on what a portfolio grows by.

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
from ..core.algorithm import Hyper, Loss, Memory, Term
from ..core.interfaces import Exam, Job, Judgement, Trained
from ..core.messages import REAL_ONLY
from ..core.metrics import ANNUAL, Metric
from ..core.settings import check, setting
from ..errors import DescantWarning, PartyError
from ..models.flat import Net
from ..portfolio.desk import Desk
from ..portfolio.price_augmentation import UNFIT, UNSOUND, augmenter, sound
from .agent_training import LAST, Life, check_outputs, in_parts, probing, reasons_for
from .backtest_evaluation import in_test_years
from .gradient_descent import Pulling, Slope, held, losses_of, memories_of, ways_of
from .kernels.layers import Array
from .rl_losses import LogReturn, log_softmax

_HELD, _FITTED = "desk.held", "desk.generator"


@dataclass(frozen=True)
class Trader:
    """Each desk learns by days in a row, its own prices and those that it made up behind them, what to hold.

    A batch begins rather late than early: the chance of a day is that of the day after it times 1 - ``bias``. What a
    policy held on a day is remembered, and is what it sees of itself when that day comes again (the portfolio-vector
    memory). Fed+ gives no optimiser; with plain descent at this rate nothing would move.

    >>> Trader(iterations=50).hyper
    Hyper(lr=5e-05, work=50)
    """

    lr: float = setting(5e-5, "the learning rate", above=0)
    iterations: int = setting(50, "E: gradient steps a round", least=0, whole=True)
    batch: int = setting(50, "days in a row that a step takes", least=2, whole=True)
    bias: float = setting(5e-5, "β: how much likelier a later batch is", above=0, below=1)
    renew: int = setting(1000, "steps until a desk makes up another year of prices", least=1, whole=True)
    year: int = setting(252, "days that it makes up", least=1, whole=True)
    at_once: int = setting(10, "desks of one stack, at most", least=1, whole=True)
    optimizer: str | type[Optimizer] = "Adam"  # not from the papers
    options: Mapping[str, Any] = field(default_factory=dict)
    moments: Literal["keep", "reset"] = setting(
        "keep", "the optimiser's memory where merging changed the model", one_of=("keep", "reset")
    )

    @property
    def hyper(self) -> Hyper:
        return Hyper(self.lr, self.iterations)

    @property
    def metric(self) -> Metric:
        """The annualised return of the test."""
        return ANNUAL

    def ways(self, net: Net, loss: Loss, terms: tuple[Term, ...], party: Any, count: int) -> dict[str, str]:
        """As for data; the loss is the solver's own."""
        check(self)
        if not isinstance(party, Desk):
            raise PartyError(
                f"Trader trains desks: give it parties.desks(...). Party {party.name!r} is something else."
            )
        days = len(party.prices)
        if days <= party.window + self.batch:
            raise PartyError(f"Party {party.name!r} has {days} days, too few for batches of {self.batch} days.")
        x, y = trading("Trader", net, party), probing((len(party.assets) + 1,)).mul_(0.02).add_(1)
        reasons = reasons_for(self, "Trader", net, LogReturn(party.cost), terms, x, y)
        return ways_of(net.layout, reasons, self.at_once, count)

    def examine(self, exam: Exam) -> Sequence[Judgement]:
        """In the days of the desks' tests."""
        return in_test_years(exam)

    def train(self, job: Job) -> Trained:
        """The local work of every desk in the job."""
        lives, costs = [Life.of(memory) for memory in job.memories], [desk.cost for desk in job.parties]
        return in_parts(job, lives, self.moments == "reset", self._learn, self.at_once, costs)

    def _learn(self, job: Job, lives: Sequence[Life]) -> Trained:
        """The work of a stack of desks that are at the same step and pay the same cost."""
        job = replace(job, loss=LogReturn(job.parties[0].cost))
        clock, work, everybody = lives[0].clock, job.hypers[0].work, [True] * len(lives)
        slope = Slope(self, job, [0] * len(lives))
        pull, pages = Pulling(job, slope.w), _Pages(self, job, clock)
        chances = [seeds.stream(job.seed, job.round, desk.name, "batch").random(work) for desk in job.parties]
        for step, chance in enumerate(zip(*chances, strict=True)):
            if (clock + step) % self.renew == 0:
                pages.renew(clock + step)
            firsts, x, y = pages.read(chance)
            slope.descent(torch.from_numpy(x), torch.from_numpy(y))
            pages.note(firsts, np.asarray(slope.descent.output).reshape(y.shape))
            with held(slope.stack, job, step, [work] * len(lives)):
                slope.moments.step(everybody)
                pull(everybody)
        memories, metrics = list[Memory](), list[dict[str, float]]()
        for k, (loss, memory) in enumerate(zip(losses_of(slope, work), memories_of(slope, job), strict=True)):
            life = lives[k].after(work, 0, 0.0, [-loss] if work else [])
            memories.append({**memory, **pages.memory(k), **life.memory(), LAST: slope.w[k].clone()})
            metrics.append({"loss": loss, "samples": max(1, work * self.batch), **life.metrics(), **pages.metrics(k)})
        return Trained(slope.w.clone(), memories, metrics)


def trading(owner: str, net: Net, desk: Desk) -> Tensor:
    """Made-up days that a model answers as one must who trades a desk's assets; else an error."""
    assets = len(desk.assets)
    x = probing((assets, desk.window + 1)).mul_(0.02).add_(1)
    check_outputs(owner, net, x, [assets + 1], f"days of {assets} assets, a window of {desk.window} days")
    return x


class _Pages:
    """The books of a stack of desks: prices, real and made up, and what was held on each day."""

    def __init__(self, solver: Trader, job: Job, clock: int) -> None:
        self._solver, self._job = solver, job
        self._desks: list[Desk] = list(job.parties)
        self._fitted = [_fitted(job, k) for k in range(len(self._desks))]
        self._held: list[Array] = []
        self._alone = set[int]()  # who had no year that was made up
        if clock % solver.renew:  # in the middle of a year that was made up before
            self._open(clock)
        for desk, memory in zip(self._desks, job.memories, strict=True):
            days, assets = len(desk.prices) + solver.year, len(desk.assets)
            before = memory.get(_HELD)
            fresh = np.full((days, assets), 1 / assets, dtype=np.float32)
            self._held.append(fresh if before is None else before.numpy().copy())

    def renew(self, clock: int) -> None:
        """Make up another year; what would be held in it is not known yet."""
        self._open(clock)
        for desk, weights in zip(self._desks, self._held, strict=True):
            weights[len(desk.prices) :] = 1 / len(desk.assets)

    def _open(self, clock: int) -> None:
        window = self._desks[0].window
        self._prices = [self._made_up(k, clock) for k in range(len(self._desks))]
        self._alone |= {k for k, desk in enumerate(self._desks) if len(self._prices[k]) == len(desk.prices)}
        self._windows = [np.lib.stride_tricks.sliding_window_view(prices, window, 0) for prices in self._prices]

    def _made_up(self, k: int, clock: int) -> Array:
        """All prices of a desk, with the year that is on at a step of its life."""
        desk, number = self._desks[k], clock // self._solver.renew
        key = (self._job.seed, number, self._solver.year)
        if desk.known.get("prices", (None,))[0] != key:
            year = self._year(k, number)
            desk.known["prices"] = (key, np.concatenate([desk.prices, year]).astype(np.float32))
        found: Array = desk.known["prices"][1]
        return found

    def _year(self, k: int, number: int) -> Array:
        """A year that a desk makes up; none, where what it makes up is of no use."""
        desk, days = self._desks[k], self._solver.year
        rng = seeds.stream(self._job.seed, number, desk.name, "synthetic")
        try:
            if not len(self._fitted[k]):  # nothing was learned to draw from
                return desk.prices[:0]
            year = augmenter(desk.augment).draw(self._fitted[k], desk.prices, days, rng)
            wrong = sound(np.concatenate([desk.prices[-1:], year]), desk.assets) if len(year) else ""
        except (ArithmeticError, np.linalg.LinAlgError, PartyError) as error:
            wrong = f"{type(error).__name__}: {error}"
        if not wrong:
            return year
        told = f"Party {desk.name!r} trains on real prices alone for now: {desk.augment} fails ({wrong})."
        warnings.warn(told, DescantWarning, stacklevel=2)
        return desk.prices[:0]

    def read(self, chances: Sequence[float]) -> tuple[list[int], Array, Array]:
        """A batch of each desk: its first days, what its policy sees, and what the assets grow by."""
        batch, window, count = self._solver.batch, self._desks[0].window, len(self._desks)
        assets = len(self._desks[0].assets)
        x = np.empty((count, batch, assets, window + 1), dtype=np.float32)
        y = np.ones((count, batch, 1 + assets), dtype=np.float32)
        firsts = []
        for k, (prices, chance) in enumerate(zip(self._prices, chances, strict=True)):
            first = first_day(chance, self._solver.bias, window - 1, len(prices) - 1 - batch)
            today = prices[first : first + batch]
            np.divide(self._windows[k][first - window + 1 :][:batch], today[..., None], out=x[k, ..., :window])
            x[k, ..., window] = self._held[k][first - 1 : first - 1 + batch]
            y[k, :, 1:] = prices[first + 1 : first + 1 + batch] / today
            firsts.append(first)
        return firsts, x, y

    def note(self, firsts: Sequence[int], outputs: Array) -> None:
        """Remember what was held on the days of a batch."""
        weights = np.exp(log_softmax(outputs))[..., 1:]
        for held_on, first, own in zip(self._held, firsts, weights, strict=True):
            held_on[first : first + len(own)] = own

    def metrics(self, k: int) -> dict[str, float]:
        """Why a desk had real prices alone, if it should have had others."""
        if k not in self._alone or self._desks[k].augment == "none":
            return {}
        return {REAL_ONLY: UNSOUND if len(self._fitted[k]) else UNFIT}

    def memory(self, k: int) -> dict[str, torch.Tensor]:
        fitted = self._fitted[k]
        kept = {_FITTED: torch.from_numpy(fitted)} if len(fitted) else {}
        return {_HELD: torch.from_numpy(self._held[k]), **kept}


def _fitted(job: Job, k: int) -> Array:
    """What a desk's generator has learned of its prices: remembered, or learned now."""
    desk, before = job.parties[k], job.memories[k].get(_FITTED)
    if before is not None:
        found: Array = before.numpy()
        return found
    key = ("generator", job.seed)
    if key not in desk.known:
        rng = seeds.stream(job.seed, 0, desk.name, "generator")
        try:
            desk.known[key] = augmenter(desk.augment).fit(desk.prices, rng)
        except (ArithmeticError, np.linalg.LinAlgError, PartyError) as error:
            wrong = f"{type(error).__name__}: {error}"
            told = f"Party {desk.name!r} trains on real prices alone: {desk.augment} fails ({wrong})."
            warnings.warn(told, DescantWarning, stacklevel=2)
            desk.known[key] = np.empty(0, dtype=np.float32)
    learned: Array = desk.known[key]
    return learned


def first_day(chance: float, bias: float, earliest: int, latest: int) -> int:
    """Where a batch begins: geometric, back from the latest day (Jiang et al., eq. 26), within what there is.

    >>> [first_day(chance, 0.5, 10, 20) for chance in (0.0, 0.6, 0.8, 0.9999)]
    [20, 19, 18, 10]
    """
    whole = -np.expm1((latest - earliest + 1) * np.log1p(-bias))
    back = int(np.log1p(-chance * whole) / np.log1p(-bias))
    return latest - min(back, latest - earliest)
