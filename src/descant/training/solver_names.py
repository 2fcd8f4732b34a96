"""Solvers by their names in recipes.

>>> sorted(SOLVERS)
['dp_sgd', 'dqn', 'policy_gradient', 'sgd', 'trader']
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from ..core.interfaces import Solver
from .dp_sgd import DpSgd
from .dqn import Dqn
from .policy_gradient import PolicyGradient
from .portfolio_policy import Trader
from .sgd import Sgd

SOLVERS: Mapping[str, Callable[..., Solver]] = MappingProxyType(
    {"sgd": Sgd, "dqn": Dqn, "policy_gradient": PolicyGradient, "trader": Trader, "dp_sgd": DpSgd}
)
"""Solver classes by recipe name."""
