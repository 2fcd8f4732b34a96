"""Agents as parties: each has its own environment in place of data."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.seeds import stream, stream_key
from ..core.settings import check_settings, setting
from ..errors import PartyError
from ..parties.population import Population
from . import Environment, make_environment

Numbers = float | Sequence[float]


@dataclass(frozen=True, eq=False, repr=False)
class Agent:
    """One agent: the environment it learns in, and the number of its test episodes."""

    name: str
    environment: Environment
    test_count: int
    seed: int
    cache: dict[Any, float] = field(default_factory=dict)  # scores of the random policy, by metric

    @property
    def samples(self) -> int:
        """0: an agent has no samples before it acts."""
        return 0

    @property
    def sample_spec(self) -> str:
        """The properties that all agents of a federation must share, in words."""
        environment = self.environment
        return f"{environment.name}, observations {environment.observation_shape}, {environment.actions} actions"

    def test_episode_key(self, number: int) -> int:
        """Return the key of a test episode; the episodes are the same for every model, like the rows of a test set."""
        return stream_key(self.seed, number, self.name, purpose="test")

    @property
    def data(self) -> tuple[Tensor, ...]:
        """The bytes that identify this agent's setup, for fingerprints."""
        text = json.dumps([asdict(self.environment), self.test_count, self.seed], default=repr)  # type: ignore[call-overload]
        return (torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8),)

    @property
    def x(self) -> Tensor:
        raise PartyError(
            f"Party {self.name!r} is an agent in {self.environment.name} and has no data. Use Dqn(...) or "
            "PolicyGradient(...) as the solver, or parties that have data."
        )

    y = x_test = y_test = x

    def __str__(self) -> str:
        return str(self.environment)

    def __repr__(self) -> str:
        return f"Agent({self.name!r}, in {self.environment.name}, {self.test_count} episodes to test)"


@dataclass(frozen=True, eq=False)
class DatalessSource:
    """A party source without rows of data: the counterpart of `PartySource` for agents and desks."""

    wrapped: Any  # the party: an `Agent` or a `Desk`
    labels: Any = field(default_factory=lambda: np.empty(0, dtype=np.int64))

    @property
    def name(self) -> str:
        return str(self.wrapped.name)

    @property
    def sample_spec(self) -> str:
        """The properties that all parties of a federation must share, in words."""
        return str(self.wrapped.sample_spec)

    size = held_out_count = 0

    @property
    def test_count(self) -> int:
        return int(self.wrapped.test_count)

    def build_party(self) -> Any:
        return self.wrapped

    def table_row(self) -> str:
        """Return this party's line in a table of parties."""
        return f"{self.name:8}     - {self.test_count:5}       -  {self.wrapped}"


@dataclass(frozen=True)
class _AgentsSettings:
    count: int = setting(10, "number of agents", least=1, whole=True)
    heterogeneity: float = setting(0.0, "spread of the agents' physics; 0: all equal", least=0)
    test_episodes: int = setting(20, "test episodes of each agent", least=0, whole=True)


def agents(
    env: str = "CartPole-v1",
    count: int = 10,
    gravity: Numbers | None = None,
    length: Numbers | None = None,
    force_mag: Numbers | None = None,
    heterogeneity: float = 0.0,
    options: Mapping[str, Any] | Sequence[Mapping[str, Any]] = (),
    test_episodes: int = 20,
    seed: int = 0,
) -> Population:
    """Agents, each in its own gymnasium environment with discrete actions; CartPole is built in.

    `gravity`, `length` and `force_mag` are one number for all agents, or one number per agent. With `heterogeneity` = u
    each of an agent's numbers is multiplied by its own random factor between 1/(1+u) and 1+u. `options` are keyword
    arguments of the environment: one table for all agents, or one table per agent.

    >>> population = agents("CartPole-v1", count=3, length=[0.25, 0.5, 1.0])
    >>> population["2"].environment.length, population["2"]
    (1.0, Agent('2', in CartPole-v1, 20 episodes to test))
    """
    check_settings(_AgentsSettings(count, heterogeneity, test_episodes), "agents")
    physics = {"gravity": gravity, "length": length, "force_mag": force_mag}
    values_by_name = {
        name: _value_per_agent(name, value, count) for name, value in physics.items() if value is not None
    }
    sources = list[DatalessSource]()
    tables = [options] * count if isinstance(options, Mapping) else list(options) or [{}] * count
    if len(tables) != count:
        raise PartyError(f"The 'options' of agents must be one table, or {count}: one per agent. Got {len(tables)}.")
    for k in range(count):
        settings = {name: values[k] for name, values in values_by_name.items()} | dict(tables[k])
        if heterogeneity:
            settings = _vary_physics(env, settings, heterogeneity, rng=stream(seed, 0, str(k), purpose="physics"))
        same_as_first = k > 0 and not values_by_name and not heterogeneity and tables[k] is tables[0]
        environment = sources[0].wrapped.environment if same_as_first else make_environment(env, **settings)
        sources.append(DatalessSource(Agent(str(k), environment, test_episodes, seed=seed)))
    _check_same_spec(sources)
    return Population(sources)  # type: ignore[arg-type]


def single_party(party: Any, name: str) -> Population:
    """Return a population of one party without rows, under another name."""
    return Population([DatalessSource(replace(party, name=name, cache={}))])  # type: ignore[list-item]


def _check_same_spec(sources: Sequence[DatalessSource]) -> None:
    """Raise if agents differ in observations or actions: all of them share one model."""
    first = sources[0]
    for other in sources[1:]:
        if other.sample_spec != first.sample_spec:
            raise PartyError(
                f"Agent {other.name!r} is in {other.sample_spec}, and agent {first.name!r} in {first.sample_spec}: "
                "one model cannot serve both. Give all agents the same number of actions and the same shape of "
                "observations."
            )


def _value_per_agent(name: str, value: Numbers, count: int) -> list[float]:
    try:
        values = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError):
        values = np.empty((count, 0))
    if values.shape not in ((), (count,)):
        raise PartyError(f"The {name!r} of agents must be one number, or {count}: one per agent. Got {value!r:.80}.")
    return [float(number) for number in np.broadcast_to(values, (count,))]


def _vary_physics(
    env: str, settings: Mapping[str, Any], heterogeneity: float, rng: np.random.Generator
) -> dict[str, Any]:
    default = make_environment(env)
    names = [name for name in ("gravity", "length", "force_mag") if name in vars(default)]
    if not names:
        raise PartyError(
            f"'heterogeneity' changes the physics of CartPole. Give {env} different 'options' per agent instead."
        )
    factors = (1 + heterogeneity) ** rng.uniform(-1, 1, len(names))
    return {
        **settings,
        **{n: settings.get(n, vars(default)[n]) * float(f) for n, f in zip(names, factors, strict=True)},
    }
