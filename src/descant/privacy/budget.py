"""Privacy accounting of a run: ε counted round by round, saved with the run and kept below its budget."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from ..algorithms.components import sample_weights
from ..core.algorithm import Hyper, Metrics
from ..errors import BudgetError, ModelError, SettingError
from ..rounds.extensions import PRIVACY, PrivacyCost
from ..rounds.plan import VALIDATION_LOSS, Plan
from ..rounds.state import State
from ..training import DpSgd
from .dp_wrappers import check_private, check_sample_privacy, sampling_rate
from .gaussian_mechanism import PrivacySettings
from .secure_aggregation.secure_wrapper import check_summable

EPSILON_METRIC = "epsilon"
_RELEASES_KEY = "releases"


def privacy_settings(plan: Plan) -> PrivacySettings | None:
    """Return a run's privacy settings, from its algorithm or its solver; None if it has none."""
    return plan.solver.privacy if isinstance(plan.solver, DpSgd) else plan.algorithm.privacy


def has_unrepeatable_noise(plan: Plan) -> bool:
    """Return True if the run's noise cannot be drawn again."""
    privacy = privacy_settings(plan)
    return privacy is not None and privacy.source != "seed"


def privacy_message(spent: float | None, budget: float | None, delta: float) -> str:
    """Return ε spent and its budget as text; None means no noise bounds ε.

    >>> privacy_message(1.5, 8.0, 1e-5), privacy_message(None, None, 1e-5)
    ('ε=1.5 of a budget of 8 at δ=1e-05', 'no noise: nothing is hidden')
    """
    if spent is None:
        return "no noise: nothing is hidden"
    budget_text = "" if budget is None else f" of a budget of {budget:g}"
    return f"ε={spent:.3g}{budget_text} at δ={delta:g}"


def check_privacy(plan: Plan) -> None:
    """Raise if the run cannot keep the privacy that it promises."""
    check_private(plan.algorithm)
    _check_secure_aggregation(plan)
    if isinstance(plan.solver, DpSgd):
        check_sample_privacy(plan.algorithm)
    layout = plan.net.layout
    if privacy_settings(plan) is not None and layout.width > layout.trainable_width:
        raise ModelError(
            f"Running statistics ({layout.names[layout.parameter_count]}) cannot be hidden: their changes have no "
            "bounded norm. Use nn.GroupNorm or nn.LayerNorm, which have none."
        )


def _check_secure_aggregation(plan: Plan) -> None:
    algorithm = plan.algorithm
    secure = plan.algorithm.secure_aggregation
    check_summable(algorithm)
    if secure is not None and len(plan.population) < secure.min_parties:
        raise SettingError(
            f"{algorithm.name} needs sums of at least {secure.min_parties} parties, and there are "
            f"{len(plan.population)}. Smaller sums hide nothing: use the method without SecureAggregation."
        )
    if secure is not None and algorithm.compute_weights is sample_weights and not plan.samples:
        raise SettingError(
            f"{algorithm.name} weights by samples, and agents and desks have none before training. "
            "Use weights='uniform'."
        )


def cost_after_round(plan: Plan, state: State, hypers: Iterable[Hyper]) -> PrivacyCost:
    """Return the privacy cost up to the end of this round; raise if it exceeds the budget.

    A round counts for all parties, whether or not they are asked or reply.
    """
    privacy = privacy_settings(plan)
    if privacy is None:
        return PrivacyCost()
    previous_releases = int(state.server_state.get(PRIVACY, {}).get(_RELEASES_KEY, 0))
    releases = previous_releases + (max((hyper.work for hyper in hypers), default=0) if privacy.at == "sample" else 1)
    spent = privacy.epsilon(releases, _sampling_rate(plan, privacy))
    if privacy.budget is not None and spent > privacy.budget:
        raise BudgetError(
            f"The privacy budget of ε={privacy.budget:g} at δ={privacy.delta:g} ends the run after {state.round} "
            f"rounds: another one would need ε={spent:.4g}. Use more noise for more rounds"
        )
    metrics = {EPSILON_METRIC: spent} if math.isfinite(spent) else {}
    return PrivacyCost({_RELEASES_KEY: torch.tensor(releases)}, metrics)


def _sampling_rate(plan: Plan, privacy: PrivacySettings) -> float:
    """Return the probability that a hidden unit takes part, for the party with the largest one."""
    if isinstance(plan.solver, DpSgd):
        return plan.solver.sampling_rate(min(plan.population.samples.values()))
    return sampling_rate(privacy, plan.algorithm.participation)


def public_feedback(plan: Plan, feedback: Metrics) -> Metrics:
    """Return the feedback that a tuner may use: in private runs nothing that parties reported."""
    if privacy_settings(plan) is None:
        return feedback
    return {name: value for name, value in feedback.items() if name == VALIDATION_LOSS}
