"""Findings: problems of a run in sentences, from numbers on record. The thresholds are ours; no paper gives them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..aggregation.penalties import HalfSquare, Norm1, Norm2
from ..algorithms.components import FedPlusStep, FixedMixAnchor, MixedStart, fixed_hyper, keep_global_model
from ..core.messages import CORESET_KEY, REAL_ONLY
from ..core.metrics import trivial_baseline
from ..portfolio.price_augmentation import real_only_message
from ..privacy import budget
from ..rounds.aggregation_diagnostics import rho_bounded_anchor
from ..training import Sgd
from .collapse import Numbers, biggest_jump, lasting_drop, shortfall_start
from .participation_coverage import coverage

if TYPE_CHECKING:
    from ..core.algorithm import Algorithm
    from ..federation import Federation
    from ..rounds.plan import Plan
    from .scores import Scores

MAX_REJECTIONS_SHOWN = 3  # rejections quoted in a finding
MIN_PROXIMAL_SHARE = 0.01  # ours: share of the way to the global model per round; below it, federation is nearly off


@dataclass(frozen=True)
class Finding:
    """A sentence, the kind of problem, and the round of the event if there is one."""

    kind: str
    text: str
    round: int | None = None


def federation_findings(federation: Federation, scores: Scores | None = None) -> tuple[Finding, ...]:
    """Return all findings about a run in its present state; ``scores`` are its scores, if measured."""
    plan = federation.plan_
    history = federation.history_
    participation = coverage(federation)
    findings = [
        inactive_rho(plan.algorithm, [entry.get("max_distance", math.nan) for entry in history]),
        weak_proximal_term(plan, federation.state.round) if history else None,
        detect_collapse(plan.algorithm.name, history, plan.metric.higher_is_better),
        rollback_finding(plan.algorithm.name, history),
        real_prices_only(history),
        *rejection_findings(plan.algorithm.name, list(map(str, federation.rejections_))),
        untrained_parties(participation.trained_count, len(participation.rounds), plan.algorithm) if history else None,
        None if scores is None else below_trivial_baseline(plan.algorithm.name, scores),
        privacy_spent(plan, history),
    ]
    return tuple(finding for finding in findings if finding is not None)


def data_note_sentence(note: str) -> str:
    """Return the remark on the data as a sentence; "" without a remark.

    >>> data_note_sentence("synthetic prices replace real ones")
    'Data: synthetic prices replace real ones.'
    """
    return f"Data: {note}." if note else ""


def inactive_rho(algorithm: Algorithm, max_distances: Sequence[float]) -> Finding | None:
    """Report a ρ so large that prox(w_k - w̃) was always 0: the method is then the mean."""
    bound = rho_bounded_anchor(algorithm)
    known = [distance for distance in max_distances if not math.isnan(distance)]
    if bound is None or not known or max(known) > bound.rho:
        return None
    distance = "largest coordinate difference" if isinstance(bound.penalty, Norm1) else "Euclidean distance"
    evidence = f"the {distance} of a party from the global model was at most {max(known):.2g}"
    return Finding(
        "rho", f"ρ={bound.rho:g} never binds: {algorithm.name} is the mean here ({evidence}). Try a smaller ρ."
    )


def weak_proximal_term(plan: Plan, round: int) -> Finding | None:
    """Report a proximal term that moves every party less than 1 % of the way to the global model per round."""
    share = proximal_share_per_round(plan, round)
    if share is None or share >= MIN_PROXIMAL_SHARE:
        return None
    name = plan.algorithm.name
    moved = f"moves a party at most {100 * share:.2g} % of the way to the global model per round"
    return Finding("proximal", f"The proximal term of {name} {moved}: federation is nearly off. Try a larger α.")


def proximal_share_per_round(plan: Plan, round: int) -> float | None:
    """Return how far E steps move a party to the global model: λ + (1-λ)·(1-θ^E)·λ_k; None where that is not known.

    θ = 1/(1+αη) and λ_k is the share of the global model in the anchor: ρ/(1+ρ) for FedAvg+, γ where it is fixed, and
    at most 1 for the medians. The party with the largest α counts, and the opposing gradients are left out.
    """
    algorithm = plan.algorithm
    solver = plan.solver
    proximal_step = algorithm.proximal_step
    local_start = algorithm.local_start
    known = isinstance(proximal_step, FedPlusStep) and isinstance(local_start, MixedStart) and isinstance(solver, Sgd)
    if not known or algorithm.tune is not fixed_hyper:
        return None
    assert isinstance(proximal_step, FedPlusStep) and isinstance(local_start, MixedStart) and isinstance(solver, Sgd)
    hyper = solver.hyper
    names = plan.population.names
    alpha = float(proximal_step.alphas(max(1, round), names, plan.net.initial_row).max())
    steps = hyper.work
    if solver.unit == "epochs":
        largest = max(plan.population.samples.values())
        steps *= math.ceil(largest / min(solver.batch or largest, largest))
    share = anchor_share(proximal_step)
    if share is None:
        return None
    pulled_share = share * (1 - (1 + alpha * hyper.lr) ** -steps)
    return local_start.init_mix + (1 - local_start.init_mix) * pulled_share


def anchor_share(proximal_step: FedPlusStep) -> float | None:
    """Return an upper bound of the global model's share in the anchor; None where it differs by party."""
    rule = proximal_step.anchor_rule
    if isinstance(rule, FixedMixAnchor):
        return float(rule.gamma) if isinstance(rule.gamma, int | float) else None
    if isinstance(rule.penalty, HalfSquare):
        return rule.rho / (1 + rule.rho)
    return 1.0 if isinstance(rule.penalty, Norm1 | Norm2) else None


def detect_collapse(name: str, history: Sequence[Mapping[str, Any]], higher_is_better: bool = True) -> Finding | None:
    """Report a lasting drop of the training loss or of a measured score, or a jump of the model.

    The score is "personal_trained", the mean over parties that have trained, or else "personal", the mean over all.
    """
    rounds = [int(entry["round"]) for entry in history]
    jump = biggest_jump([entry.get("change", math.nan) for entry in history])
    jump_sentence = "" if jump is None else f"the model of {name} jumped {jump[1]:.3g}× at round {rounds[jump[0]]}"
    if any("reward" in entry for entry in history):  # an agent's loss grows with the value it predicts
        drop_index = lasting_drop(
            [entry.get("reward", math.nan) for entry in history], higher_is_better=True, is_fraction=False
        )
    else:
        drop_index = lasting_drop([entry.get("loss", math.nan) for entry in history], higher_is_better=False)
    if drop_index is None:
        drop_index = lasting_drop(
            [entry.get("personal_trained", entry.get("personal", math.nan)) for entry in history], higher_is_better
        )
    if drop_index is not None:
        drop_sentence = f"what {name} had learned was lost at round {rounds[drop_index]} and stayed lost: collapse."
        return Finding(
            "collapse",
            capitalize_first(f"{jump_sentence}; {drop_sentence}" if jump_sentence else drop_sentence),
            rounds[drop_index],
        )
    if jump is None:
        return None
    return Finding("jump", capitalize_first(f"{jump_sentence}, against its usual change in a round."), rounds[jump[0]])


def detect_shortfall(name: str, series: Mapping[str, Numbers], local_rewards: Numbers) -> Finding | None:
    """Report agents or desks that earn, from some round on, less than half of the reward of local training."""
    start_index = shortfall_start(series["reward"], local_rewards)
    if start_index is None:
        return None
    start_round = int(series["round"][start_index])
    return Finding(
        "collapse",
        capitalize_first(
            f"{name} earned less than half of what local training earned from round {start_round} on: collapse."
        ),
        start_round,
    )


def rollback_finding(name: str, history: Sequence[Mapping[str, Any]]) -> Finding | None:
    """Report how often the tuner rolled back to an earlier global model, with its last note."""
    rollbacks = [(int(entry["round"]), entry["tuner_note"]) for entry in history if entry.get("tuner_note")]
    if not rollbacks:
        return None
    prefix = f"{name}: " if len(rollbacks) == 1 else f"{name} rolled back {len(rollbacks)} times; the last time "
    return Finding("rollback", f"{prefix}{rollbacks[-1][1]}.", rollbacks[0][0])


def real_prices_only(history: Sequence[Mapping[str, Any]]) -> Finding | None:
    """Report desks that could not generate prices in some round, with their reasons."""
    affected = [entry for entry in history if REAL_ONLY in entry]
    if not affected:
        return None
    reasons = {party: reason for entry in affected for party, reason in entry[REAL_ONLY].items()}
    message = f"{real_only_message(reasons)}, in {len(affected)} of {len(history)} rounds."
    return Finding("real prices", message, int(affected[0]["round"]))


def rejection_findings(name: str, rejections: Sequence[str]) -> list[Finding]:
    """Report rejected updates and missing coresets, with the first few distinct reasons.

    >>> rejection_findings("FedAvg", ["round 1, party 'b': stale", "round 2, party 'b': stale"])[0].text
    "2 updates of FedAvg were rejected. The first: round 1, party 'b': stale."
    """
    updates = [one for one in rejections if not is_coreset_rejection(one)]
    coresets = [one for one in rejections if is_coreset_rejection(one)]
    findings = []
    if updates:
        text = summarize_rejections(updates, noun="update", name=name, participle="rejected")
        findings.append(Finding("rejected", text))
    if coresets:
        text = summarize_rejections(coresets, noun="coreset", name=name, participle="missing, or rejected by the vault")
        findings.append(Finding("coreset missing", text))
    return findings


def is_coreset_rejection(rejection: str) -> bool:
    """Return True if the rejected part is a coreset, not an update."""
    return f", tensor {CORESET_KEY!r}: " in rejection


def summarize_rejections(rejections: Sequence[str], noun: str, name: str, participle: str) -> str:
    distinct: dict[str, str] = {}
    for one in rejections:
        distinct.setdefault(one.partition(", ")[2], one)  # the reason without the round
    subject = f"{len(rejections)} {noun}s of {name} were" if len(rejections) > 1 else f"1 {noun} of {name} was"
    return f"{subject} {participle}. The first: {'; '.join(list(distinct.values())[:MAX_REJECTIONS_SHOWN])}."


def capitalize_first(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]


def untrained_parties(trained: int, parties: int, algorithm: Algorithm | None = None) -> Finding | None:
    """Report parties that are evaluated without ever having trained.

    >>> untrained_parties(688, 1000).text
    '312 of 1,000 parties never trained and are evaluated with the global model.'
    """
    if trained >= parties:
        return None
    model = (
        "the initial model"
        if algorithm is not None and algorithm.server_update is keep_global_model
        else "the global model"
    )
    untrained = f"{parties - trained:,} of {parties:,} parties never trained"
    return Finding("coverage", f"{untrained} and are evaluated with {model}.")


def below_trivial_baseline(name: str, scores: Scores) -> Finding | None:
    """Report a mean score below the trivial baseline: the majority class, or random actions."""
    personal = scores.personal.mean
    majority = scores.majority.mean
    sign = 1 if scores.personal.higher_is_better else -1
    if math.isnan(majority) or not sign * personal < sign * majority:
        return None
    baseline_name = trivial_baseline(scores.metric).split()[0]
    return Finding(
        "majority",
        f"{name} is below the {baseline_name} baseline: {personal:.3f} {scores.metric} against {majority:.3f}.",
    )


NOT_COUNTED = {
    "server": "the global models only, not the losses, scores and participation that the server operator sees",
    "party": "what parties report of their training, not their scores on their test sets",
    "sample": "what parties report of their training, not their scores on their test sets",
}


def privacy_spent(plan: Plan, history: Sequence[Mapping[str, Any]]) -> Finding | None:
    """Report the privacy budget that a run has spent, and the outputs that it does not count."""
    privacy = budget.privacy_settings(plan)
    if privacy is None or not history:
        return None
    spent = history[-1].get(budget.EPSILON_METRIC)
    if spent is None:
        return Finding("privacy", f"{plan.algorithm.name} adds no noise: it gives no privacy.")
    unit, unit_count = ("sample", plan.samples) if privacy.at == "sample" else ("party", len(plan.population))
    spent_sentence = budget.privacy_message(spent, privacy.budget, privacy.delta)
    message = f"Each {unit} has spent {spent_sentence}. This counts {NOT_COUNTED[privacy.at]}."
    if privacy.delta * unit_count >= 1:
        message += (
            f" δ should be below 1/{unit_count:,}: it is the probability that a {unit}'s data are revealed outright."
        )
    if privacy.source == "seed":
        message += " The noise is drawn from the run's seed: anyone who knows the seed can remove it."
    return Finding("privacy", message)


def merge_over_seeds(by_seed: Sequence[Sequence[Finding]]) -> Iterator[Finding]:
    """Yield one finding per kind over several seeds, with the number of seeds in which it was found."""
    kinds = dict.fromkeys(finding.kind for findings in by_seed for finding in findings)
    for kind in kinds:
        same = [finding for findings in by_seed for finding in findings if finding.kind == kind]
        numbers = "; the numbers are from the first" if len({finding.text for finding in same}) > 1 else ""
        in_seeds = f" Found with {len(same)} of {len(by_seed)} seeds{numbers}."
        suffix = in_seeds if numbers or len(same) < len(by_seed) else ""
        yield Finding(kind, same[0].text + suffix, same[0].round)
