"""Descant: federated learning for parties that differ.

Each party keeps a personal model, learns from the others through a robust aggregate, and sees whether joining helped.
Start with `examples/first.py`; the loop itself is in `descant.rounds.loop`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import algorithms, models, parties, portfolio, rl
    from .core.algorithm import Algorithm
    from .core.metrics import Metric
    from .errors import DescantError, DescantWarning
    from .federation import Federation
    from .storage.vault.coreset_rows import CoresetLimit
    from .storage.vault.vault_location import VaultLocation
    from .studies.contribution import Contributions, contributions
    from .studies.study import Study, compare
    from .training import DpSgd, Dqn, PolicyGradient, Sgd, Trader

__version__ = "0.1.0"

__all__ = [
    "CoresetLimit",
    "Algorithm",
    "DescantError",
    "DescantWarning",
    "Dqn",
    "Federation",
    "Metric",
    "PolicyGradient",
    "DpSgd",
    "Sgd",
    "Study",
    "Trader",
    "VaultLocation",
    "Contributions",
    "algorithms",
    "compare",
    "parties",
    "portfolio",
    "models",
    "rl",
    "contributions",
]

_HOME = {
    "CoresetLimit": ".storage.vault.coreset_rows",
    "Algorithm": ".core.algorithm",
    "DescantError": ".errors",
    "DescantWarning": ".errors",
    "Dqn": ".training",
    "Federation": ".federation",
    "Metric": ".core.metrics",
    "PolicyGradient": ".training",
    "DpSgd": ".training",
    "Sgd": ".training",
    "Study": ".studies.study",
    "Trader": ".training",
    "VaultLocation": ".storage.vault.vault_location",
    "Contributions": ".studies.contribution",
    "compare": ".studies.study",
    "contributions": ".studies.contribution",
}


def __getattr__(name: str) -> Any:
    """Import a name on first use: torch takes seconds, and `descant --help` must not load it."""
    if name in ("algorithms", "parties", "portfolio", "models", "rl"):
        return import_module(f".{name}", __name__)
    if name in _HOME:
        value = getattr(import_module(_HOME[name], __name__), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
