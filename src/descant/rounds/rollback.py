"""Resets of party states after a rollback to an earlier global model.

A party's state (personal model, private layers and columns, solver state) came from the rounds that were rolled back
and would harm the next ones. Its next task tells the party to reset; until a reply to such a task is accepted, the
party is evaluated with the global model.
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
    """Mark every trained party for a reset from this round on; earlier marks stay."""
    since = _reset_rounds(plan, state)
    return {"since": torch.where((since == 0) & (state.rounds_trained(plan) > 0), round, since)}


def needs_reset(plan: Plan, state: State, party: str, round: int) -> bool:
    """Return whether a task of that round resets the party."""
    return RESETS_KEY in state.server_state and 0 < int(_reset_rounds(plan, state)[plan.party_indices[party]]) <= round


def remaining_resets(plan: Plan, state: State, counted: Sequence[Reply]) -> NamedTensors:
    """Return which parties are still to be reset after these replies, and since which round; empty if none are."""
    if RESETS_KEY not in state.server_state:
        return {}
    since = _reset_rounds(plan, state).clone()
    for reply in counted:
        if needs_reset(plan, state, reply.party, round=reply.round):
            since[plan.party_indices[reply.party]] = 0
    return {"since": since} if since.any() else {}


def _reset_rounds(plan: Plan, state: State) -> Tensor:
    """Return the round from which each party is marked, 0 where it is not, ``[parties]``."""
    held = state.server_state.get(RESETS_KEY)
    return torch.zeros(len(plan.population), dtype=torch.int32) if held is None else held["since"]
