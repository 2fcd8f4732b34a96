"""What a private run has given away: counted round by round, kept with the run, and held below its budget."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from ..algorithms.components import by_samples
from ..core.algorithm import Hyper, Metrics
from ..errors import BudgetError, ModelError, SettingError
from ..rounds.extensions import PRIVACY, Spent
from ..rounds.plan import VALIDATION, Plan
from ..rounds.state import State
from ..training import PrivateSgd
from .dp_wrappers import check_samples_hidden, check_sound, rate_of
from .gaussian_mechanism import Privacy
from .secure_aggregation.secure_wrapper import check_adds_up

EPSILON = "epsilon"
_COUNTED = "releases"


def promised(plan: Plan) -> Privacy | None:
    """What a run hides, by its algorithm or by its solver."""
    return plan.solver.privacy if isinstance(plan.solver, PrivateSgd) else plan.algorithm.privacy


def drawn_once(plan: Plan) -> bool:
    """Whether there is noise in its rounds that nobody can draw again."""
    privacy = promised(plan)
    return privacy is not None and privacy.source != "seed"


def told(spent: float | None, budget: float | None, delta: float) -> str:
    """What was given away, of how much; None: there is no noise that would bound it.

    >>> told(1.5, 8.0, 1e-5), told(None, None, 1e-5)
    ('ε=1.5 of a budget of 8 at δ=1e-05', 'no noise: nothing is hidden')
    """
    if spent is None:
        return "no noise: nothing is hidden"
    of = "" if budget is None else f" of a budget of {budget:g}"
    return f"ε={spent:.3g}{of} at δ={delta:g}"


def check(plan: Plan) -> None:
    """Raise if the run promises what it cannot keep."""
    check_sound(plan.algorithm)
    _check_adds_up(plan)
    if isinstance(plan.solver, PrivateSgd):
        check_samples_hidden(plan.algorithm)
    layout = plan.net.layout
    if promised(plan) is not None and layout.width > layout.size:
        raise ModelError(
            f"Running statistics ({layout.names[layout.parameters]}) cannot be hidden: they are no changes of bounded "
            "length. Use nn.GroupNorm or nn.LayerNorm, which have none."
        )


def _check_adds_up(plan: Plan) -> None:
    algorithm, secure = plan.algorithm, plan.algorithm.secure
    check_adds_up(algorithm)
    if secure is not None and len(plan.people) < secure.least:
        raise SettingError(
            f"{algorithm.name} hides work in a sum of {secure.least} parties at least, and there are "
            f"{len(plan.people)}. In a smaller one it hides nothing: use the method without SecureAggregation."
        )
    if secure is not None and algorithm.weigh is by_samples and not plan.samples:
        raise SettingError(
            f"{algorithm.name} weighs by samples, and agents and desks have none before the work. "
            "Use weights='uniform'."
        )


def after(plan: Plan, state: State, hypers: Iterable[Hyper]) -> Spent:
    """What will be given away by the end of a round of so much work; an error if that is more than the budget.

    A round counts whether or not anybody answers, and for all parties, whoever is asked.
    """
    privacy = promised(plan)
    if privacy is None:
        return Spent()
    before = int(state.memories.get(PRIVACY, {}).get(_COUNTED, 0))
    counted = before + (max((hyper.work for hyper in hypers), default=0) if privacy.at == "sample" else 1)
    spent = privacy.epsilon(counted, _rate(plan, privacy))
    if privacy.budget is not None and spent > privacy.budget:
        raise BudgetError(
            f"The privacy budget of ε={privacy.budget:g} at δ={privacy.delta:g} ends the run after {state.round} "
            f"rounds: one more would make it {spent:.4g}. Give more noise for more rounds"
        )
    numbers = {EPSILON: spent} if math.isfinite(spent) else {}
    return Spent({_COUNTED: torch.tensor(counted)}, numbers)


def _rate(plan: Plan, privacy: Privacy) -> float:
    """How likely it is that what is hidden takes part, for the party of which most is told."""
    if isinstance(plan.solver, PrivateSgd):
        return plan.solver.rate(min(plan.people.samples.values()))
    return rate_of(privacy, plan.algorithm.attend)


def public(plan: Plan, feedback: Metrics) -> Metrics:
    """What a tuner may know of the last round: nothing that parties said, where that is private."""
    if promised(plan) is None:
        return feedback
    return {name: value for name, value in feedback.items() if name == VALIDATION}
