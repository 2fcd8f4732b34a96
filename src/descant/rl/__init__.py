"""Environments: what agents act in, as values, and many of them side by side.

>>> made = world("CartPole-v1", gravity=3.7)
>>> made.shape, made.actions
((4,), 2)
"""

from .cartpole import CartPole
from .environment import World, Worlds, world
from .episode_animation import film
from .gymnasium_environment import Gym

__all__ = ["CartPole", "Gym", "World", "Worlds", "film", "world"]
