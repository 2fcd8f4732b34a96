"""CartPole, many at once with a physics of their own each: bit for bit what gymnasium's environment does.

Barto, Sutton, Anderson (1983), Neuronlike adaptive elements that can solve difficult learning control problems.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields

import numpy as np
import torch
from torch import Tensor

from ..core.settings import check, setting, unknown
from ..errors import PartyError
from .environment import Array, Kept, Moved, Worlds

CAPS = {"CartPole-v0": 200, "CartPole-v1": 500}
_FAR, _TILTED = 2.4, 12 * 2 * math.pi / 360
_ODD = 1e3  # a physics that is so many times the usual may be no physics


@dataclass(frozen=True)
class CartPole:
    """A pole on a cart that is pushed to the left (0) or to the right (1); a reward of 1 for every step.

    >>> CartPole(length=1.0).name
    'CartPole-v1'
    """

    name: str = setting("CartPole-v1", "v0 breaks off after 200 steps, v1 after 500", one_of=tuple(CAPS))
    gravity: float = setting(9.8, "in m/s²", above=0)
    length: float = setting(0.5, "half the pole's, in m", above=0)
    force_mag: float = setting(10.0, "of a push, in N", above=0)
    masscart: float = setting(1.0, "in kg", above=0)
    masspole: float = setting(0.1, "in kg", above=0)
    tau: float = setting(0.02, "seconds a step", above=0)

    @classmethod
    def made(cls, name: str, **physics: float) -> CartPole:
        known = [field.name for field in fields(cls) if field.name != "name"]
        for key in physics:
            if key not in known:
                raise unknown(f"setting of {name}", key, known)
        found = cls(name, **physics)
        check(found, name)
        return found

    @property
    def shape(self) -> tuple[int, ...]:
        return (4,)

    @property
    def actions(self) -> int:
        return 2

    def beside(self, worlds: Sequence[CartPole], names: Sequence[str], kept: Kept | None = None) -> Worlds:
        return _CartPoles(worlds, names)


class _CartPoles:
    def __init__(self, worlds: Sequence[CartPole], names: Sequence[str]) -> None:
        def each(name: str) -> Array:
            return np.array([getattr(world, name) for world in worlds], dtype=np.float64)

        self._gravity, self._length, self._force, self._tau = map(each, ("gravity", "length", "force_mag", "tau"))
        self._masspole = each("masspole")
        self._mass = self._masspole + each("masscart")
        self._polemass_length = self._masspole * self._length
        self._cap = np.array([CAPS[world.name] for world in worlds])
        self._at = np.zeros((4, len(worlds)))  # x, ẋ, θ, θ̇
        self._steps = np.zeros(len(worlds), dtype=np.int64)
        physics = np.array([astuple(world)[1:] for world in worlds]) / astuple(CartPole())[1:]
        odd = np.flatnonzero(~((physics > 1 / _ODD) & (physics < _ODD)).all(1))
        self._odd = {at: (names[at], worlds[at]) for at in odd.tolist()}  # of others nothing becomes too large

    @property
    def observations(self) -> Array:
        return self._at.T.astype(np.float32, order="C")

    def begin(self, at: int, key: int) -> None:
        self._at[:, at] = np.random.Generator(np.random.Philox(key=key)).uniform(-0.05, 0.05, 4)
        self._steps[at] = 0

    def step(self, actions: Array, alive: Array | None = None) -> Moved:
        """gymnasium's step, operation for operation, so that not even the last bit differs."""
        x, x_dot, theta, theta_dot = self._at
        force = np.where(actions == 1, self._force, -self._force)
        cosine, sine = np.cos(theta), np.sin(theta)
        temp = (force + self._polemass_length * np.square(theta_dot) * sine) / self._mass
        turn = (self._gravity * sine - cosine * temp) / (
            self._length * (4.0 / 3.0 - self._masspole * np.square(cosine) / self._mass)
        )
        push = temp - self._polemass_length * turn * cosine / self._mass
        tau = self._tau
        after = np.stack([x + tau * x_dot, x_dot + tau * push, theta + tau * theta_dot, theta_dot + tau * turn])
        steps = self._steps + 1
        if alive is not None:
            after, steps = np.where(alive, after, self._at), np.where(alive, steps, self._steps)
        self._at, self._steps = after, steps
        fell = (np.abs(after[0]) > _FAR) | (np.abs(after[2]) > _TILTED)
        for at, (name, world) in self._odd.items():
            if not np.isfinite(after[:, at].astype(np.float32)).all():
                raise PartyError(f"The physics of {world.name} of agent {name!r} lead beyond all numbers: {world}.")
        rewards = np.ones(len(steps)) if alive is None else alive.astype(np.float64)
        return Moved(self.observations, rewards, fell, steps >= self._cap)

    def state(self, at: int) -> Tensor:
        return torch.from_numpy(np.append(self._at[:, at], self._steps[at]))

    def restore(self, at: int, key: int, state: Tensor) -> None:
        self._at[:, at], self._steps[at] = state[:4].numpy(), int(state[4])
