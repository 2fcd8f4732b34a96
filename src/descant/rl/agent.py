"""Parties that are agents: each has an environment of its own in place of data."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.seeds import key, stream
from ..core.settings import check, setting
from ..errors import PartyError
from ..parties.population import People
from . import World, world

Numbers = float | Sequence[float]


@dataclass(frozen=True, eq=False, repr=False)
class Agent:
    """One agent: the environment that it learns in, and how many episodes it is tested in."""

    name: str
    world: World
    tests: int
    seed: int
    known: dict[Any, float] = field(default_factory=dict)  # what acting at random comes to, by metric

    @property
    def samples(self) -> int:
        """None to begin with: it makes them itself."""
        return 0

    @property
    def form(self) -> str:
        """What the agents of a federation have in common."""
        return f"{self.world.name}, observations {self.world.shape}, {self.world.actions} actions"

    def test(self, number: int) -> int:
        """The key of a test episode; they are the same for every model, as the rows of a test set are."""
        return key(self.seed, number, self.name, "test")

    @property
    def data(self) -> tuple[Tensor, ...]:
        """What tells it from another agent, as bytes."""
        text = json.dumps([asdict(self.world), self.tests, self.seed], default=repr)  # type: ignore[call-overload]
        return (torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8),)

    @property
    def x(self) -> Tensor:
        raise PartyError(
            f"Party {self.name!r} is an agent in {self.world.name} and has no data. Use Dqn(...) or "
            "PolicyGradient(...) as the solver, or parties that have data."
        )

    y = x_test = y_test = x

    def __str__(self) -> str:
        return str(self.world)

    def __repr__(self) -> str:
        return f"Agent({self.name!r}, in {self.world.name}, {self.tests} episodes to test)"


@dataclass(frozen=True, eq=False)
class Bare:
    """A party without rows of data, before it is asked for; it stands where a `Source` of data stands."""

    made: Any  # an agent, say
    labels: Any = field(default_factory=lambda: np.empty(0, dtype=np.int64))

    @property
    def name(self) -> str:
        return str(self.made.name)

    @property
    def form(self) -> str:
        """What parties of one federation have in common."""
        return str(self.made.form)

    size = held_out = 0

    @property
    def tested(self) -> int:
        return int(self.made.tests)

    def party(self) -> Any:
        return self.made

    def line(self) -> str:
        """Its line in a table of parties."""
        return f"{self.name:8}     - {self.tested:5}       -  {self.made}"


@dataclass(frozen=True)
class _Settings:
    count: int = setting(10, "how many agents", least=1, whole=True)
    unlike: float = setting(0.0, "how much the physics of agents differ", least=0)
    test: int = setting(20, "episodes that an agent is tested in", least=0, whole=True)


def agents(
    env: str = "CartPole-v1",
    count: int = 10,
    gravity: Numbers | None = None,
    length: Numbers | None = None,
    force_mag: Numbers | None = None,
    unlike: float = 0.0,
    options: Mapping[str, Any] | Sequence[Mapping[str, Any]] = (),
    test: int = 20,
    seed: int = 0,
) -> People:
    """Agents, each in a gymnasium environment of its own with discrete actions; CartPole is built in.

    `gravity`, `length` and `force_mag` are one number for all, or one an agent; with `unlike` = u each of an agent's
    is multiplied by a factor of its own between 1/(1+u) and 1+u. `options` go to the environment's maker: one table for
    all, or one an agent.

    >>> people = agents("CartPole-v1", count=3, length=[0.25, 0.5, 1.0])
    >>> people["2"].world.length, people["2"]
    (1.0, Agent('2', in CartPole-v1, 20 episodes to test))
    """
    check(_Settings(count, unlike, test), "agents")
    given = {"gravity": gravity, "length": length, "force_mag": force_mag}
    each = {name: _each(name, value, count) for name, value in given.items() if value is not None}
    made = list[Bare]()
    tables = [options] * count if isinstance(options, Mapping) else list(options) or [{}] * count
    if len(tables) != count:
        raise PartyError(f"The 'options' of agents must be one table, or {count}: one an agent. Got {len(tables)}.")
    for k in range(count):
        settings = {name: values[k] for name, values in each.items()} | dict(tables[k])
        if unlike:
            settings = _changed(env, settings, unlike, stream(seed, 0, str(k), "physics"))
        alike = k > 0 and not each and not unlike and tables[k] is tables[0]
        here = made[0].made.world if alike else world(env, **settings)
        made.append(Bare(Agent(str(k), here, test, seed)))
    _check_forms(made)
    return People(made)  # type: ignore[arg-type]


def alone(party: Any, name: str) -> People:
    """A party that has no rows, by another name and without others."""
    return People([Bare(replace(party, name=name, known={}))])  # type: ignore[list-item]


def _check_forms(made: Sequence[Bare]) -> None:
    """All agents have one model: what they see, and what they can do, must be of one form."""
    first = made[0]
    for other in made[1:]:
        if other.form != first.form:
            raise PartyError(
                f"Agent {other.name!r} is in {other.form}, and agent {first.name!r} in {first.form}: one model cannot "
                "serve both. Give them environments with as many actions and observations of one shape."
            )


def _each(name: str, value: Numbers, count: int) -> list[float]:
    try:
        values = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError):
        values = np.empty((count, 0))
    if values.shape not in ((), (count,)):
        raise PartyError(f"The {name!r} of agents must be one number, or {count}: one an agent. Got {value!r:.80}.")
    return [float(one) for one in np.broadcast_to(values, (count,))]


def _changed(env: str, settings: Mapping[str, Any], unlike: float, rng: np.random.Generator) -> dict[str, Any]:
    usual = world(env)
    names = [name for name in ("gravity", "length", "force_mag") if name in vars(usual)]
    if not names:
        raise PartyError(f"'unlike' changes the physics of CartPole. Give {env} other options an agent, instead.")
    factors = (1 + unlike) ** rng.uniform(-1, 1, len(names))
    return {**settings, **{n: settings.get(n, vars(usual)[n]) * float(f) for n, f in zip(names, factors, strict=True)}}
