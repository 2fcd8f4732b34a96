"""After a return to an earlier centre, parties begin anew from it.

What a party keeps for itself (its own model, private layers and columns, what its solver remembers) came of the same
rounds as the centre that was given up, and would ruin the next one as well. It is told so by its next task, whenever
that is; until a report to such a task counts, it is judged by the centre.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..core.algorithm import Memory
from ..core.messages import Report
from .plan import Plan
from .state import State

KEY = "anew"


def owe(plan: Plan, state: State, round: int) -> Memory:
    """Who has ever trained owes a new beginning from this round on; who owes one already owes it since then."""
    owed = _since(plan, state)
    return {"since": torch.where((owed == 0) & (state.attended(plan) > 0), round, owed)}


def is_owed(plan: Plan, state: State, party: str, round: int) -> bool:
    """Whether a task of that round tells the party to begin anew."""
    return KEY in state.memories and 0 < int(_since(plan, state)[plan.places[party]]) <= round


def after(plan: Plan, state: State, counted: Sequence[Report]) -> Memory:
    """Who owes it when these reports have counted; nothing if nobody does."""
    if KEY not in state.memories:
        return {}
    since = _since(plan, state).clone()
    for report in counted:
        if is_owed(plan, state, report.party, report.round):
            since[plan.places[report.party]] = 0
    return {"since": since} if since.any() else {}


def _since(plan: Plan, state: State) -> Tensor:
    """The round from which each party owes it, 0 where it does not, ``[parties]``."""
    held = state.memories.get(KEY)
    return torch.zeros(len(plan.people), dtype=torch.int32) if held is None else held["since"]
