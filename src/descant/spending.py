"""What a private run has given away: counted round by round, kept with the run, and held below its budget."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from .algorithms.private import check_sound, rate_of
from .core import Memory, Metrics
from .errors import BudgetError, ModelError
from .piece import VALIDATION, Plan
from .state import State

KEY = "privacy"
EPSILON = "epsilon"


@dataclass(frozen=True)
class Spent:
    """What is given away by the end of a round."""

    memory: Memory = field(default_factory=dict)
    numbers: Metrics = field(default_factory=dict)


def check(plan: Plan) -> None:
    """Raise if the run promises what it cannot keep."""
    check_sound(plan.algorithm)
    layout = plan.net.layout
    if plan.algorithm.privacy is not None and layout.width > layout.size:
        raise ModelError(
            f"{plan.algorithm.name} cannot hide running statistics ({layout.names[layout.parameters]}), which are no "
            "changes of bounded length. Use nn.GroupNorm or nn.LayerNorm, which have none."
        )


def after(plan: Plan, state: State) -> Spent:
    """What will be given away by the end of the next round; an error if that is more than the budget.

    A round counts whether or not anybody answers.
    """
    privacy = plan.algorithm.privacy
    if privacy is None:
        return Spent()
    before = released(state)
    spent = privacy.epsilon(before + 1, rate_of(privacy, plan.algorithm.attend))
    if privacy.budget is not None and spent > privacy.budget:
        raise BudgetError(
            f"The privacy budget of ε={privacy.budget:g} at δ={privacy.delta:g} ends the run after {before} rounds: "
            f"one more would make it {spent:.4g}. Give more noise for more rounds"
        )
    numbers = {EPSILON: spent} if math.isfinite(spent) else {}
    return Spent({"releases": torch.tensor(before + 1)}, numbers)


def released(state: State) -> int:
    """How many rounds are counted."""
    return int(state.memories.get(KEY, {}).get("releases", 0))


def public(plan: Plan, feedback: Metrics) -> Metrics:
    """What a tuner may know of the last round: nothing that parties said, where that is private."""
    if plan.algorithm.privacy is None:
        return feedback
    return {name: value for name, value in feedback.items() if name == VALIDATION}
