"""How parties learn alone."""

from .dqn import Dqn
from .sgd import Sgd

__all__ = ["Dqn", "Sgd"]
