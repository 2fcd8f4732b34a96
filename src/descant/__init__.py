"""Descant: federated learning for parties that differ.

Each party keeps a model of its own, learns from the others through a robust centre, and is told, in numbers, whether
joining helped. Start with `examples/first.py`; the loop itself is in `descant.rounds.loop`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import algorithms, models, parties, portfolio, rl
    from .core.algorithm import Algorithm
    from .core.metrics import Metric
    from .errors import DescantError, DescantWarning
    from .federation import Federation
    from .storage.vault.coreset_rows import Agreed
    from .storage.vault.vault_location import VaultAt
    from .studies.contribution import Worth, worth
    from .studies.study import Study, compare
    from .training import Dqn, PolicyGradient, PrivateSgd, Sgd, Trader

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
    "models",
    "rl",
    "worth",
]

_HOME = {
    "Agreed": ".storage.vault.coreset_rows",
    "Algorithm": ".core.algorithm",
    "DescantError": ".errors",
    "DescantWarning": ".errors",
    "Dqn": ".training",
    "Federation": ".federation",
    "Metric": ".core.metrics",
    "PolicyGradient": ".training",
    "PrivateSgd": ".training",
    "Sgd": ".training",
    "Study": ".studies.study",
    "Trader": ".training",
    "VaultAt": ".storage.vault.vault_location",
    "Worth": ".studies.contribution",
    "compare": ".studies.study",
    "worth": ".studies.contribution",
}


def __getattr__(name: str) -> Any:
    """Import on first use: torch takes seconds, and `descant --help` must not wait for it."""
    if name in ("algorithms", "parties", "portfolio", "models", "rl"):
        return import_module(f".{name}", __name__)
    if name in _HOME:
        value = getattr(import_module(_HOME[name], __name__), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
