"""What an environment must answer. A world is a value; worlds side by side are what a stack of agents acts in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from numpy.typing import NDArray
from torch import Tensor

Array: TypeAlias = NDArray[Any]
EnvironmentCache: TypeAlias = dict[Any, Any]
"""What worlds leave behind because it is dear to make, for the next time that they stand side by side."""


@dataclass(frozen=True)
class StepResult:
    """What came of one step of N worlds; an episode that is over stays where it ended until it is begun anew."""

    observations: Array  # [N, *shape] float32, after the step
    rewards: Array  # [N] float64
    terminated: Array  # [N] bool: it ended by itself, and nothing comes after it
    truncated: Array  # [N] bool: it was broken off, by a time limit say, and would have gone on


class Environment(Protocol):
    """One environment with discrete actions, as a value."""

    @property
    def name(self) -> str: ...
    @property
    def observation_shape(self) -> tuple[int, ...]:
        """Of an observation."""

    @property
    def actions(self) -> int: ...

    def make_vector(
        self, environments: Sequence[Any], agent_names: Sequence[str], cache: EnvironmentCache | None = None
    ) -> VectorEnvironment:
        """Worlds of this kind side by side; the names are those of the agents, for messages."""


class VectorEnvironment(Protocol):
    """N environments side by side. Each is where it is by itself: what is beside it makes no difference."""

    @property
    def observations(self) -> Array:
        """What is seen now, ``[N, *shape]`` float32."""

    def reset(self, index: int, key: int) -> None:
        """Begin a new episode in one of them; the key decides all that is random in it."""

    def step(self, actions: Array, active: Array | None = None) -> StepResult:
        """One action each, ``[N]``; those that are not alive stand still, and get no reward."""

    def get_state(self, index: int) -> Tensor:
        """Where one of them is in its episode."""

    def restore(self, index: int, key: int, state: Tensor) -> None:
        """Put one of them where it was in the episode with this key."""


def make_environment(env: str = "CartPole-v1", **settings: Any) -> Environment:
    """An environment by its gymnasium name; settings are those of its maker, for CartPole also its physics."""
    from .cartpole import STEP_LIMITS, CartPole
    from .gymnasium_environment import Gym

    if env in STEP_LIMITS:
        return CartPole.create(env, **settings)
    return Gym(env, tuple(sorted(settings.items())))
