"""Many CartPole environments at once, each with its own physics; every step equals gymnasium's, bit for bit.

Barto, Sutton, Anderson (1983), Neuronlike adaptive elements that can solve difficult learning control problems.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields

import numpy as np
import torch
from torch import Tensor

from ..core.settings import check_settings, setting, unknown_name_error
from ..errors import PartyError
from .environment import Array, EnvironmentCache, StepResult, VectorEnvironment

STEP_LIMITS = {"CartPole-v0": 200, "CartPole-v1": 500}
_MAX_POSITION = 2.4
_MAX_ANGLE = 12 * 2 * math.pi / 360
_UNUSUAL_FACTOR = 1e3  # physics this many times the default may overflow


@dataclass(frozen=True)
class CartPole:
    """A pole on a cart that is pushed left (0) or right (1), with a reward of 1 per step.

    >>> CartPole(length=1.0).name
    'CartPole-v1'
    """

    name: str = setting("CartPole-v1", "v0 is truncated after 200 steps, v1 after 500", one_of=tuple(STEP_LIMITS))
    gravity: float = setting(9.8, "gravity, in m/s²", above=0)
    length: float = setting(0.5, "half the length of the pole, in m", above=0)
    force_mag: float = setting(10.0, "force of a push, in N", above=0)
    masscart: float = setting(1.0, "mass of the cart, in kg", above=0)
    masspole: float = setting(0.1, "mass of the pole, in kg", above=0)
    tau: float = setting(0.02, "seconds per step", above=0)

    @classmethod
    def create(cls, name: str, **physics: float) -> CartPole:
        known = [field.name for field in fields(cls) if field.name != "name"]
        for key in physics:
            if key not in known:
                raise unknown_name_error(f"setting of {name}", key, known)
        environment = cls(name, **physics)
        check_settings(environment, name)
        return environment

    @property
    def observation_shape(self) -> tuple[int, ...]:
        return (4,)

    @property
    def actions(self) -> int:
        return 2

    def make_vector(
        self, environments: Sequence[CartPole], agent_names: Sequence[str], cache: EnvironmentCache | None = None
    ) -> VectorEnvironment:
        return _CartPoleVector(environments, agent_names)


class _CartPoleVector:
    def __init__(self, environments: Sequence[CartPole], agent_names: Sequence[str]) -> None:
        def column(name: str) -> Array:
            return np.array([getattr(environment, name) for environment in environments], dtype=np.float64)

        self._gravity = column("gravity")
        self._length = column("length")
        self._force = column("force_mag")
        self._tau = column("tau")
        self._masspole = column("masspole")
        self._mass = self._masspole + column("masscart")
        self._polemass_length = self._masspole * self._length
        self._step_limits = np.array([STEP_LIMITS[environment.name] for environment in environments])
        self._state = np.zeros((4, len(environments)))  # x, ẋ, θ, θ̇
        self._steps = np.zeros(len(environments), dtype=np.int64)
        physics = np.array([astuple(environment)[1:] for environment in environments]) / astuple(CartPole())[1:]
        unusual = np.flatnonzero(~((physics > 1 / _UNUSUAL_FACTOR) & (physics < _UNUSUAL_FACTOR)).all(1))
        # only these can overflow, so only these are checked after a step
        self._unusual = {index: (agent_names[index], environments[index]) for index in unusual.tolist()}

    @property
    def observations(self) -> Array:
        return self._state.T.astype(np.float32, order="C")

    def reset(self, index: int, key: int) -> None:
        self._state[:, index] = np.random.Generator(np.random.Philox(key=key)).uniform(-0.05, 0.05, 4)
        self._steps[index] = 0

    def step(self, actions: Array, active: Array | None = None) -> StepResult:
        """Take gymnasium's step, operation for operation, so that all bits agree."""
        x, x_dot, theta, theta_dot = self._state
        force = np.where(actions == 1, self._force, -self._force)
        cosine = np.cos(theta)
        sine = np.sin(theta)
        temp = (force + self._polemass_length * np.square(theta_dot) * sine) / self._mass
        theta_acceleration = (self._gravity * sine - cosine * temp) / (
            self._length * (4.0 / 3.0 - self._masspole * np.square(cosine) / self._mass)
        )
        x_acceleration = temp - self._polemass_length * theta_acceleration * cosine / self._mass
        tau = self._tau
        after = np.stack(
            [
                x + tau * x_dot,
                x_dot + tau * x_acceleration,
                theta + tau * theta_dot,
                theta_dot + tau * theta_acceleration,
            ]
        )
        steps = self._steps + 1
        if active is not None:
            after = np.where(active, after, self._state)
            steps = np.where(active, steps, self._steps)
        self._state = after
        self._steps = steps
        terminated = (np.abs(after[0]) > _MAX_POSITION) | (np.abs(after[2]) > _MAX_ANGLE)
        for index, (name, environment) in self._unusual.items():
            if not np.isfinite(after[:, index].astype(np.float32)).all():
                raise PartyError(
                    f"The physics of {environment.name} of agent {name!r} overflow float32: {environment}."
                )
        rewards = np.ones(len(steps)) if active is None else active.astype(np.float64)
        return StepResult(self.observations, rewards, terminated, truncated=steps >= self._step_limits)

    def get_state(self, index: int) -> Tensor:
        return torch.from_numpy(np.append(self._state[:, index], self._steps[index]))

    def restore(self, index: int, key: int, state: Tensor) -> None:
        self._state[:, index], self._steps[index] = state[:4].numpy(), int(state[4])
