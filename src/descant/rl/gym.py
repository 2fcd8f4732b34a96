"""Any gymnasium environment with discrete actions, one object each.

The state of such an environment cannot be read. But an episode is its seed and the actions so far: that is what is
kept, and an environment that is elsewhere is brought back by acting them again. So an environment must do the same
when it is seeded and acted in the same, as gymnasium demands.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import PartyError, SettingError
from .worlds import Array, Moved, Worlds


@dataclass(frozen=True)
class Gym:
    """An environment that `gymnasium.make` makes; observations that are not boxes of numbers are flattened."""

    name: str
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        return _form(self)[0]

    @property
    def actions(self) -> int:
        return _form(self)[1]

    def made(self) -> Any:
        """A new environment."""
        gymnasium = _gymnasium()
        try:
            return gymnasium.make(self.name, **dict(self.options))
        except gymnasium.error.DependencyNotInstalled as error:
            raise SettingError(
                f"The environment {self.name!r} needs something that is not installed: {error}"
            ) from error
        except gymnasium.error.Error as error:
            raise SettingError(f"gymnasium has no environment {self.name!r}: {error}") from error
        except (TypeError, ImportError) as error:
            raise SettingError(f"The environment {self.name!r} cannot be made: {error}") from error

    def beside(self, worlds: Sequence[Gym], names: Sequence[str]) -> Worlds:
        return _Gyms(worlds, names)


def _gymnasium() -> Any:
    try:
        import gymnasium
    except ImportError as error:
        raise SettingError("Environments other than CartPole need gymnasium: pip install 'descant[rl]'.") from error
    return gymnasium


@cache
def _form(world: Gym) -> tuple[tuple[int, ...], int, int]:
    """The shape of an observation, how many actions there are, and the first of them."""
    made = world.made()
    spaces, seen, acted = _gymnasium().spaces, made.observation_space, made.action_space
    made.close()
    if not isinstance(acted, spaces.Discrete):
        raise SettingError(
            f"The actions of {world.name} are {acted}. Dqn and PolicyGradient need discrete ones: Discrete(n)."
        )
    shape = seen.shape if isinstance(seen, spaces.Box) and seen.shape else (spaces.utils.flatdim(seen),)
    return shape, int(acted.n), int(acted.start)


def _reader(world: Gym, space: Any) -> Callable[[Any], Array]:
    spaces = _gymnasium().spaces
    if isinstance(space, spaces.Box):
        return partial(np.asarray, dtype=np.float32)
    return lambda seen: np.asarray(spaces.utils.flatten(space, seen), dtype=np.float32)


class _Live:
    """An environment and where it is: the key of its episode, and the actions so far."""

    def __init__(self, world: Gym, name: str) -> None:
        self._name, self._world, self._env = name, world, world.made()
        self._read = _reader(world, self._env.observation_space)
        self._first = _form(world)[2]
        self.key, self.actions = -1, list[int]()
        self.observation = np.zeros(world.shape, dtype=np.float32)

    def begin(self, key: int) -> None:
        found = self._try("reset", partial(self._env.reset, seed=key % 2**31))
        self.key, self.actions = key, []
        self.observation = self._seen(found[0])

    def step(self, action: int) -> tuple[float, bool, bool]:
        found = self._try("step", partial(self._env.step, self._first + action))
        self.actions.append(action)
        self.observation = self._seen(found[0])
        reward = float(found[1])
        if not math.isfinite(reward):
            raise self._error("gave", f"the reward {reward}: it must be a finite number")
        return reward, bool(found[2]), bool(found[3])

    def reach(self, key: int, actions: list[int]) -> None:
        """Be at this place of this episode."""
        if self.key == key and self.actions == actions:
            return
        self.begin(key)
        for action in actions:
            self.step(action)

    def _seen(self, found: Any) -> Array:
        seen = self._read(found).reshape(self._world.shape)
        if not np.isfinite(seen).all():
            raise self._error("gave", "an observation that is not finite")
        return seen

    def _try(self, verb: str, act: Callable[[], Any]) -> Any:
        try:
            return act()
        except Exception as error:
            raise self._error(f"failed in {verb}:", f"{type(error).__name__}: {error}") from error

    def _error(self, did: str, what: str) -> PartyError:
        at = f"after {len(self.actions)} steps of an episode"
        return PartyError(f"The environment {self._world.name} of agent {self._name!r} {did} {what} ({at}).")


class _Gyms:
    def __init__(self, worlds: Sequence[Gym], names: Sequence[str]) -> None:
        self._live = [_Live(world, name) for world, name in zip(worlds, names, strict=True)]

    @property
    def observations(self) -> Array:
        return np.stack([live.observation for live in self._live])

    def begin(self, at: int, key: int) -> None:
        self._live[at].begin(key)

    def step(self, actions: Array, alive: Array | None = None) -> Moved:
        n = len(self._live)
        rewards, terminated, truncated = np.zeros(n), np.zeros(n, dtype=bool), np.zeros(n, dtype=bool)
        for i, (live, action) in enumerate(zip(self._live, actions.tolist(), strict=True)):
            if alive is None or alive[i]:
                rewards[i], terminated[i], truncated[i] = live.step(action)
        return Moved(self.observations, rewards, terminated, truncated)

    def state(self, at: int) -> Tensor:
        return torch.tensor(self._live[at].actions, dtype=torch.int64)

    def restore(self, at: int, key: int, state: Tensor) -> None:
        self._live[at].reach(key, state.tolist())
