"""How parties learn alone."""

from .dqn import Dqn
from .policy_gradient import PolicyGradient
from .sgd import Sgd

__all__ = ["Dqn", "PolicyGradient", "Sgd"]
