"""Interfaces of environments: one as a value, and many side by side for a stack of agents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from numpy.typing import NDArray
from torch import Tensor

Array: TypeAlias = NDArray[Any]
EnvironmentCache: TypeAlias = dict[Any, Any]
"""Expensive objects of environments, kept for the next `make_vector` of the same agents."""


@dataclass(frozen=True)
class StepResult:
    """Result of one step of N environments; a finished episode keeps its last state until `reset`."""

    observations: Array  # [N, *shape] float32, after the step
    rewards: Array  # [N] float64
    terminated: Array  # [N] bool: the episode reached a terminal state
    truncated: Array  # [N] bool: the episode was cut off, for example by a time limit


class Environment(Protocol):
    """One environment with discrete actions, as a value."""

    @property
    def name(self) -> str: ...
    @property
    def observation_shape(self) -> tuple[int, ...]:
        """Shape of one observation."""

    @property
    def actions(self) -> int: ...

    def make_vector(
        self, environments: Sequence[Any], agent_names: Sequence[str], cache: EnvironmentCache | None = None
    ) -> VectorEnvironment:
        """Return environments of this kind side by side; the agents' names are used in messages."""


class VectorEnvironment(Protocol):
    """N independent environments side by side: none depends on its neighbors."""

    @property
    def observations(self) -> Array:
        """The current observations, ``[N, *shape]`` float32."""

    def reset(self, index: int, key: int) -> None:
        """Begin a new episode in one environment; all its randomness comes from the key."""

    def step(self, actions: Array, active: Array | None = None) -> StepResult:
        """Apply one action each, ``[N]``; inactive environments do not move and get no reward."""

    def get_state(self, index: int) -> Tensor:
        """Return the state of one environment within its episode."""

    def restore(self, index: int, key: int, state: Tensor) -> None:
        """Restore one environment to a state of the episode with this key."""


def make_environment(env: str = "CartPole-v1", **settings: Any) -> Environment:
    """Return an environment by its gymnasium name; settings are its keyword arguments, for CartPole its physics."""
    from .cartpole import STEP_LIMITS, CartPole
    from .gymnasium_environment import Gym

    if env in STEP_LIMITS:
        return CartPole.create(env, **settings)
    return Gym(env, tuple(sorted(settings.items())))
