"""How parties learn alone."""

from .sgd import Sgd

__all__ = ["Sgd"]
