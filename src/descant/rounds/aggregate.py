"""What comes of the reports of a round: aggregate -> advance -> keep."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..aggregation.aggregators import Center
from ..aggregation.order_statistics import centred_blocks, weighted_sum
from ..core import seeds
from ..core.algorithm import Aggregated, Hyper, Memory
from ..core.messages import Report
from ..errors import DescantError
from ..storage.spill import room
from .dispatch import own_row
from .plan import Plan
from .state import STALENESS, State
from .validation import finite

if TYPE_CHECKING:
    from ..privacy.gaussian_mechanism import Privacy


@dataclass(frozen=True)
class Outcome:
    """The new centre, and what the parties that trained keep."""

    center: Tensor
    memory: Memory
    gap: float = 0.0
    note: str = ""
    models: Tensor | None = None  # [K, width] as those who trained reported them
    kept: Tensor | None = None  # [K, width] what they keep


def settled(plan: Plan, state: State, hyper: Hyper, accepted: Sequence[Report], asked: Collection[str]) -> Outcome:
    """What came of the reports of those who were asked.

    A centre that fails on them (numbers that overflow, say) leaves the model unchanged.

    What can only be a mistake in the code (a TypeError, say) ends the run.
    """
    try:
        with torch.inference_mode(False), torch.no_grad():
            return _settle(plan, state, hyper, accepted, asked)
    except (DescantError, ArithmeticError, RuntimeError, ValueError) as error:
        state.own.rollback(state.round)
        reason = f"{type(error).__name__}: {error}"
        return Outcome(state.center, state.memories.get("advance", {}), note=f"the model is unchanged: {reason}")


def _settle(plan: Plan, state: State, hyper: Hyper, accepted: Sequence[Report], asked: Collection[str]) -> Outcome:
    """aggregate -> advance -> keep: the new centre, and what each party keeps (staged)."""
    algorithm, size, memory = plan.algorithm, plan.net.layout.size, state.memories.get("advance", {})
    if algorithm.secure is not None:
        return _added(plan, state, accepted, asked)
    count = _counting(plan, len(asked))
    if not accepted and not count:
        return Outcome(state.center, memory, note="no report was accepted: the model is unchanged")
    models = models_of(plan, state, accepted)  # [K, width]
    weights = algorithm.weigh([report.metrics for report in accepted])
    everybody, all_weights = _with_absent(plan, state, accepted, _discounted(plan, state, accepted, models), weights)
    if count:
        aggregated: Aggregated = released(plan, state, everybody, count)
    else:
        aggregated = algorithm.aggregate(everybody[:, :size], all_weights)
    point, remembered = algorithm.advance(state.center[:size], aggregated.point, memory, _share(plan, accepted))
    center = point
    if everybody.shape[1] > size:
        center = torch.cat([point, algorithm.statistics(everybody[:, size:], all_weights).point])
    if not finite(center):
        return Outcome(state.center, memory, note="the aggregate is not finite: the model is unchanged")
    trained = [i for i, report in enumerate(accepted) if report.kind == "train"]
    if not trained:  # stand-ins alone: nobody keeps anything
        return Outcome(center, remembered, aggregated.gap)
    models = models if len(trained) == len(accepted) else _stacked(plan, [models[i] for i in trained])
    kept = center.expand_as(models)
    if algorithm.keep is not None:
        kept = algorithm.keep(models, center, hyper)
        for i, row in zip(trained, kept, strict=True):
            state.own.stage(accepted[i].party, {"model": row})
    return Outcome(center, remembered, aggregated.gap, models=models, kept=kept)


def _added(plan: Plan, state: State, accepted: Sequence[Report], asked: Collection[str]) -> Outcome:
    """aggregate -> advance where the sum is all that is known."""
    size, memory = plan.net.layout.size, state.memories.get("advance", {})
    from ..privacy.secure_aggregation import secure_sum

    why = secure_sum.unopened(plan, accepted, asked)
    if why:
        return Outcome(state.center, memory, note=f"{why}: the model is unchanged")
    mean = secure_sum.mean_of(plan, state.center, accepted)
    point, remembered = plan.algorithm.advance(state.center[:size], mean[:size], memory, _share(plan, accepted))
    if not finite(point):
        return Outcome(state.center, memory, note="the aggregate is not finite: the model is unchanged")
    return Outcome(torch.cat([point, mean[size:]]), remembered)


def _share(plan: Plan, accepted: Sequence[Report]) -> float:
    """The part of all samples that was heard in this round; where parties are hidden, nobody is told."""
    if not plan.samples or plan.algorithm.privacy is not None:
        return 1.0
    heard: float = sum(report.metrics["samples"] for report in accepted)
    return min(1.0, heard / plan.samples)


def _counting(plan: Plan, asked: int) -> float:
    """Over how many a mean with noise is taken, whoever answers: all that were asked, or that come on average.

    0: the mean has no noise here.
    """
    privacy = plan.algorithm.privacy
    if privacy is None or privacy.at == "party":
        return 0.0
    from ..privacy.dp_wrappers import rate_of

    rate = rate_of(privacy, plan.algorithm.attend)
    return float(asked) if rate == 1 else rate * len(plan.people)


def released(plan: Plan, state: State, models: Tensor, count: float) -> Aggregated:
    """w̃ + (Σ clipped changes + noise)/K: who does not answer counts as no change, so that nobody moves it by over C/K.

    McMahan et al. (2018), Algorithm 1, with a fixed denominator.
    """
    privacy, size = plan.algorithm.privacy, plan.net.layout.size
    assert privacy is not None
    center, rows = state.center[:size].double(), models[:, :size]
    factors = privacy.factors(_lengths(rows, center))
    if not privacy.deviation and len(rows) == count and bool((factors == 1).all()):
        return plan.algorithm.aggregate(rows, torch.ones_like(factors))  # bit for bit as without
    total = weighted_sum(rows, factors, center) if len(rows) else torch.zeros_like(center)
    if privacy.deviation:
        total += privacy.deviation * _noise(plan, privacy, state.round + 1)
    return Center((center + total / count).to(models.dtype), gap=0.0)


def _lengths(rows: Tensor, center: Tensor) -> Tensor:
    """‖w_k - w̃‖₂ of every row, in float64."""
    squares = center.new_zeros(len(rows))
    for _, block in centred_blocks(rows, center, torch.float64) if len(rows) else ():
        squares += block.square().sum(1)
    return squares.sqrt()


def _noise(plan: Plan, privacy: Privacy, round: int) -> Tensor:
    """One standard normal number a column, 0 for layers that are private to their parties."""
    from ..privacy import gaussian_mechanism

    layout = plan.net.layout
    by_seed = privacy.source == "seed"
    drawn = (
        gaussian_mechanism.by_seed(plan.seed, round, seeds.EVERYBODY, layout.size)
        if by_seed
        else gaussian_mechanism.by_system(layout.size)
    )
    for begin, end in map(layout.range_of, plan.private):
        drawn[begin:end] = 0
    return drawn


def models_of(plan: Plan, state: State, accepted: Sequence[Report]) -> Tensor:
    """The reported models as rows; columns that are private to their party keep the centre's values."""
    models = room((len(accepted), len(state.center)), state.center.dtype, plan.budget)
    if plan.private:
        models[:] = state.center
    for name in accepted[0].arrays if accepted else ():  # whole models alone pass the gate: all have the same names
        begin, end = plan.net.layout.range_of(name)
        for row, report in zip(models, accepted, strict=True):
            row[begin:end].view(report.arrays[name].shape).copy_(report.arrays[name])
        if plan.algorithm.report == "change":
            models[:, begin:end] += state.center[begin:end]
    return models


def _with_absent(
    plan: Plan, state: State, accepted: Sequence[Report], models: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """A over all W^t instead of S_t (ERRATA 14): absent parties count with their last model, and with weight 1."""
    if plan.algorithm.over == "active":
        return models, weights
    heard = {report.party: i for i, report in enumerate(accepted)}
    rows = [models[heard[p]] if p in heard else own_row(plan, state, p, state.round + 1, True) for p in plan.people]
    return _stacked(plan, rows), torch.ones(len(rows), dtype=weights.dtype)


def _stacked(plan: Plan, rows: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(rows), out=room((len(rows), len(rows[0])), rows[0].dtype, plan.budget))


def _discounted(plan: Plan, state: State, accepted: Sequence[Report], models: Tensor) -> Tensor:
    """Models as far from the centre as late reports count."""
    if plan.algorithm.discount is None:
        return models
    factors = [plan.algorithm.discount(int(report.metrics[STALENESS])) for report in accepted]
    if all(factor == 1 for factor in factors):  # bit for bit as without
        return models
    weights = models.new_tensor(factors).unsqueeze(1)
    return torch.lerp(
        state.center.expand_as(models), models, weights, out=room(tuple(models.shape), models.dtype, plan.budget)
    )
