"""What is wrong, in sentences, from numbers that are known anyway. The thresholds are ours; no paper gives them."""

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
from ..rounds.diagnostics import rho_bounded_anchor
from ..training import Sgd
from .collapse import Numbers, biggest_jump, lasting_drop, shortfall_start
from .participation_coverage import coverage

if TYPE_CHECKING:
    from ..core.algorithm import Algorithm
    from ..federation import Federation
    from ..rounds.plan import Plan
    from .scores import Scores

MAX_REJECTIONS_SHOWN = 3  # refusals that a finding tells
MIN_PROXIMAL_SHARE = 0.01  # ours: of the way to the centre in a round, below which federation is nearly off


@dataclass(frozen=True)
class Finding:
    """A sentence, what it is about, and the round at which it happened, if it happened at one."""

    kind: str
    text: str
    round: int | None = None


def federation_findings(federation: Federation, scores: Scores | None = None) -> tuple[Finding, ...]:
    """All that there is to say about a run as it stands; ``scores`` are its scores now, if somebody has measured."""
    plan = federation.plan_
    history = federation.history_
    participation = coverage(federation)
    found = [
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
    return tuple(finding for finding in found if finding is not None)


def data_note_sentence(note: str) -> str:
    """What must be known of the data as a sentence; "" if there is nothing.

    >>> of_the_data("critics stand in")
    'Of the data: critics stand in.'
    """
    return f"Of the data: {note}." if note else ""


def inactive_rho(algorithm: Algorithm, max_distances: Sequence[float]) -> Finding | None:
    """Whether prox(w_k - w̃) was 0 for every party in every round: then a robust method is the mean."""
    bound = rho_bounded_anchor(algorithm)
    known = [reach for reach in max_distances if not math.isnan(reach)]
    if bound is None or not known or max(known) > bound.rho:
        return None
    which = "in any number of its model" if isinstance(bound.penalty, Norm1) else "in its whole model"
    evidence = f"no party was farther than {max(known):.2g} from the centre {which}"
    return Finding(
        "rho", f"ρ={bound.rho:g} never binds: {algorithm.name} is the mean here ({evidence}). Try a smaller ρ."
    )


def weak_proximal_term(plan: Plan, round: int) -> Finding | None:
    """Whether a round draws a party less than 1 % of the way to the centre."""
    share = proximal_share_per_round(plan, round)
    if share is None or share >= MIN_PROXIMAL_SHARE:
        return None
    name = plan.algorithm.name
    percent = f"{100 * share:.2g} %"
    return Finding("proximal", f"The pull of {name} is {percent} a round: federation is nearly off. Try a larger α.")


def proximal_share_per_round(plan: Plan, round: int) -> float | None:
    """How far E steps draw the most drawn party to the centre: λ + (1-λ)·(1-θ^E)·λ_k; None where that is not known.

    θ = 1/(1+αη) and λ_k is the centre's share in the anchor: ρ/(1+ρ) for FedAvg+, γ where it is fixed, and at most 1
    for the medians. It leaves out what the gradients do against it.
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
        most = max(plan.population.samples.values())
        steps *= math.ceil(most / min(solver.batch or most, most))
    share = anchor_share(proximal_step)
    if share is None:
        return None
    pulled_share = share * (1 - (1 + alpha * hyper.lr) ** -steps)
    return local_start.init_mix + (1 - local_start.init_mix) * pulled_share


def anchor_share(proximal_step: FedPlusStep) -> float | None:
    """The centre's share in the anchor, at most."""
    toward = proximal_step.anchor_rule
    if isinstance(toward, FixedMixAnchor):
        return float(toward.gamma) if isinstance(toward.gamma, int | float) else None
    if isinstance(toward.penalty, HalfSquare):
        return toward.rho / (1 + toward.rho)
    return 1.0 if isinstance(toward.penalty, Norm1 | Norm2) else None


def detect_collapse(name: str, history: Sequence[Mapping[str, Any]], higher_is_better: bool = True) -> Finding | None:
    """Whether the training loss, or the score where it was measured, fell back for good, or the model jumped.

    The score is "learned", that of the parties which have trained, or "own", that of all, where it is not known.
    """
    rounds = [int(entry["round"]) for entry in history]
    jump = biggest_jump([entry.get("change", math.nan) for entry in history])
    jump_sentence = "" if jump is None else f"the model of {name} jumped {jump[1]:.3g}× at round {rounds[jump[0]]}"
    if any("reward" in entry for entry in history):  # the error of agents grows with what they come to expect
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
    """Whether agents or desks earn, from some round on, less than half of what they earn by training alone."""
    start_index = shortfall_start(series["reward"], local_rewards)
    if start_index is None:
        return None
    start_round = int(series["round"][start_index])
    return Finding(
        "collapse",
        capitalize_first(
            f"{name} earned less than half of what training alone did from round {start_round} on: collapse."
        ),
        start_round,
    )


def rollback_finding(name: str, history: Sequence[Mapping[str, Any]]) -> Finding | None:
    """What a tuner's guard did: how often it went back to an earlier centre, and what it said the last time."""
    rollbacks = [(int(entry["round"]), entry["tuner_note"]) for entry in history if entry.get("tuner_note")]
    if not rollbacks:
        return None
    prefix = f"{name}: " if len(rollbacks) == 1 else f"{name} went back {len(rollbacks)} times; the last time "
    return Finding("rollback", f"{prefix}{rollbacks[-1][1]}.", rollbacks[0][0])


def real_prices_only(history: Sequence[Mapping[str, Any]]) -> Finding | None:
    """Desks that could not make up prices in some round, and why."""
    found = [entry for entry in history if REAL_ONLY in entry]
    if not found:
        return None
    reasons = {party: why for entry in found for party, why in entry[REAL_ONLY].items()}
    told = f"{real_only_message(reasons)}, in {len(found)} of {len(history)} rounds."
    return Finding("real prices", told, int(found[0]["round"]))


def rejection_findings(name: str, rejections: Sequence[str]) -> list[Finding]:
    """Whose reports did not count, whose coresets are not there, and why: the first few of unlike ones.

    >>> refused("FedAvg", ["round 1, party 'b': stale", "round 2, party 'b': stale"])[0].text
    "2 updates of FedAvg were refused. The first: round 1, party 'b': stale."
    """
    updates = [one for one in rejections if not is_coreset_rejection(one)]
    coresets = [one for one in rejections if is_coreset_rejection(one)]
    found = (
        [Finding("rejected", summarize_rejections(updates, "update", name, participle="rejected"))] if updates else []
    )
    if coresets:
        found.append(
            Finding(
                "coreset missing",
                summarize_rejections(coresets, "coreset", name, participle="not left, or not taken by the vault"),
            )
        )
    return found


def is_coreset_rejection(rejection: str) -> bool:
    """Whether a refusal is of what a party leaves behind, and not of what it has learned."""
    return f", tensor {CORESET_KEY!r}: " in rejection


def summarize_rejections(rejections: Sequence[str], noun: str, name: str, participle: str) -> str:
    distinct: dict[str, str] = {}
    for one in rejections:
        distinct.setdefault(one.partition(", ")[2], one)  # without its round
    subject = f"{len(rejections)} {noun}s of {name} were" if len(rejections) > 1 else f"1 {noun} of {name} was"
    return f"{subject} {participle}. The first: {'; '.join(list(distinct.values())[:MAX_REJECTIONS_SHOWN])}."


def capitalize_first(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]


def untrained_parties(trained: int, parties: int, algorithm: Algorithm | None = None) -> Finding | None:
    """Whether parties are judged that had no part in it.

    >>> never_trained(688, 1000).text
    '312 of 1,000 parties never trained and are judged by the centre.'
    """
    if trained >= parties:
        return None
    model = (
        "the model that all began with"
        if algorithm is not None and algorithm.server_update is keep_global_model
        else "the centre"
    )
    return Finding("coverage", f"{parties - trained:,} of {parties:,} parties never trained and are judged by {model}.")


def below_trivial_baseline(name: str, scores: Scores) -> Finding | None:
    """Whether the parties would do better without learning: by their most frequent answer, or by acting at random."""
    personal = scores.personal.mean
    majority = scores.majority.mean
    sign = 1 if scores.personal.higher_is_better else -1
    if math.isnan(majority) or not sign * personal < sign * majority:
        return None
    baseline_name = trivial_baseline(scores.metric).split()[0]
    return Finding(
        "majority", f"{name} is below the {baseline_name} baseline: {personal:.3f} {scores.metric}, not {majority:.3f}."
    )


NOT_COUNTED = {
    "center": "the centres alone; losses, scores and who took part, as the organiser sees them, are not in it",
    "party": "what parties report of their training; what they score on their test sets is not in it",
    "sample": "what parties report of their training; what they score on their test sets is not in it",
}


def privacy_spent(plan: Plan, history: Sequence[Mapping[str, Any]]) -> Finding | None:
    """What a private run has told of a party, and what is not counted in that."""
    privacy = budget.privacy_settings(plan)
    if privacy is None or not history:
        return None
    spent = history[-1].get(budget.EPSILON_METRIC)
    if spent is None:
        return Finding("privacy", f"{plan.algorithm.name} is without noise: it hides nothing.")
    unit, unit_count = ("sample", plan.samples) if privacy.at == "sample" else ("party", len(plan.population))
    spent_sentence = budget.privacy_message(spent, privacy.budget, privacy.delta)
    message = f"A {unit} has given away {spent_sentence}. It counts {NOT_COUNTED[privacy.at]}."
    if privacy.delta * unit_count >= 1:
        message += f" δ should be below 1/{unit_count:,}: it is the chance that one of so many is told outright."
    if privacy.source == "seed":
        message += " The noise is drawn from the run's seed: to those who know it, nothing is hidden."
    return Finding("privacy", message)


def merge_over_seeds(found: Sequence[Sequence[Finding]]) -> Iterator[Finding]:
    """One finding a kind of the same run with several seeds; it says in how many of them it was found."""
    kinds = dict.fromkeys(finding.kind for each in found for finding in each)
    for kind in kinds:
        same = [finding for each in found for finding in each if finding.kind == kind]
        numbers = "; the numbers are of the first" if len({finding.text for finding in same}) > 1 else ""
        suffix = f" So with {len(same)} of {len(found)} seeds{numbers}." if numbers or len(same) < len(found) else ""
        yield Finding(kind, same[0].text + suffix, same[0].round)
