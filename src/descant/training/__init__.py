"""Solvers: local training of the parties.

>>> sorted(SOLVERS)
['dp_sgd', 'dqn', 'policy_gradient', 'sgd', 'trader']
"""

from typing import TYPE_CHECKING

from ..core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from .dp_sgd import DpSgd
    from .dqn import Dqn
    from .policy_gradient import PolicyGradient
    from .portfolio_policy import Trader
    from .sgd import Sgd
    from .solver_names import SOLVERS
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            ".solver_names": ("SOLVERS",),
            ".dp_sgd": ("DpSgd",),
            ".dqn": ("Dqn",),
            ".policy_gradient": ("PolicyGradient",),
            ".portfolio_policy": ("Trader",),
            ".sgd": ("Sgd",),
        },
    )

__all__ = [
    "Dqn",
    "PolicyGradient",
    "DpSgd",
    "SOLVERS",
    "Sgd",
    "Trader",
]
