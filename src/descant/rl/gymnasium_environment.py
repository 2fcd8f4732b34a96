"""Any gymnasium environment with discrete actions, one object each.

The state of such an environment cannot be read. But an episode is its seed and the actions so far: that is what is
kept, and an environment that is elsewhere is brought back by acting them again. So an environment must do the same
when it is seeded and acted in the same, as gymnasium demands.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import PartyError, SettingError
from .environment import Array, Kept, Moved, Worlds

_MOST_KEPT = 1024  # environments that are kept for the next time
_SAME = 1e-3  # how far an observation may be, in parts of it, from what it was on another machine


@dataclass(frozen=True)
class Gym:
    """An environment that `gymnasium.make` makes; observations that are not boxes of numbers are flattened."""

    name: str
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        return self._form[0]

    @property
    def actions(self) -> int:
        return self._form[1]

    @property
    def first(self) -> int:
        """The number of the first action."""
        return self._form[2]

    @cached_property
    def _form(self) -> tuple[tuple[int, ...], int, int]:
        made = self.made()
        spaces, seen, acted = _gymnasium().spaces, made.observation_space, made.action_space
        made.close()
        if not isinstance(acted, spaces.Discrete):
            raise SettingError(
                f"The actions of {self.name} are {acted}. Dqn and PolicyGradient need discrete ones: Discrete(n)."
            )
        if not seen.is_np_flattenable:
            raise SettingError(
                f"The observations of {self.name} are {seen}, now more numbers and now fewer. Dqn and PolicyGradient "
                "need as many each time: wrap the environment so that it gives a Box."
            )
        shape = seen.shape if isinstance(seen, spaces.Box) and seen.shape else (spaces.utils.flatdim(seen),)
        return shape, int(acted.n), int(acted.start)

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

    def beside(self, worlds: Sequence[Gym], names: Sequence[str], kept: Kept | None = None) -> Worlds:
        return _Gyms(worlds, names, {} if kept is None else kept)


def _gymnasium() -> Any:
    try:
        import gymnasium
    except ImportError as error:
        raise SettingError("Environments other than CartPole need gymnasium: pip install 'descant[rl]'.") from error
    return gymnasium


def _reader(world: Gym, space: Any) -> Callable[[Any], Array]:
    spaces = _gymnasium().spaces
    if isinstance(space, spaces.Box):
        return partial(np.asarray, dtype=np.float32)
    return lambda seen: np.asarray(spaces.utils.flatten(space, seen), dtype=np.float32)


class _Live:
    """An environment and where it is: the key of its episode, and the actions so far."""

    def __init__(self, world: Gym, name: str) -> None:
        self._name, self.world, self._env = name, world, world.made()
        self._read = _reader(world, self._env.observation_space)
        self.key, self.actions = -1, list[int]()
        self.observation = np.zeros(world.shape, dtype=np.float32)
        weakref.finalize(self, _close, self._env)

    def begin(self, key: int) -> None:
        self.key, self.actions = -1, []
        found, _ = self._try("reset", partial(self._env.reset, seed=key % 2**31))
        self.observation = self._seen(found)
        self.key = key

    def step(self, action: int) -> tuple[float, bool, bool]:
        seen, reward, terminated, truncated, _ = self._try("step", partial(self._env.step, self.world.first + action))
        self.actions.append(action)
        self.observation = self._seen(seen)
        with suppress(TypeError, ValueError):
            reward = float(reward)
        if not isinstance(reward, float) or not math.isfinite(reward):
            raise self._error("gave", f"the reward {reward!r:.40}: it must be a finite number")
        return reward, bool(terminated), bool(truncated)

    def reach(self, key: int, actions: list[int], mark: float) -> None:
        """Be at this place of this episode."""
        if self.key == key and self.actions == actions:
            return
        self.begin(key)
        for action in actions:
            self.step(action)
        if not math.isclose(self.mark, mark, rel_tol=_SAME, abs_tol=_SAME):
            raise self._error("shows", "other things than before, though seeded and acted in the same: it must not")

    @property
    def mark(self) -> float:
        """A number by which what is seen now is told from other observations."""
        seen = self.observation.ravel()
        return float(seen.astype(np.float64) @ np.cos(np.arange(1, len(seen) + 1)))

    def _seen(self, found: Any) -> Array:
        try:
            seen = self._read(found).reshape(self.world.shape)
        except Exception as error:
            what = f"an observation that is not in its {self._env.observation_space}: {type(error).__name__}: {error}"
            raise self._error("gave", what) from error
        if not np.isfinite(seen).all():
            raise self._error("gave", "an observation that is not finite")
        return seen

    def _try(self, verb: str, act: Callable[[], Any]) -> Any:
        wanted = {"reset": 2, "step": 5}[verb]
        try:
            found = tuple(act())
        except Exception as error:
            raise self._error(f"failed in {verb}:", f"{type(error).__name__}: {error}") from error
        if len(found) != wanted:
            raise self._error(f"gave in {verb}", f"{len(found)} things, where gymnasium has {wanted}")
        return found

    def _error(self, did: str, what: str) -> PartyError:
        self.key = -1  # it may have moved: whoever wants to be anywhere in it begins anew
        at = f"after {len(self.actions)} steps of an episode"
        return PartyError(f"The environment {self.world.name} of agent {self._name!r} {did} {what} ({at}).")


def _close(env: Any) -> None:
    with suppress(Exception):  # it is not needed any more
        env.close()


class _Gyms:
    def __init__(self, worlds: Sequence[Gym], names: Sequence[str], kept: Kept) -> None:
        self._live, times = list[_Live](), Counter[str]()
        for world, name in zip(worlds, names, strict=True):
            place = (name, times[name])
            times[name] += 1
            live = kept.pop(place, None)
            if live is None or live.world is not world:
                live = _Live(world, name)
            kept[place] = live
            self._live.append(live)
        while len(kept) > max(_MOST_KEPT, len(self._live)):
            kept.pop(next(iter(kept)))  # it closes when nobody has it

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
        live = self._live[at]
        return torch.tensor([*live.actions, live.mark], dtype=torch.float64)

    def restore(self, at: int, key: int, state: Tensor) -> None:
        *actions, mark = state.tolist()
        self._live[at].reach(key, [int(action) for action in actions], mark)
