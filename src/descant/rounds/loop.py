"""A run is an iterator of rounds: recording is the loop's body, stopping is `break`, resuming is starting from a state.

for round in run(plan, engine, begin(plan), rounds=50):
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

from ..algorithms.components import fixed
from ..core import seeds
from ..core.algorithm import Attending, Hyper, Memory, Tuned, Tuning
from ..core.interfaces import Engine
from ..core.messages import Report, Task
from ..core.settings import check
from ..errors import BudgetError, DescantError, DescantWarning, ModelError, SettingError
from ..models.flat import ONE_AT_A_TIME
from ..storage import PartyStore
from ..storage.spill import room
from . import extensions, rollback
from .aggregate import Outcome, settled
from .diagnostics import Gauges, distances, gauged, reach
from .dispatch import CLOCK, hear, tasks_for
from .party_evaluation import loss_on
from .pending import AT, Flight
from .plan import VALIDATION, Plan, check_labels
from .state import STALENESS, Round, State, feedback_of, judgements_of, presence_of, used_of
from .validation import Gate, Refusal

if TYPE_CHECKING:
    from ..coresets.proxy_rounds import Left

__all__ = ["Round", "State", "begin", "check_unseen", "possible_ways", "run"]


def begin(plan: Plan) -> State:
    """The state before the first round; a model, a loss or a setting that cannot work is an error here."""
    return _begun(plan, seen=True)


def check_unseen(plan: Plan) -> None:
    """Raise for what cannot work whatever rows the parties will have: nobody has seen any yet."""
    _begun(plan, seen=False)


@torch.inference_mode(False)
@torch.enable_grad()
def _begun(plan: Plan, seen: bool) -> State:
    check(plan.algorithm, plan.algorithm.name)
    extensions.check(plan)
    if plan.budget < 0:
        raise SettingError(f"The budget for party state must be >= 0 bytes. Got {plan.budget}.")
    way = ""
    with nullcontext() if seen else suppress(ModelError):  # which may only not fit rows that are not there
        way = next(way for way, reason in possible_ways(plan).items() if not reason)
    if seen:
        check_labels(plan)
    row = plan.net.first
    first = State(0, row, row, way, PartyStore(plan.budget))
    first = replace(first, feedback=_validated(plan, first, row))
    with torch.no_grad():
        _rehearse(plan, row, plan.solver.hyper, leaving=seen)
        _tuned(plan, first, 1)
    extensions.privacy_spent(plan, first, [plan.solver.hyper])  # fail before the first round, not after it
    return first


@torch.inference_mode(False)
@torch.enable_grad()
def possible_ways(plan: Plan) -> dict[str, str]:
    """The solver's ways to compute a stack of as many parties as the first round has; a bad model is an error here."""
    sizes = plan.people.samples
    present = _present(plan, plan.people.names, plan.solver.hyper, 1)
    with ONE_AT_A_TIME:
        largest = plan.people[max(sizes, key=sizes.__getitem__)]
        return plan.solver.ways(plan.net, plan.loss, plan.terms, largest, len(present))


def _rehearse(plan: Plan, row: Tensor, hyper: Hyper, leaving: bool) -> None:
    """Every answer once, on two copies of the first model: what does not fit the model is found before the work."""
    algorithm, size = plan.algorithm, plan.net.layout.size
    names = [term.name for term in plan.terms]
    if len(set(names)) < len(names):
        raise SettingError(f"The terms of {algorithm.name} must have names of their own. Got {names}.")
    if set(plan.private) >= set(plan.net.layout.layers):
        raise SettingError(f"All layers of the model are private in {algorithm.name}: nothing is left to share.")
    if algorithm.over == "all" and algorithm.keep is None:
        raise SettingError(f"{algorithm.name} aggregates over all, but its parties keep no models of their own.")
    if algorithm.measure and not plan.samples:
        raise SettingError(
            f"{algorithm.name} lets parties measure the loss on samples of theirs, and agents and desks have none."
        )
    rows = room((2, len(row)), row.dtype, plan.budget).copy_(row)
    try:
        if algorithm.stand_in is not None and leaving:
            from ..coresets.proxy_rounds import rehearse_leaving

            rehearse_leaving(plan, row, algorithm.stand_in.selection)
        algorithm.start(rows, rows)
        if algorithm.pull is not None:
            algorithm.pull.anchor(rows[:, :size], rows[:, :size], 1, ["", ""])
        point = algorithm.aggregate(rows[:, :size], torch.ones(2)).point
        algorithm.advance(row[:size], point, {}, 1.0)
        if algorithm.keep is not None:
            algorithm.keep(rows, row, hyper)
    except DescantError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise SettingError(f"{algorithm.name} does not fit a model of {size} parameters: {reason}") from error


def run(plan: Plan, engine: Engine, state: State, rounds: int, judge: Collection[int] = ()) -> Iterator[Round]:
    """The rounds that follow a state, one at a time; in those of ``judge`` parties judge their own local work.

    Before a round for which a privacy budget does not do they end, with a warning.
    """
    algorithm, masked = plan.algorithm, plan.algorithm.secure is not None
    gate = Gate(
        layout=plan.net.layout,
        known=plan.people,
        private=plan.private,
        max_staleness=algorithm.max_staleness,
        most_sealed=extensions.most_sealed(plan),
        masked=masked,
    )
    for index in range(state.round + 1, state.round + rounds + 1):
        began = time.perf_counter()
        engine.memory.rollback(state.round)  # of a round that was broken off
        state.own.rollback(state.round)
        try:
            found = _round(plan, engine, gate, state, index, index in judge)
        except BudgetError as error:
            warnings.warn(f"{error}.", DescantWarning, stacklevel=4)
            return
        engine.memory.commit(index, found.accepted)
        state.own.commit(index, found.accepted)
        state = found.state
        yield replace(found, seconds=time.perf_counter() - began)


def _round(plan: Plan, engine: Engine, gate: Gate, state: State, index: int, judge: bool) -> Round:
    """tune -> attend -> tasks -> reports -> outcome; what parties keep of it is staged."""
    algorithm, d = plan.algorithm, plan.net.layout.size
    tuned, state = _tuned(plan, state, index)
    flight, proxies = Flight.of(plan, state), extensions.proxies(plan, state)
    busy, idle = flight.parties, engine.members(begin=True)
    if busy:  # else nothing goes through all parties
        idle = [name for name in idle if name not in busy]
    present = _present(plan, idle, tuned.hyper, index)
    spent = extensions.privacy_spent(plan, state, present.values())
    met = extensions.key_exchange(plan, engine, present, index)
    present = present if met is None else dict(met.present)
    there = {*present, *busy}
    asked, faults = proxies.asking(plan, [*present, *sorted(busy)]) if proxies else ({}, {})
    tasks = list(_training(plan, state, present, index, judge, flight, asked))
    if met is not None:
        tasks = met.told(tasks)
    if proxies is not None:
        tasks += proxies.stand_ins(plan, state, tuned.hyper, there, index)
    tasks.sort(key=lambda task: plan.places[task.party])  # sums do not depend on who is stood in for
    gate.changes_from = state.center if algorithm.report == "change" else None
    heard = hear(engine, gate, tasks, index, algorithm.quorum)
    accepted = _dated(plan, heard.accepted, index)
    trained = [report for report in accepted if report.kind == "train"]
    outcome = settled(plan, state, tuned.hyper, accepted, present)
    counted = [] if outcome.note else trained
    stood_in = () if outcome.note else tuple(report.party for report in accepted if report.kind == "stand_in")
    refusals = (*(met.refusals if met else ()), *heard.refusals)
    if proxies is not None:
        proxies, not_left = proxies.after(plan, counted, there, faults)
        refusals += tuple(not_left)
    came = reach(algorithm, [task.arrays["own"] for task in tasks if "own" in task.arrays], state.center, d)
    flight = flight.after(state, heard)
    names = tuple(report.party for report in counted)
    judged = judgements_of(counted, index) if judge else {}
    after = replace(
        state,
        round=index,
        center=outcome.center,
        memories=_remembered(plan, state, tuned, outcome, counted, flight, proxies, spent),
        feedback=_feedback(plan, state, accepted, heard.refusals, flight, outcome),
        judged={**state.judged, **judged} if judged else state.judged,
    )
    change, norm = distances(outcome.center[None], state.center[None]), torch.linalg.vector_norm(outcome.center)
    note = outcome.note + (f" ({refusals[0]})" if refusals and not accepted else "")
    gauges = _gauges(plan, outcome).reaching(came)
    tuning = {} if algorithm.tune is fixed else {**vars(tuned.hyper), **tuned.numbers}
    tuning |= spent.numbers
    presence = presence_of(plan, after, names, stood_in)
    numbers = (outcome.gap, float(change), 0.0, note, float(norm))
    told = (*numbers, gauges, tuple(judged), tuning, tuned.note, stood_in, presence)
    said = {report.party: report.metrics for report in accepted}
    return Round(index, after, present, names, refusals, *told, said)


def _present(plan: Plan, names: Sequence[str], hyper: Hyper, index: int) -> dict[str, Hyper]:
    """Who takes part, of those who can be reached and are idle."""
    rng = seeds.stream(plan.seed, index, seeds.EVERYBODY, "attend")
    return plan.algorithm.attend(Attending(index, names, hyper, rng, plan.seed, plan.people))


def _training(
    plan: Plan,
    state: State,
    present: Mapping[str, Hyper],
    index: int,
    judge: bool,
    flight: Flight,
    asking: Mapping[str, Mapping[str, Any]],
) -> Iterator[Task]:
    """Tasks for those who take part, and once more what others are still at work on, as they were asked."""
    asked = {index: present}
    for one in flight.asked:
        asked[one.round] = {**asked.get(one.round, {}), one.party: one.hyper}
    since = {one.party: one.at for one in flight.asked}
    timed = plan.algorithm.quorum is not None or flight.clock > 0
    for round, hypers in asked.items():
        more: dict[str, dict[str, Any]] = {party: {**asking.get(party, {})} for party in hypers}
        for party, settings in more.items():
            settings |= {"judge": True} if judge else {}
            settings |= {AT: since.get(party, flight.clock)} if timed else {}
        begun = state if round == index else flight.begun(state, round)
        yield from tasks_for(plan, begun, hypers, "train", round, more)


def _dated(plan: Plan, accepted: Sequence[Report], index: int) -> list[Report]:
    """Reports with how late each of them is, where they may be late."""
    if plan.algorithm.quorum is None and plan.algorithm.discount is None and not plan.algorithm.max_staleness:
        return list(accepted)
    return [replace(r, metrics={**r.metrics, STALENESS: float(index - r.round)}) for r in accepted]


def _remembered(
    plan: Plan,
    state: State,
    tuned: Tuned,
    outcome: Outcome,
    counted: Sequence[Report],
    flight: Flight,
    proxies: Left | None,
    spent: extensions.Spent,
) -> dict[str, Memory]:
    """What the server remembers after a round, by the answer that it belongs to."""
    attended = state.attended(plan).clone()
    attended.numpy()[[plan.places[report.party] for report in counted]] += 1
    memories: dict[str, Memory] = {"tune": tuned.memory, "advance": outcome.memory, "attend": {"rounds": attended}}
    if proxies is not None:
        memories["stand_in"] = proxies.memory()
    if plan.algorithm.quorum is not None or flight.clock > 0:
        memories["flight"] = flight.memory(plan)
    if owed := rollback.after(plan, state, counted):
        memories[rollback.KEY] = owed
    if spent.memory:
        memories[extensions.PRIVACY] = spent.memory
    return memories


def _gauges(plan: Plan, outcome: Outcome) -> Gauges:
    if outcome.models is None or outcome.kept is None:
        return Gauges()
    return gauged(plan.algorithm, outcome.models, outcome.kept, outcome.center, plan.net.layout.size)


def _feedback(
    plan: Plan, state: State, accepted: Sequence[Report], refusals: Sequence[Refusal], flight: Flight, outcome: Outcome
) -> dict[str, float]:
    """What the tuner will know of a round."""
    trained = feedback_of([report for report in accepted if report.kind == "train"])
    clock = {CLOCK: flight.clock} if flight.clock > 0 else {}
    used = used_of(accepted, refusals, outcome.note)
    return {**trained, **used, **clock, **_validated(plan, state, outcome.center)}


def _tuned(plan: Plan, state: State, index: int) -> tuple[Tuned, State]:
    """What the tuner says before a round, and the state to go on from: it may go back to another centre.

    What the server remembers of its moves is then forgotten: they led away from there. So did what parties keep.
    """
    rng = seeds.stream(plan.seed, index, seeds.EVERYBODY, "tune")
    memory, seen = state.memories.get("tune", {}), extensions.public_feedback(plan, state.feedback)
    tuned = plan.algorithm.tune(Tuning(index, plan.solver.hyper, memory, seen, state.center, rng))
    if tuned.center is None:
        return tuned, state
    memories = {answer: memory for answer, memory in state.memories.items() if answer != "advance"}
    memories[rollback.KEY] = rollback.owe(plan, state, index)
    return tuned, replace(state, center=tuned.center, memories=memories, feedback={})


def _validated(plan: Plan, before: State, center: Tensor) -> dict[str, float]:
    """The loss of the new centre on the server's own set, where there is one; a centre that stayed keeps its loss."""
    if plan.people.validation is None:
        return {}
    known = before.feedback.get(VALIDATION)
    if known is None or not torch.equal(center, before.center):
        known = loss_on(plan, center, *plan.people.validation)
    return {VALIDATION: known}
