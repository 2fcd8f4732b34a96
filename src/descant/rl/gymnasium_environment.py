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
from .environment import Array, EnvironmentCache, StepResult, VectorEnvironment

_MAX_CACHED = 1024  # environments that are kept for the next time
_TOLERANCE = 1e-3  # how far an observation may be, in parts of it, from what it was on another machine


@dataclass(frozen=True)
class Gym:
    """An environment that `gymnasium.make` makes; observations that are not boxes of numbers are flattened."""

    name: str
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def observation_shape(self) -> tuple[int, ...]:
        return self._spaces[0]

    @property
    def actions(self) -> int:
        return self._spaces[1]

    @property
    def first_action(self) -> int:
        """The number of the first action."""
        return self._spaces[2]

    @cached_property
    def _spaces(self) -> tuple[tuple[int, ...], int, int]:
        instance = self.create()
        spaces = _gymnasium().spaces
        observation_space = instance.observation_space
        action_space = instance.action_space
        instance.close()
        if not isinstance(action_space, spaces.Discrete):
            raise SettingError(
                f"The actions of {self.name} are {action_space}. Dqn and PolicyGradient need discrete ones: Discrete(n)."
            )
        if not observation_space.is_np_flattenable:
            raise SettingError(
                f"The observations of {self.name} are {observation_space}, now more numbers and now fewer. Dqn and PolicyGradient "
                "need as many each time: wrap the environment so that it gives a Box."
            )
        shape = (
            observation_space.shape
            if isinstance(observation_space, spaces.Box) and observation_space.shape
            else (spaces.utils.flatdim(observation_space),)
        )
        return shape, int(action_space.n), int(action_space.start)

    def create(self) -> Any:
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

    def make_vector(
        self, environments: Sequence[Gym], agent_names: Sequence[str], cache: EnvironmentCache | None = None
    ) -> VectorEnvironment:
        return _GymVector(environments, agent_names, {} if cache is None else cache)


def _gymnasium() -> Any:
    try:
        import gymnasium
    except ImportError as error:
        raise SettingError("Environments other than CartPole need gymnasium: pip install 'descant[rl]'.") from error
    return gymnasium


def _observation_reader(environment: Gym, space: Any) -> Callable[[Any], Array]:
    spaces = _gymnasium().spaces
    if isinstance(space, spaces.Box):
        return partial(np.asarray, dtype=np.float32)
    return lambda seen: np.asarray(spaces.utils.flatten(space, seen), dtype=np.float32)


class _LiveEnvironment:
    """An environment and where it is: the key of its episode, and the actions so far."""

    def __init__(self, environment: Gym, name: str) -> None:
        self._name = name
        self.environment = environment
        self._env = environment.create()
        self._read = _observation_reader(environment, self._env.observation_space)
        self.key = -1
        self.actions = list[int]()
        self.observation = np.zeros(environment.observation_shape, dtype=np.float32)
        weakref.finalize(self, _close, self._env)

    def reset(self, key: int) -> None:
        self.key = -1
        self.actions = []
        observation, _ = self._call("reset", partial(self._env.reset, seed=key % 2**31))
        self.observation = self._read_observation(observation)
        self.key = key

    def step(self, action: int) -> tuple[float, bool, bool]:
        observation, reward, terminated, truncated, _ = self._call(
            "step", partial(self._env.step, self.environment.first_action + action)
        )
        self.actions.append(action)
        self.observation = self._read_observation(observation)
        with suppress(TypeError, ValueError):
            reward = float(reward)
        if not isinstance(reward, float) or not math.isfinite(reward):
            raise self._error("gave", f"the reward {reward!r:.40}: it must be a finite number")
        return reward, bool(terminated), bool(truncated)

    def replay_to(self, key: int, actions: list[int], fingerprint: float) -> None:
        """Be at this place of this episode."""
        if self.key == key and self.actions == actions:
            return
        self.reset(key)
        for action in actions:
            self.step(action)
        if not math.isclose(self.fingerprint, fingerprint, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE):
            raise self._error("shows", "other things than before, though seeded and acted in the same: it must not")

    @property
    def fingerprint(self) -> float:
        """A number by which what is seen now is told from other observations."""
        seen = self.observation.ravel()
        return float(seen.astype(np.float64) @ np.cos(np.arange(1, len(seen) + 1)))

    def _read_observation(self, observation: Any) -> Array:
        try:
            seen = self._read(observation).reshape(self.environment.observation_shape)
        except Exception as error:
            what = f"an observation that is not in its {self._env.observation_space}: {type(error).__name__}: {error}"
            raise self._error("gave", what) from error
        if not np.isfinite(seen).all():
            raise self._error("gave", "an observation that is not finite")
        return seen

    def _call(self, verb: str, function: Callable[[], Any]) -> Any:
        expected_length = {"reset": 2, "step": 5}[verb]
        try:
            found = tuple(function())
        except Exception as error:
            raise self._error(f"failed in {verb}:", f"{type(error).__name__}: {error}") from error
        if len(found) != expected_length:
            raise self._error(f"gave in {verb}", f"{len(found)} things, where gymnasium has {expected_length}")
        return found

    def _error(self, failure: str, what: str) -> PartyError:
        self.key = -1  # it may have moved: whoever wants to be anywhere in it begins anew
        at = f"after {len(self.actions)} steps of an episode"
        return PartyError(f"The environment {self.environment.name} of agent {self._name!r} {failure} {what} ({at}).")


def _close(env: Any) -> None:
    with suppress(Exception):  # it is not needed any more
        env.close()


class _GymVector:
    def __init__(self, environments: Sequence[Gym], agent_names: Sequence[str], cache: EnvironmentCache) -> None:
        self._live = list[_LiveEnvironment]()
        occurrences = Counter[str]()
        for world, name in zip(environments, agent_names, strict=True):
            cache_key = (name, occurrences[name])
            occurrences[name] += 1
            live = cache.pop(cache_key, None)
            if live is None or live.world is not world:
                live = _LiveEnvironment(world, name)
            cache[cache_key] = live
            self._live.append(live)
        while len(cache) > max(_MAX_CACHED, len(self._live)):
            cache.pop(next(iter(cache)))  # it closes when nobody has it

    @property
    def observations(self) -> Array:
        return np.stack([live.observation for live in self._live])

    def reset(self, index: int, key: int) -> None:
        self._live[index].reset(key)

    def step(self, actions: Array, active: Array | None = None) -> StepResult:
        n = len(self._live)
        rewards = np.zeros(n)
        terminated = np.zeros(n, dtype=bool)
        truncated = np.zeros(n, dtype=bool)
        for i, (live, action) in enumerate(zip(self._live, actions.tolist(), strict=True)):
            if active is None or active[i]:
                rewards[i], terminated[i], truncated[i] = live.step(action)
        return StepResult(self.observations, rewards, terminated, truncated=truncated)

    def get_state(self, index: int) -> Tensor:
        live = self._live[index]
        return torch.tensor([*live.actions, live.fingerprint], dtype=torch.float64)

    def restore(self, index: int, key: int, state: Tensor) -> None:
        *actions, fingerprint = state.tolist()
        self._live[index].replay_to(key, [int(action) for action in actions], fingerprint)
