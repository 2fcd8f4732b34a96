"""Any gymnasium environment with discrete actions, one live object per agent.

The state of such an environment cannot be read. But an episode is determined by its seed and its actions. So the state
kept is the list of actions, and an environment is restored by replaying them. This requires what gymnasium requires:
the same seed and the same actions must give the same episode.
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

_MAX_CACHED = 1024  # live environments kept for reuse
_TOLERANCE = 1e-3  # allowed relative difference of observations between machines


@dataclass(frozen=True)
class Gym:
    """An environment made by `gymnasium.make`; observations other than boxes of numbers are flattened."""

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
        """Gymnasium's number of the first action."""
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
                f"The actions of {self.name} are {action_space}. Dqn and PolicyGradient need discrete ones: "
                "Discrete(n)."
            )
        if not observation_space.is_np_flattenable:
            raise SettingError(
                f"The observations of {self.name} are {observation_space}, of varying length. Dqn and PolicyGradient "
                "need a fixed length: wrap the environment so that it gives a Box."
            )
        shape = (
            observation_space.shape
            if isinstance(observation_space, spaces.Box) and observation_space.shape
            else (spaces.utils.flatdim(observation_space),)
        )
        return shape, int(action_space.n), int(action_space.start)

    def create(self) -> Any:
        """Return a new gymnasium environment."""
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
    return lambda observation: np.asarray(spaces.utils.flatten(space, observation), dtype=np.float32)


class _LiveEnvironment:
    """A live environment, with the key of its episode and the actions taken so far."""

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
        """Reset to an episode and replay its actions, unless already there."""
        if self.key == key and self.actions == actions:
            return
        self.reset(key)
        for action in actions:
            self.step(action)
        if not math.isclose(self.fingerprint, fingerprint, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE):
            raise self._error(
                "is not deterministic:", "the same seed and actions gave different observations when replayed"
            )

    @property
    def fingerprint(self) -> float:
        """A number that identifies the current observation."""
        values = self.observation.ravel()
        return float(values.astype(np.float64) @ np.cos(np.arange(1, len(values) + 1)))

    def _read_observation(self, observation: Any) -> Array:
        try:
            values = self._read(observation).reshape(self.environment.observation_shape)
        except Exception as error:
            reason = f"an observation that is not in its {self._env.observation_space}: {type(error).__name__}: {error}"
            raise self._error("gave", reason) from error
        if not np.isfinite(values).all():
            raise self._error("gave", "an observation that is not finite")
        return values

    def _call(self, verb: str, function: Callable[[], Any]) -> Any:
        expected_length = {"reset": 2, "step": 5}[verb]
        try:
            result = tuple(function())
        except Exception as error:
            raise self._error(f"failed in {verb}:", f"{type(error).__name__}: {error}") from error
        if len(result) != expected_length:
            raise self._error(f"returned from {verb}", f"{len(result)} values; gymnasium returns {expected_length}")
        return result

    def _error(self, failure: str, reason: str) -> PartyError:
        self.key = -1  # its state is unknown now: the next use must reset it
        place = f"after {len(self.actions)} steps of an episode"
        return PartyError(
            f"The environment {self.environment.name} of agent {self._name!r} {failure} {reason} ({place})."
        )


def _close(env: Any) -> None:
    with suppress(Exception):  # a failing close harms nothing: the environment is not used again
        env.close()


class _GymVector:
    def __init__(self, environments: Sequence[Gym], agent_names: Sequence[str], cache: EnvironmentCache) -> None:
        self._live = list[_LiveEnvironment]()
        occurrences = Counter[str]()
        for environment, name in zip(environments, agent_names, strict=True):
            cache_key = (name, occurrences[name])
            occurrences[name] += 1
            live = cache.pop(cache_key, None)
            if live is None or live.environment is not environment:
                live = _LiveEnvironment(environment, name)
            cache[cache_key] = live
            self._live.append(live)
        while len(cache) > max(_MAX_CACHED, len(self._live)):
            cache.pop(next(iter(cache)))  # closed when its last reference goes

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
