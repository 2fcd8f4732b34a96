"""Descant: federated learning for parties that differ.

Each party keeps a model of its own, learns from the others through a robust centre, and is told, in numbers, whether
joining helped. Start with `examples/first.py`; the loop itself is in `descant.run`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import algorithms, parties, portfolio, problems, rl
    from .contribution import Worth, worth
    from .core import Algorithm
    from .errors import DescantError, DescantWarning
    from .federation import Federation
    from .metrics import Metric
    from .solvers import Dqn, PolicyGradient, PrivateSgd, Sgd, Trader
    from .store.rows import Agreed
    from .store.vault_at import VaultAt
    from .study import Study, compare

__version__ = "0.1.0"

__all__ = [
    "Agreed",
    "Algorithm",
    "DescantError",
    "DescantWarning",
    "Dqn",
    "Federation",
    "Metric",
    "PolicyGradient",
    "PrivateSgd",
    "Sgd",
    "Study",
    "Trader",
    "VaultAt",
    "Worth",
    "algorithms",
    "compare",
    "parties",
    "portfolio",
    "problems",
    "rl",
    "worth",
]

_HOME = {
    "Agreed": ".store.rows",
    "Algorithm": ".core",
    "DescantError": ".errors",
    "DescantWarning": ".errors",
    "Dqn": ".solvers",
    "Federation": ".federation",
    "Metric": ".metrics",
    "PolicyGradient": ".solvers",
    "PrivateSgd": ".solvers",
    "Sgd": ".solvers",
    "Study": ".study",
    "Trader": ".solvers",
    "VaultAt": ".store.vault_at",
    "Worth": ".contribution",
    "compare": ".study",
    "worth": ".contribution",
}


def __getattr__(name: str) -> Any:
    """Import on first use: torch takes seconds, and `descant --help` must not wait for it."""
    if name in ("algorithms", "parties", "portfolio", "problems", "rl"):
        return import_module(f".{name}", __name__)
    if name in _HOME:
        value = getattr(import_module(_HOME[name], __name__), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
