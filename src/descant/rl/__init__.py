"""Environments: what agents act in, as values, and many of them side by side.

>>> made = world("CartPole-v1", gravity=3.7)
>>> made.shape, made.actions
((4,), 2)
"""

from .cartpole import CartPole
from .film import film
from .gym import Gym
from .worlds import World, Worlds, world

__all__ = ["CartPole", "Gym", "World", "Worlds", "film", "world"]
