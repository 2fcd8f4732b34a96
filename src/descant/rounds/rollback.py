"""After a return to an earlier centre, parties begin anew from it.

What a party keeps for itself (its own model, private layers and columns, what its solver remembers) came of the same
rounds as the centre that was given up, and would ruin the next one as well. It is told so by its next task, whenever
that is; until a report to such a task counts, it is judged by the centre.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..core.algorithm import NamedTensors
from ..core.messages import Reply
from .plan import Plan
from .state import State

RESETS_KEY = "reset"


def mark_for_reset(plan: Plan, state: State, round: int) -> NamedTensors:
    """Who has ever trained owes a new beginning from this round on; who owes one already owes it since then."""
    since = _reset_rounds(plan, state)
    return {"since": torch.where((since == 0) & (state.rounds_trained(plan) > 0), round, since)}


def needs_reset(plan: Plan, state: State, party: str, round: int) -> bool:
    """Whether a task of that round tells the party to begin anew."""
    return RESETS_KEY in state.server_state and 0 < int(_reset_rounds(plan, state)[plan.party_indices[party]]) <= round


def remaining_resets(plan: Plan, state: State, counted: Sequence[Reply]) -> NamedTensors:
    """Who owes it when these reports have counted; nothing if nobody does."""
    if RESETS_KEY not in state.server_state:
        return {}
    since = _reset_rounds(plan, state).clone()
    for report in counted:
        if needs_reset(plan, state, report.party, round=report.round):
            since[plan.party_indices[report.party]] = 0
    return {"since": since} if since.any() else {}


def _reset_rounds(plan: Plan, state: State) -> Tensor:
    """The round from which each party owes it, 0 where it does not, ``[parties]``."""
    held = state.server_state.get(RESETS_KEY)
    return torch.zeros(len(plan.population), dtype=torch.int32) if held is None else held["since"]
