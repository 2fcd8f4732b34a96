"""Optional features of a round: coreset proxies, differential privacy and secure aggregation.

Plain FedAvg imports none of their modules. Each function here looks at the plan first, and imports a feature only when
the plan uses it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..core.algorithm import Hyper, Metrics, NamedTensors
from ..core.interfaces import Engine
from .plan import Plan
from .state import State

if TYPE_CHECKING:
    from ..coresets.proxy_rounds import DepositedCoresets
    from ..privacy.secure_aggregation.secure_sum import KeyExchange

PRIVACY = "privacy"
"""The server state of the privacy accountant."""


@dataclass(frozen=True)
class PrivacyCost:
    """The privacy spent by the end of a round."""

    server_state: NamedTensors = field(default_factory=dict)
    metrics: Metrics = field(default_factory=dict)


def is_private(plan: Plan) -> bool:
    """Return whether the algorithm or the solver promises differential privacy."""
    return plan.algorithm.privacy is not None or getattr(plan.solver, "privacy", None) is not None


def check(plan: Plan) -> None:
    """Raise if the run promises privacy or coreset proxies that it cannot have."""
    if is_private(plan) or plan.algorithm.secure_aggregation is not None:
        from ..privacy import budget

        budget.check_privacy(plan)
    if plan.algorithm.coreset_proxy is not None or plan.vault is not None or plan.coreset_limit is not None:
        from ..coresets.proxy_rounds import check_coreset_proxies

        check_coreset_proxies(plan)


def privacy_spent(plan: Plan, state: State, hypers: Iterable[Hyper]) -> PrivacyCost:
    """Return the privacy spent by the end of the next round; raise if that exceeds the budget."""
    if not is_private(plan):
        return PrivacyCost()
    from ..privacy import budget

    return budget.cost_after_round(plan, state, hypers)


def public_feedback(plan: Plan, feedback: Metrics) -> Metrics:
    """Return what a tuner may know of the last round."""
    if not is_private(plan):
        return feedback
    from ..privacy import budget

    return budget.public_feedback(plan, feedback)


def key_exchange(plan: Plan, engine: Engine, participants: Mapping[str, Hyper], index: int) -> KeyExchange | None:
    """Exchange the keys of a round of secure aggregation; None without it."""
    if plan.algorithm.secure_aggregation is None:
        return None
    from ..privacy.secure_aggregation.secure_sum import exchange_keys

    return exchange_keys(plan, engine, participants, index=index)


def proxies(plan: Plan, state: State) -> DepositedCoresets | None:
    """Return the coresets that parties have deposited; None without coreset proxies."""
    if plan.algorithm.coreset_proxy is None:
        return None
    from ..coresets.proxy_rounds import DepositedCoresets

    return DepositedCoresets.from_state(plan, state)


def max_encrypted_bytes(plan: Plan) -> int:
    """Return the largest size of an encrypted coreset in bytes; 0 where none is requested."""
    if plan.algorithm.coreset_proxy is None or plan.vault is None:
        return 0
    from ..coresets import proxy_training

    return proxy_training.max_encrypted_size(plan)
