"""What is wrong, in sentences, from numbers that are known anyway. The thresholds are ours; no paper gives them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..aggregation.penalties import HalfSquare, Norm1, Norm2
from ..algorithms.components import FedPlusPull, Mix, TowardFixed, fixed, stay
from ..core.messages import ASKED, REAL_ONLY
from ..core.metrics import trivial
from ..portfolio.price_augmentation import lacking
from ..privacy import budget
from ..rounds.diagnostics import bound_of
from ..training import Sgd
from .collapse import Numbers, biggest_jump, fell_behind, lasting_fall
from .participation_coverage import coverage

if TYPE_CHECKING:
    from ..core.algorithm import Algorithm
    from ..federation import Federation
    from ..rounds.plan import Plan
    from .scores import Scores

SHOWN = 3  # refusals that a finding tells
NEARLY_OFF = 0.01  # ours: of the way to the centre in a round, below which federation is nearly off


@dataclass(frozen=True)
class Finding:
    """A sentence, what it is about, and the round at which it happened, if it happened at one."""

    kind: str
    text: str
    round: int | None = None


def findings_of(federation: Federation, scores: Scores | None = None) -> tuple[Finding, ...]:
    """All that there is to say about a run as it stands; ``scores`` are its scores now, if somebody has measured."""
    plan, history = federation.plan_, federation.history_
    reached = coverage(federation)
    found = [
        rho_never_binds(plan.algorithm, [entry.get("reach", math.nan) for entry in history]),
        pull_nearly_off(plan, federation.state.round) if history else None,
        collapse(plan.algorithm.name, history, plan.metric.higher_is_better),
        gone_back(plan.algorithm.name, history),
        on_real_prices(history),
        *refused(plan.algorithm.name, list(map(str, federation.refusals_))),
        never_trained(reached.trained, len(reached.rounds), plan.algorithm) if history else None,
        None if scores is None else below_majority(plan.algorithm.name, scores),
        given_away(plan, history),
    ]
    return tuple(finding for finding in found if finding is not None)


def of_the_data(note: str) -> str:
    """What must be known of the data as a sentence; "" if there is nothing.

    >>> of_the_data("critics stand in")
    'Of the data: critics stand in.'
    """
    return f"Of the data: {note}." if note else ""


def rho_never_binds(algorithm: Algorithm, reaches: Sequence[float]) -> Finding | None:
    """Whether prox(w_k - w̃) was 0 for every party in every round: then a robust method is the mean."""
    bound = bound_of(algorithm)
    known = [reach for reach in reaches if not math.isnan(reach)]
    if bound is None or not known or max(known) > bound.rho:
        return None
    which = "in any number of its model" if isinstance(bound.penalty, Norm1) else "in its whole model"
    far = f"no party was farther than {max(known):.2g} from the centre {which}"
    return Finding("rho", f"ρ={bound.rho:g} never binds: {algorithm.name} is the mean here ({far}). Try a smaller ρ.")


def pull_nearly_off(plan: Plan, round: int) -> Finding | None:
    """Whether a round draws a party less than 1 % of the way to the centre."""
    share = pull_a_round(plan, round)
    if share is None or share >= NEARLY_OFF:
        return None
    name, percent = plan.algorithm.name, f"{100 * share:.2g} %"
    return Finding("pull", f"The pull of {name} is {percent} a round: federation is nearly off. Try a larger α.")


def pull_a_round(plan: Plan, round: int) -> float | None:
    """How far E steps draw the most drawn party to the centre: λ + (1-λ)·(1-θ^E)·λ_k; None where that is not known.

    θ = 1/(1+αη) and λ_k is the centre's share in the anchor: ρ/(1+ρ) for FedAvg+, γ where it is fixed, and at most 1
    for the medians. It leaves out what the gradients do against it.
    """
    algorithm, solver = plan.algorithm, plan.solver
    pull, start = algorithm.pull, algorithm.start
    known = isinstance(pull, FedPlusPull) and isinstance(start, Mix) and isinstance(solver, Sgd)
    if not known or algorithm.tune is not fixed:
        return None
    assert isinstance(pull, FedPlusPull) and isinstance(start, Mix) and isinstance(solver, Sgd)
    hyper, names = solver.hyper, plan.people.names
    alpha = float(pull.alphas(max(1, round), names, plan.net.first).max())
    steps = hyper.work
    if solver.unit == "epochs":
        most = max(plan.people.samples.values())
        steps *= math.ceil(most / min(solver.batch or most, most))
    share = _share(pull)
    if share is None:
        return None
    drawn = share * (1 - (1 + alpha * hyper.lr) ** -steps)
    return start.init_mix + (1 - start.init_mix) * drawn


def _share(pull: FedPlusPull) -> float | None:
    """The centre's share in the anchor, at most."""
    toward = pull.toward
    if isinstance(toward, TowardFixed):
        return float(toward.gamma) if isinstance(toward.gamma, int | float) else None
    if isinstance(toward.penalty, HalfSquare):
        return toward.rho / (1 + toward.rho)
    return 1.0 if isinstance(toward.penalty, Norm1 | Norm2) else None


def collapse(name: str, history: Sequence[Mapping[str, Any]], higher_is_better: bool = True) -> Finding | None:
    """Whether the training loss, or the score where it was measured, fell back for good, or the model jumped.

    The score is "learned", that of the parties which have trained, or "own", that of all, where it is not known.
    """
    rounds = [int(entry["round"]) for entry in history]
    jump = biggest_jump([entry.get("change", math.nan) for entry in history])
    told = "" if jump is None else f"the model of {name} jumped {jump[1]:.3g}× at round {rounds[jump[0]]}"
    if any("reward" in entry for entry in history):  # the error of agents grows with what they come to expect
        fall = lasting_fall([entry.get("reward", math.nan) for entry in history], higher_is_better=True, shares=False)
    else:
        fall = lasting_fall([entry.get("loss", math.nan) for entry in history], higher_is_better=False)
    if fall is None:
        fall = lasting_fall([entry.get("learned", entry.get("own", math.nan)) for entry in history], higher_is_better)
    if fall is not None:
        what = f"what {name} had learned was lost at round {rounds[fall]} and stayed lost: collapse."
        return Finding("collapse", _capital(f"{told}; {what}" if told else what), rounds[fall])
    if jump is None:
        return None
    return Finding("jump", _capital(f"{told}, against its usual change in a round."), rounds[jump[0]])


def fallen_behind(name: str, earned: Mapping[str, Numbers], alone: Numbers) -> Finding | None:
    """Whether agents or desks earn, from some round on, less than half of what they earn by training alone."""
    at = fell_behind(earned["reward"], alone)
    if at is None:
        return None
    begins = int(earned["round"][at])
    return Finding(
        "collapse",
        _capital(f"{name} earned less than half of what training alone did from round {begins} on: collapse."),
        begins,
    )


def gone_back(name: str, history: Sequence[Mapping[str, Any]]) -> Finding | None:
    """What a tuner's guard did: how often it went back to an earlier centre, and what it said the last time."""
    told = [(int(entry["round"]), entry["tuned"]) for entry in history if entry.get("tuned")]
    if not told:
        return None
    often = f"{name}: " if len(told) == 1 else f"{name} went back {len(told)} times; the last time "
    return Finding("went back", f"{often}{told[-1][1]}.", told[0][0])


def on_real_prices(history: Sequence[Mapping[str, Any]]) -> Finding | None:
    """Desks that could not make up prices in some round, and why."""
    found = [entry for entry in history if REAL_ONLY in entry]
    if not found:
        return None
    said = {party: why for entry in found for party, why in entry[REAL_ONLY].items()}
    told = f"{lacking(said)}, in {len(found)} of {len(history)} rounds."
    return Finding("real prices", told, int(found[0]["round"]))


def refused(name: str, told: Sequence[str]) -> list[Finding]:
    """Whose reports did not count, whose coresets are not there, and why: the first few of unlike ones.

    >>> refused("FedAvg", ["round 1, party 'b': stale", "round 2, party 'b': stale"])[0].text
    "2 updates of FedAvg were refused. The first: round 1, party 'b': stale."
    """
    updates = [one for one in told if not of_a_coreset(one)]
    coresets = [one for one in told if of_a_coreset(one)]
    found = [Finding("refused", _listed(updates, "update", name, "refused"))] if updates else []
    if coresets:
        found.append(Finding("not left", _listed(coresets, "coreset", name, "not left, or not taken by the vault")))
    return found


def of_a_coreset(told: str) -> bool:
    """Whether a refusal is of what a party leaves behind, and not of what it has learned."""
    return f", tensor {ASKED!r}: " in told


def _listed(told: Sequence[str], what: str, name: str, how: str) -> str:
    unlike: dict[str, str] = {}
    for one in told:
        unlike.setdefault(one.partition(", ")[2], one)  # without its round
    many = f"{len(told)} {what}s of {name} were" if len(told) > 1 else f"1 {what} of {name} was"
    return f"{many} {how}. The first: {'; '.join(list(unlike.values())[:SHOWN])}."


def _capital(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]


def never_trained(trained: int, parties: int, algorithm: Algorithm | None = None) -> Finding | None:
    """Whether parties are judged that had no part in it.

    >>> never_trained(688, 1000).text
    '312 of 1,000 parties never trained and are judged by the centre.'
    """
    if trained >= parties:
        return None
    by = "the model that all began with" if algorithm is not None and algorithm.advance is stay else "the centre"
    return Finding("coverage", f"{parties - trained:,} of {parties:,} parties never trained and are judged by {by}.")


def below_majority(name: str, scores: Scores) -> Finding | None:
    """Whether the parties would do better without learning: by their most frequent answer, or by acting at random."""
    own, majority = scores.own.mean, scores.majority.mean
    sign = 1 if scores.own.higher_is_better else -1
    if math.isnan(majority) or not sign * own < sign * majority:
        return None
    beside = trivial(scores.metric).split()[0]
    return Finding("majority", f"{name} is below the {beside} baseline: {own:.3f} {scores.metric}, not {majority:.3f}.")


_UNCOUNTED = {
    "center": "the centres alone; losses, scores and who took part, as the organiser sees them, are not in it",
    "party": "what parties report of their training; what they score on their test sets is not in it",
    "sample": "what parties report of their training; what they score on their test sets is not in it",
}


def given_away(plan: Plan, history: Sequence[Mapping[str, Any]]) -> Finding | None:
    """What a private run has told of a party, and what is not counted in that."""
    privacy = budget.promised(plan)
    if privacy is None or not history:
        return None
    spent = history[-1].get(budget.EPSILON)
    if spent is None:
        return Finding("privacy", f"{plan.algorithm.name} is without noise: it hides nothing.")
    who, many = ("sample", plan.samples) if privacy.at == "sample" else ("party", len(plan.people))
    given = budget.told(spent, privacy.budget, privacy.delta)
    told = f"A {who} has given away {given}. It counts {_UNCOUNTED[privacy.at]}."
    if privacy.delta * many >= 1:
        told += f" δ should be below 1/{many:,}: it is the chance that one of so many is told outright."
    if privacy.source == "seed":
        told += " The noise is drawn from the run's seed: to those who know it, nothing is hidden."
    return Finding("privacy", told)


def over_seeds(found: Sequence[Sequence[Finding]]) -> Iterator[Finding]:
    """One finding a kind of the same run with several seeds; it says in how many of them it was found."""
    kinds = dict.fromkeys(finding.kind for each in found for finding in each)
    for kind in kinds:
        same = [finding for each in found for finding in each if finding.kind == kind]
        numbers = "; the numbers are of the first" if len({finding.text for finding in same}) > 1 else ""
        told = f" So with {len(same)} of {len(found)} seeds{numbers}." if numbers or len(same) < len(found) else ""
        yield Finding(kind, same[0].text + told, same[0].round)
