"""What an environment must answer. A world is a value; worlds side by side are what a stack of agents acts in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from numpy.typing import NDArray
from torch import Tensor

Array: TypeAlias = NDArray[Any]
Kept: TypeAlias = dict[Any, Any]
"""What worlds leave behind because it is dear to make, for the next time that they stand side by side."""


@dataclass(frozen=True)
class Moved:
    """What came of one step of N worlds; an episode that is over stays where it ended until it is begun anew."""

    observations: Array  # [N, *shape] float32, after the step
    rewards: Array  # [N] float64
    terminated: Array  # [N] bool: it ended by itself, and nothing comes after it
    truncated: Array  # [N] bool: it was broken off, by a time limit say, and would have gone on


class World(Protocol):
    """One environment with discrete actions, as a value."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]:
        """Of an observation."""

    @property
    def actions(self) -> int: ...

    def beside(self, worlds: Sequence[Any], names: Sequence[str], kept: Kept | None = None) -> Worlds:
        """Worlds of this kind side by side; the names are those of the agents, for messages."""


class Worlds(Protocol):
    """N environments side by side. Each is where it is by itself: what is beside it makes no difference."""

    @property
    def observations(self) -> Array:
        """What is seen now, ``[N, *shape]`` float32."""

    def begin(self, at: int, key: int) -> None:
        """Begin a new episode in one of them; the key decides all that is random in it."""

    def step(self, actions: Array, alive: Array | None = None) -> Moved:
        """One action each, ``[N]``; those that are not alive stand still, and get no reward."""

    def state(self, at: int) -> Tensor:
        """Where one of them is in its episode."""

    def restore(self, at: int, key: int, state: Tensor) -> None:
        """Put one of them where it was in the episode with this key."""


def world(env: str = "CartPole-v1", **settings: Any) -> World:
    """An environment by its gymnasium name; settings are those of its maker, for CartPole also its physics."""
    from .cartpole import CAPS, CartPole
    from .gymnasium_environment import Gym

    if env in CAPS:
        return CartPole.made(env, **settings)
    return Gym(env, tuple(sorted(settings.items())))
