"""The party's side of a stand-in: the rows that it leaves behind, and who trains on them while it is away.

With a vault the party seals its rows before they leave, and only the worker that stands in opens them, in memory.
Without one, which is for simulations on one machine, no row leaves its party at all: its memory keeps the numbers of
the rows that it chose, and the stand-in takes them out of the party's own data. So a run's folder never holds a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..core.algorithm import CORESET_STATE, Memory, StandIn, hidden_state
from ..core.messages import ASKED, Report, Task
from ..errors import SettingError, VaultError
from ..parties.party import Form, Party
from .features import SPACES
from .selection import Coreset

if TYPE_CHECKING:
    from ..rounds.party_side import Answer
    from ..rounds.plan import Plan
    from ..storage.vault.coreset_rows import Expected

_ROWS, _WEIGHTS, _EVER = f"{CORESET_STATE}rows", f"{CORESET_STATE}weights", f"{CORESET_STATE}ever"

_MORE = 8192  # bytes that sealing adds, at most
_NONE = torch.zeros(0, dtype=torch.int64)


def of(plan: Plan) -> StandIn:
    """How this run's stand-ins are made."""
    if plan.algorithm.stand_in is None:
        raise SettingError(f"{plan.algorithm.name} has no stand-ins. Wrap it: algorithms.StandIns(...).")
    return plan.algorithm.stand_in


def gone(memory: Memory) -> Tensor:
    """The numbers of all rows that ever left the party."""
    return memory.get(_EVER, _NONE)


def having_left(memory: Memory, rows: Tensor | None) -> Memory:
    """A memory of a party that has let these rows go, whatever else it remembers."""
    return memory if rows is None else {**memory, _EVER: rows}


def expected(plan: Plan, samples: int) -> Expected:
    """What the run knows of the coreset of a party with so many rows, before it is opened."""
    from ..storage.vault.coreset_rows import Agreed, Expected

    selection, first = of(plan).selection, plan.people[plan.people.names[0]]
    form = Form(tuple(first.x.shape[1:]), first.x.dtype, tuple(first.y.shape[1:]), first.y.dtype)
    most = Agreed(None if selection.count else selection.share, selection.count).most(samples)
    return Expected(form, most, plan.classes)


def most_sealed(plan: Plan) -> int:
    """The most bytes that a sealed coreset may have; 0 where none is asked for."""
    if plan.algorithm.stand_in is None or plan.vault is None:
        return 0
    return expected(plan, max(plan.people.samples.values())).size + _MORE


def stand_in(plan: Plan, task: Task, memory: Memory) -> Party:
    """Who trains in a party's place, Tuor et al. (2021), eq. (6); an error says why nobody can."""
    whose = f"party {task.party!r}"
    if plan.vault is not None:
        wanted = expected(plan, task.settings["samples"])
        rows = plan.vault.opened.open(task.party, task.round, wanted, *task.settings["known"])
        return Coreset(*rows).party(task.party)
    if _ROWS not in memory:
        raise VaultError(
            f"The run does not know which rows stand in for {whose}. If they lie in a vault, say where: "
            "Federation(..., vault=VaultAt(...))."
        )
    selection, party = of(plan).selection, plan.people[task.party]
    return selection.again(party, memory[_ROWS], memory[_WEIGHTS]).party(task.party)  # type: ignore[no-any-return]


def answered(plan: Plan, task: Task, before: Memory, center: Tensor, answer: Answer) -> Answer:
    """An answer to training with what stand-ins need of it: the party's coreset, or the |D_i| that one counts with.

    A coreset that cannot be made, or that the party has not agreed to, does not cost it its round: the report says why.
    """
    report, memory = answer
    if task.kind == "stand_in":
        return replace(report, metrics={**report.metrics, "samples": task.settings["samples"]}), None
    kept = dict(hidden_state(before))
    if ASKED in task.settings:
        try:
            report, kept = _leave(plan, task, center, report, before.get(_EVER, _NONE))
        except Exception as error:
            report = replace(report, reason=f"it left no coreset: {error}")
    if ASKED in report.metrics and memory is None:  # the work was in vain, and its rows have left all the same
        memory = before
    return report, {**memory, **kept} if memory is not None and kept else memory


def _leave(plan: Plan, task: Task, center: Tensor, report: Report, before: Tensor) -> tuple[Report, dict[str, Tensor]]:
    """The party chooses its rows, seals them if there is a vault, and remembers the numbers of all that ever left."""
    from ..storage.vault.coreset_rows import Rows, check_agreed, pack
    from ..storage.vault.encryption import Invitation, seal

    party, selection = plan.people[task.party], of(plan).selection
    asked: Mapping[str, Any] = task.settings[ASKED]
    if plan.agreed is not None:  # before the work, because no choice of so many rows would do
        check_agreed(party.name, selection.size_for(party), party.samples, plan.agreed)
    features = None if selection.space == "input" else SPACES[selection.space](plan.net.module_of(center))
    chosen = selection.choose(party, task.settings["seed"], features)
    rows = torch.from_numpy(chosen.rows)
    kept = {_EVER: torch.from_numpy(np.union1d(before.numpy(), chosen.rows))}
    if plan.agreed is not None:
        check_agreed(party.name, len(kept[_EVER]) - len(before), party.samples, plan.agreed, len(before))
    report = replace(report, metrics={**report.metrics, ASKED: len(rows)})
    if not asked:
        return report, {**kept, _ROWS: rows, _WEIGHTS: chosen.coreset.weights}
    invitation = Invitation(bytes.fromhex(asked["public"]), asked["generation"])
    plain = pack(Rows(chosen.coreset.x, chosen.coreset.y, chosen.coreset.weights))
    pinned = plan.pinned or (plan.vault.fingerprint if plan.vault is not None else "")
    return replace(report, sealed=seal(invitation, plain, asked["run"], party.name, pinned)), kept
