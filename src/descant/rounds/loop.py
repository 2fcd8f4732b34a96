"""A run is an iterator of rounds: record in the loop's body, stop by `break`, resume from a state.

for round in run(plan, engine, initial_state(plan), rounds=50):
    print(round.index, round.accepted, round.gap)
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..algorithms.components import fixed_hyper
from ..core import seeds
from ..core.algorithm import Hyper, NamedTensors, ParticipationContext, TuneContext, TuneResult
from ..core.interfaces import Engine
from ..core.messages import Reply, Task
from ..core.settings import check_settings
from ..errors import BudgetError, DescantError, DescantWarning, ModelError, SettingError
from ..models.flat import MODULE_LOCK
from ..storage import PartyStore
from ..storage.spill import spill_buffer
from . import extensions, rollback
from .aggregate import AggregationOutcome, aggregate_replies
from .aggregation_diagnostics import Diagnostics, aggregation_diagnostics, max_distance, row_distances
from .dispatch import ARRIVAL_TIME, collect_replies, make_tasks
from .party_evaluation import loss_on
from .pending import SENT_AT, PendingTasks
from .plan import VALIDATION_LOSS, Plan, check_labels
from .state import STALENESS, Round, State, local_scores_of, mean_metrics, presence_letters, usable_share
from .validation import Rejection, UpdateValidator

if TYPE_CHECKING:
    from ..coresets.proxy_rounds import DepositedCoresets

__all__ = ["Round", "State", "initial_state", "check_without_data", "possible_execution_modes", "run"]


def initial_state(plan: Plan) -> State:
    """Return the state before the first round; raise for a model, loss or setting that cannot work."""
    return _initial_state(plan, with_data=True)


def check_without_data(plan: Plan) -> None:
    """Raise for errors that do not depend on the parties' data, which is not known yet."""
    _initial_state(plan, with_data=False)


@torch.inference_mode(False)
@torch.enable_grad()
def _initial_state(plan: Plan, with_data: bool) -> State:
    check_settings(plan.algorithm, plan.algorithm.name)
    extensions.check(plan)
    if plan.memory_budget < 0:
        raise SettingError(f"The budget for party state must be >= 0 bytes. Got {plan.memory_budget}.")
    execution_mode = ""
    with nullcontext() if with_data else suppress(ModelError):  # the model may not fit the placeholder rows
        execution_mode = next(mode for mode, reason in possible_execution_modes(plan).items() if not reason)
    if with_data:
        check_labels(plan)
    row = plan.net.initial_row
    first = State(0, row, row, execution_mode=execution_mode, personal_models=PartyStore(plan.memory_budget))
    first = replace(first, feedback=_validation_loss(plan, first, row))
    with torch.no_grad():
        _dry_run(plan, row, plan.solver.hyper, with_coresets=with_data)
        _tune(plan, first, 1)
    extensions.privacy_spent(plan, first, [plan.solver.hyper])  # fail before the first round, not after it
    return first


@torch.inference_mode(False)
@torch.enable_grad()
def possible_execution_modes(plan: Plan) -> dict[str, str]:
    """Return the solver's execution modes for a stack of the first round's size; raise for a bad model."""
    sizes = plan.population.samples
    participants = _select_participants(plan, plan.population.names, plan.solver.hyper, index=1)
    with MODULE_LOCK:
        largest = plan.population[max(sizes, key=sizes.__getitem__)]
        return plan.solver.execution_modes(plan.net, plan.loss, plan.terms, largest, len(participants))


def _dry_run(plan: Plan, row: Tensor, hyper: Hyper, with_coresets: bool) -> None:
    """Call every function of the algorithm on two copies of the initial model, to find mismatches early."""
    algorithm = plan.algorithm
    size = plan.net.layout.trainable_width
    names = [term.name for term in plan.terms]
    if len(set(names)) < len(names):
        raise SettingError(f"The terms of {algorithm.name} must have different names. Got {names}.")
    if set(plan.private_layers) >= set(plan.net.layout.parameter_names):
        raise SettingError(f"All layers of the model are private in {algorithm.name}: nothing is left to share.")
    if algorithm.aggregate_over == "all" and algorithm.personalize is None:
        raise SettingError(f"{algorithm.name} aggregates over all, but its parties have no personal models.")
    if algorithm.loss_samples and not plan.samples:
        raise SettingError(
            f"{algorithm.name} measures the loss on own samples of the parties, and agents and desks have none."
        )
    rows = spill_buffer((2, len(row)), row.dtype, plan.memory_budget).copy_(row)
    try:
        if algorithm.coreset_proxy is not None and with_coresets:
            from ..coresets.proxy_rounds import dry_run_selection

            dry_run_selection(plan, row, algorithm.coreset_proxy.selection)
        algorithm.local_start(rows, rows)
        if algorithm.proximal_step is not None:
            algorithm.proximal_step.anchor(rows[:, :size], rows[:, :size], 1, ["", ""])
        point = algorithm.aggregate(rows[:, :size], torch.ones(2)).point
        algorithm.server_update(row[:size], point, {}, 1.0)
        if algorithm.personalize is not None:
            algorithm.personalize(rows, row, hyper)
    except DescantError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise SettingError(f"{algorithm.name} does not fit a model of {size} parameters: {reason}") from error


def run(
    plan: Plan, engine: Engine, state: State, rounds: int, evaluate_local_in: Collection[int] = ()
) -> Iterator[Round]:
    """Yield the rounds after a state; in rounds of ``evaluate_local_in`` parties also score their local training.

    The run ends with a warning before a round that would exceed the privacy budget.
    """
    algorithm = plan.algorithm
    is_masked = plan.algorithm.secure_aggregation is not None
    validator = UpdateValidator(
        layout=plan.net.layout,
        known_parties=plan.population,
        private_layers=plan.private_layers,
        max_staleness=algorithm.max_staleness,
        max_coreset_bytes=extensions.max_encrypted_bytes(plan),
        is_masked=is_masked,
    )
    for index in range(state.round + 1, state.round + rounds + 1):
        started = time.perf_counter()
        engine.party_states.rollback(state.round)  # of an interrupted round
        state.personal_models.rollback(state.round)
        try:
            result = _run_round(
                plan, engine, validator, state=state, index=index, evaluate_local=index in evaluate_local_in
            )
        except BudgetError as error:
            warnings.warn(f"{error}.", DescantWarning, stacklevel=4)
            return
        engine.party_states.commit(index, result.accepted)
        state.personal_models.commit(index, result.accepted)
        state = result.state
        yield replace(result, seconds=time.perf_counter() - started)


def _run_round(
    plan: Plan, engine: Engine, validator: UpdateValidator, state: State, index: int, evaluate_local: bool
) -> Round:
    """Run one round: tune, participation, tasks, replies, aggregation; the parties' new states are staged."""
    algorithm = plan.algorithm
    d = plan.net.layout.trainable_width
    tune_result, state = _tune(plan, state, index)
    pending_tasks = PendingTasks.from_state(plan, state)
    proxies = extensions.proxies(plan, state)
    busy_parties = pending_tasks.busy_parties
    idle_parties = engine.available_parties(starting_round=True)
    if busy_parties:  # skipped otherwise: it is linear in the number of parties
        idle_parties = [name for name in idle_parties if name not in busy_parties]
    participants = _select_participants(plan, idle_parties, tune_result.hyper, index=index)
    privacy_spent = extensions.privacy_spent(plan, state, participants.values())
    key_exchange = extensions.key_exchange(plan, engine, participants, index)
    participants = participants if key_exchange is None else dict(key_exchange.participants)
    reachable = {*participants, *busy_parties}
    coreset_requests, faults = (
        proxies.coreset_requests(plan, [*participants, *sorted(busy_parties)]) if proxies else ({}, {})
    )
    tasks = list(
        _train_tasks(
            plan,
            state,
            participants,
            index=index,
            evaluate_local=evaluate_local,
            pending_tasks=pending_tasks,
            coreset_requests=coreset_requests,
        )
    )
    if key_exchange is not None:
        tasks = key_exchange.add_cohort(tasks)
    if proxies is not None:
        tasks += proxies.proxy_tasks(plan, state, tune_result.hyper, reachable, index)
    tasks.sort(key=lambda task: plan.party_indices[task.party])  # so sums do not depend on which parties have proxies
    validator.update_base = state.global_model if algorithm.reply_content == "update" else None
    replies = collect_replies(engine, validator, tasks, index=index, quorum=algorithm.quorum)
    accepted = _add_staleness(plan, replies.accepted, index)
    trained = [reply for reply in accepted if reply.kind == "train"]
    outcome = aggregate_replies(plan, state, tune_result.hyper, replies=accepted, asked_parties=participants)
    counted = [] if outcome.note else trained
    proxied = () if outcome.note else tuple(reply.party for reply in accepted if reply.kind == "proxy")
    rejections = (*(key_exchange.rejections if key_exchange else ()), *replies.rejections)
    if proxies is not None:
        proxies, deposit_rejections = proxies.after_round(plan, counted, reachable, faults)
        rejections += tuple(deposit_rejections)
    start_distance = max_distance(
        algorithm, [task.arrays["personal"] for task in tasks if "personal" in task.arrays], state.global_model, d=d
    )
    pending_tasks = pending_tasks.after_round(state, replies)
    trained_parties = tuple(reply.party for reply in counted)
    local_scores = local_scores_of(counted, index) if evaluate_local else {}
    after = replace(
        state,
        round=index,
        global_model=outcome.global_model,
        server_state=_next_server_state(
            plan,
            state,
            tune_result,
            outcome=outcome,
            counted=counted,
            pending_tasks=pending_tasks,
            proxies=proxies,
            privacy_spent=privacy_spent,
        ),
        feedback=_feedback(
            plan, state, accepted, rejections=replies.rejections, pending_tasks=pending_tasks, outcome=outcome
        ),
        local_scores={**state.local_scores, **local_scores} if local_scores else state.local_scores,
    )
    change = row_distances(outcome.global_model[None], state.global_model[None])
    norm = torch.linalg.vector_norm(outcome.global_model)
    note = outcome.note + (f" ({rejections[0]})" if rejections and not accepted else "")
    diagnostics = _diagnostics(plan, outcome).with_max_distance(start_distance)
    tuning = {} if algorithm.tune is fixed_hyper else {**vars(tune_result.hyper), **tune_result.metrics}
    tuning |= privacy_spent.metrics
    presence = presence_letters(plan, after, trained_parties, proxied=proxied)
    numbers = (outcome.gap, float(change), 0.0, note, float(norm))
    details = (*numbers, diagnostics, tuple(local_scores), tuning, tune_result.note, proxied, presence)
    metrics_by_party = {reply.party: reply.metrics for reply in accepted}
    return Round(index, after, participants, trained_parties, rejections, *details, metrics_by_party)


def _select_participants(plan: Plan, names: Sequence[str], hyper: Hyper, index: int) -> dict[str, Hyper]:
    """Return the participants among the reachable, idle parties."""
    rng = seeds.stream(plan.seed, index, seeds.ALL_PARTIES, "attend")
    return plan.algorithm.participation(
        ParticipationContext(index, names, hyper, rng=rng, seed=plan.seed, all_parties=plan.population)
    )


def _train_tasks(
    plan: Plan,
    state: State,
    participants: Mapping[str, Hyper],
    index: int,
    evaluate_local: bool,
    pending_tasks: PendingTasks,
    coreset_requests: Mapping[str, Mapping[str, Any]],
) -> Iterator[Task]:
    """Yield the tasks of the participants, and the pending tasks again, unchanged."""
    hypers_by_round = {index: participants}
    for one in pending_tasks.tasks:
        hypers_by_round[one.round] = {**hypers_by_round.get(one.round, {}), one.party: one.hyper}
    sent_at = {one.party: one.sent_at for one in pending_tasks.tasks}
    timed = plan.algorithm.quorum is not None or pending_tasks.clock > 0
    for round, hypers in hypers_by_round.items():
        party_settings: dict[str, dict[str, Any]] = {party: {**coreset_requests.get(party, {})} for party in hypers}
        for party, settings in party_settings.items():
            settings |= {"evaluate_local": True} if evaluate_local else {}
            settings |= {SENT_AT: sent_at.get(party, pending_tasks.clock)} if timed else {}
        start_state = state if round == index else pending_tasks.state_at(state, round)
        yield from make_tasks(plan, start_state, hypers, kind="train", index=round, party_settings=party_settings)


def _add_staleness(plan: Plan, accepted: Sequence[Reply], index: int) -> list[Reply]:
    """Add the staleness of each reply to its metrics, where replies may be late."""
    if plan.algorithm.quorum is None and plan.algorithm.staleness_discount is None and not plan.algorithm.max_staleness:
        return list(accepted)
    return [replace(r, metrics={**r.metrics, STALENESS: float(index - r.round)}) for r in accepted]


def _next_server_state(
    plan: Plan,
    state: State,
    tune_result: TuneResult,
    outcome: AggregationOutcome,
    counted: Sequence[Reply],
    pending_tasks: PendingTasks,
    proxies: DepositedCoresets | None,
    privacy_spent: extensions.PrivacyCost,
) -> dict[str, NamedTensors]:
    """Return the server state after a round, by component."""
    rounds_trained = state.rounds_trained(plan).clone()
    rounds_trained.numpy()[[plan.party_indices[reply.party] for reply in counted]] += 1
    server_state: dict[str, NamedTensors] = {
        "tune": tune_result.tuner_state,
        "server_update": outcome.server_update_state,
        "participation": {"rounds": rounds_trained},
    }
    if proxies is not None:
        server_state["proxy"] = proxies.to_tensors()
    if plan.algorithm.quorum is not None or pending_tasks.clock > 0:
        server_state["pending_tasks"] = pending_tasks.to_tensors(plan)
    if resets := rollback.remaining_resets(plan, state, counted):
        server_state[rollback.RESETS_KEY] = resets
    if privacy_spent.server_state:
        server_state[extensions.PRIVACY] = privacy_spent.server_state
    return server_state


def _diagnostics(plan: Plan, outcome: AggregationOutcome) -> Diagnostics:
    if outcome.reported_models is None or outcome.personal_models is None:
        return Diagnostics()
    return aggregation_diagnostics(
        plan.algorithm,
        outcome.reported_models,
        outcome.personal_models,
        global_model=outcome.global_model,
        d=plan.net.layout.trainable_width,
    )


def _feedback(
    plan: Plan,
    state: State,
    accepted: Sequence[Reply],
    rejections: Sequence[Rejection],
    pending_tasks: PendingTasks,
    outcome: AggregationOutcome,
) -> dict[str, float]:
    """Return the tuner's feedback on a round."""
    trained = mean_metrics([reply for reply in accepted if reply.kind == "train"])
    clock = {ARRIVAL_TIME: pending_tasks.clock} if pending_tasks.clock > 0 else {}
    usable = usable_share(accepted, rejections, outcome.note)
    return {**trained, **usable, **clock, **_validation_loss(plan, state, outcome.global_model)}


def _tune(plan: Plan, state: State, index: int) -> tuple[TuneResult, State]:
    """Return the tuner's result before a round and the state to continue from, which may be a rollback.

    After a rollback the server-update state is discarded and the parties are marked for a reset.
    """
    rng = seeds.stream(plan.seed, index, seeds.ALL_PARTIES, "tune")
    tuner_state = state.server_state.get("tune", {})
    public_feedback = extensions.public_feedback(plan, state.feedback)
    result = plan.algorithm.tune(
        TuneContext(
            index, plan.solver.hyper, tuner_state, feedback=public_feedback, global_model=state.global_model, rng=rng
        )
    )
    if result.global_model is None:
        return result, state
    server_state = {part: tensors for part, tensors in state.server_state.items() if part != "server_update"}
    server_state[rollback.RESETS_KEY] = rollback.mark_for_reset(plan, state, index)
    return result, replace(state, global_model=result.global_model, server_state=server_state, feedback={})


def _validation_loss(plan: Plan, before: State, global_model: Tensor) -> dict[str, float]:
    """Return the loss of the new global model on the server's validation set; an unchanged model keeps its loss."""
    if plan.population.validation is None:
        return {}
    known = before.feedback.get(VALIDATION_LOSS)
    if known is None or not torch.equal(global_model, before.global_model):
        known = loss_on(plan, global_model, *plan.population.validation)
    return {VALIDATION_LOSS: known}
