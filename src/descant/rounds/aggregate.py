"""The server's side of a round: aggregate -> server update -> personalize."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..aggregation.aggregators import AggregatePoint
from ..aggregation.order_statistics import centered_blocks, weighted_sum
from ..core import seeds
from ..core.algorithm import AggregateResult, Hyper, NamedTensors
from ..core.messages import Reply
from ..errors import DescantError
from ..storage.spill import spill_buffer
from .dispatch import personal_row
from .plan import Plan
from .state import STALENESS, State
from .validation import is_finite

if TYPE_CHECKING:
    from ..privacy.gaussian_mechanism import PrivacySettings


@dataclass(frozen=True)
class AggregationOutcome:
    """The new global model, and the new personal models of the parties that trained."""

    global_model: Tensor
    server_update_state: NamedTensors
    gap: float = 0.0
    note: str = ""
    reported_models: Tensor | None = None  # [K, width] as reported by the parties that trained
    personal_models: Tensor | None = None  # [K, width] after personalization


def aggregate_replies(
    plan: Plan, state: State, hyper: Hyper, replies: Sequence[Reply], asked_parties: Collection[str]
) -> AggregationOutcome:
    """Aggregate the replies of the asked parties.

    If the aggregation fails (numbers overflow, for example), the model is unchanged. An error that can only be a
    mistake in the code (a TypeError, for example) ends the run.
    """
    try:
        with torch.inference_mode(False), torch.no_grad():
            return _aggregate_replies(plan, state, hyper, replies=replies, asked_parties=asked_parties)
    except (DescantError, ArithmeticError, RuntimeError, ValueError) as error:
        state.personal_models.rollback(state.round)
        reason = f"{type(error).__name__}: {error}"
        return AggregationOutcome(
            state.global_model, state.server_state.get("server_update", {}), note=f"the model is unchanged: {reason}"
        )


def _aggregate_replies(
    plan: Plan, state: State, hyper: Hyper, replies: Sequence[Reply], asked_parties: Collection[str]
) -> AggregationOutcome:
    """Return the new global model; the personal models are staged."""
    algorithm = plan.algorithm
    size = plan.net.layout.trainable_width
    update_state_before = state.server_state.get("server_update", {})
    if algorithm.secure_aggregation is not None:
        return _aggregate_masked_sum(plan, state, replies, asked=asked_parties)
    dp_count = _dp_denominator(plan, len(asked_parties))
    if not replies and not dp_count:
        return AggregationOutcome(
            state.global_model, update_state_before, note="no reply was accepted: the model is unchanged"
        )
    models = stack_models(plan, state, replies)  # [K, width]
    weights = algorithm.compute_weights([report.metrics for report in replies])
    all_models, all_weights = _add_absent_parties(
        plan, state, replies, models=_apply_staleness_discount(plan, state, replies, models=models), weights=weights
    )
    if dp_count:
        aggregated: AggregateResult = noisy_mean(plan, state, all_models, denominator=dp_count)
    else:
        aggregated = algorithm.aggregate(all_models[:, :size], all_weights)
    new_parameters, update_state = algorithm.server_update(
        state.global_model[:size], aggregated.point, update_state_before, _sample_share(plan, replies)
    )
    global_model = new_parameters
    if all_models.shape[1] > size:
        global_model = torch.cat(
            [new_parameters, algorithm.aggregate_statistics(all_models[:, size:], all_weights).point]
        )
    if not is_finite(global_model):
        return AggregationOutcome(
            state.global_model, update_state_before, note="the aggregate is not finite: the model is unchanged"
        )
    trained_rows = [i for i, report in enumerate(replies) if report.kind == "train"]
    if not trained_rows:  # coreset proxies only: there are no personal models
        return AggregationOutcome(global_model, update_state, aggregated.gap)
    models = models if len(trained_rows) == len(replies) else _stack_rows(plan, [models[i] for i in trained_rows])
    personal_models = global_model.expand_as(models)
    if algorithm.personalize is not None:
        personal_models = algorithm.personalize(models, global_model, hyper)
        for i, row in zip(trained_rows, personal_models, strict=True):
            state.personal_models.stage(replies[i].party, {"model": row})
    return AggregationOutcome(
        global_model, update_state, aggregated.gap, reported_models=models, personal_models=personal_models
    )


def _aggregate_masked_sum(
    plan: Plan, state: State, accepted: Sequence[Reply], asked: Collection[str]
) -> AggregationOutcome:
    """Aggregate where the server knows only the sum."""
    size = plan.net.layout.trainable_width
    update_state_before = state.server_state.get("server_update", {})
    from ..privacy.secure_aggregation import secure_sum

    failure = secure_sum.missing_masks_reason(plan, accepted, asked)
    if failure:
        return AggregationOutcome(state.global_model, update_state_before, note=f"{failure}: the model is unchanged")
    mean = secure_sum.secure_mean(plan, state.global_model, accepted)
    new_parameters, update_state = plan.algorithm.server_update(
        state.global_model[:size], mean[:size], update_state_before, _sample_share(plan, accepted)
    )
    if not is_finite(new_parameters):
        return AggregationOutcome(
            state.global_model, update_state_before, note="the aggregate is not finite: the model is unchanged"
        )
    return AggregationOutcome(torch.cat([new_parameters, mean[size:]]), update_state)


def _sample_share(plan: Plan, accepted: Sequence[Reply]) -> float:
    """Return the share of all samples in the accepted replies; 1 if differential privacy hides the samples."""
    if not plan.samples or plan.algorithm.privacy is not None:
        return 1.0
    reported_samples: float = sum(report.metrics["samples"] for report in accepted)
    return min(1.0, reported_samples / plan.samples)


def _dp_denominator(plan: Plan, asked_count: int) -> float:
    """Return the fixed denominator of a noisy mean: the asked parties, or their expected number; 0 without noise."""
    privacy = plan.algorithm.privacy
    if privacy is None or privacy.at == "party":
        return 0.0
    from ..privacy.dp_wrappers import sampling_rate

    rate = sampling_rate(privacy, plan.algorithm.participation)
    return float(asked_count) if rate == 1 else rate * len(plan.population)


def noisy_mean(plan: Plan, state: State, models: Tensor, denominator: float) -> AggregateResult:
    """Return w̃ + (Σ clipped updates + noise)/K.

    A missing reply counts as no change, so a party moves the result by at most C/K.
    McMahan et al. (2018), Algorithm 1, with a fixed denominator.
    """
    privacy = plan.algorithm.privacy
    size = plan.net.layout.trainable_width
    assert privacy is not None
    global_model = state.global_model[:size].double()
    rows = models[:, :size]
    factors = privacy.clip_factors(_update_norms(rows, global_model))
    if not privacy.noise_std and len(rows) == denominator and bool((factors == 1).all()):
        return plan.algorithm.aggregate(rows, torch.ones_like(factors))  # bit for bit as without
    total = weighted_sum(rows, factors, global_model) if len(rows) else torch.zeros_like(global_model)
    if privacy.noise_std:
        total += privacy.noise_std * _draw_noise(plan, privacy, state.round + 1)
    return AggregatePoint((global_model + total / denominator).to(models.dtype), gap=0.0)


def _update_norms(rows: Tensor, global_model: Tensor) -> Tensor:
    """Return ‖w_k - w̃‖₂ of every row, in float64."""
    squares = global_model.new_zeros(len(rows))
    for _, block in centered_blocks(rows, global_model, torch.float64) if len(rows) else ():
        squares += block.square().sum(1)
    return squares.sqrt()


def _draw_noise(plan: Plan, privacy: PrivacySettings, round: int) -> Tensor:
    """Draw one standard normal number a column, 0 for layers that are private to their parties."""
    from ..privacy import gaussian_mechanism

    layout = plan.net.layout
    by_seed = privacy.source == "seed"
    noise = (
        gaussian_mechanism.seeded_noise(plan.seed, round, seeds.ALL_PARTIES, layout.trainable_width)
        if by_seed
        else gaussian_mechanism.system_noise(layout.trainable_width)
    )
    for begin, end in map(layout.column_range, plan.private_layers):
        noise[begin:end] = 0
    return noise


def stack_models(plan: Plan, state: State, accepted: Sequence[Reply]) -> Tensor:
    """Return the reported models as rows; columns of private layers have the global model's values."""
    models = spill_buffer((len(accepted), len(state.global_model)), state.global_model.dtype, plan.memory_budget)
    if plan.private_layers:
        models[:] = state.global_model
    for name in (
        accepted[0].arrays if accepted else ()
    ):  # validation accepts complete models only: all have the same names
        begin, end = plan.net.layout.column_range(name)
        for row, report in zip(models, accepted, strict=True):
            row[begin:end].view(report.arrays[name].shape).copy_(report.arrays[name])
        if plan.algorithm.reply_content == "update":
            models[:, begin:end] += state.global_model[begin:end]
    return models


def _add_absent_parties(
    plan: Plan, state: State, accepted: Sequence[Reply], models: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Add the absent parties if the aggregate is over all models W^t, not those of S_t (ERRATA 14).

    An absent party counts with its last model. All weights are then 1.
    """
    if plan.algorithm.aggregate_over == "active":
        return models, weights
    index_by_party = {report.party: i for i, report in enumerate(accepted)}
    rows = [
        models[index_by_party[p]]
        if p in index_by_party
        else personal_row(plan, state, p, index=state.round + 1, training=True)
        for p in plan.population
    ]
    return _stack_rows(plan, rows), torch.ones(len(rows), dtype=weights.dtype)


def _stack_rows(plan: Plan, rows: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(rows), out=spill_buffer((len(rows), len(rows[0])), rows[0].dtype, plan.memory_budget))


def _apply_staleness_discount(plan: Plan, state: State, accepted: Sequence[Reply], models: Tensor) -> Tensor:
    """Move late models toward the global model by their staleness discount."""
    if plan.algorithm.staleness_discount is None:
        return models
    factors = [plan.algorithm.staleness_discount(int(report.metrics[STALENESS])) for report in accepted]
    if all(factor == 1 for factor in factors):  # bit for bit as without
        return models
    weights = models.new_tensor(factors).unsqueeze(1)
    return torch.lerp(
        state.global_model.expand_as(models),
        models,
        weights,
        out=spill_buffer(tuple(models.shape), models.dtype, plan.memory_budget),
    )
