"""Environments that agents act in: descriptions of single ones, and many that run side by side.

>>> environment = make_environment("CartPole-v1", gravity=3.7)
>>> environment.observation_shape, environment.actions
((4,), 2)
"""

from typing import TYPE_CHECKING

from ..core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from .cartpole import CartPole
    from .environment import Environment, VectorEnvironment, make_environment
    from .episode_animation import film
    from .gymnasium_environment import Gym
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            ".cartpole": ("CartPole",),
            ".environment": ("Environment", "VectorEnvironment", "make_environment"),
            ".episode_animation": ("film",),
            ".gymnasium_environment": ("Gym",),
        },
    )

__all__ = [
    "CartPole",
    "Gym",
    "Environment",
    "VectorEnvironment",
    "film",
    "make_environment",
]
