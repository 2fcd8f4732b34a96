"""Parties whose data are on other machines: their descriptions, and placeholders for them on the server.

A server plans with these placeholders: names, shapes and counts are true, and every number is 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..errors import PartyError
from ..portfolio.desk import Desk
from ..rl.agent_parties import Agent, DatalessSource
from .party import Party, PartySource, SampleSpec, SplitSettings
from .population import Population

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype for dtype in (torch.float16, torch.float32, torch.float64, torch.int64)
}
_MAX_COUNT = 10**9  # upper limit of any described count
_MAX_SAMPLE_VALUES = 2**27  # numbers per sample: the server tries two samples when a party joins
_MAX_OBSERVED_VALUES = 2**22  # numbers per observation of an agent or a desk: the server draws and tries eight
_SAMPLES_FIELDS = ("x", "x_dtype", "y", "y_dtype")
_AGENT_FIELDS = ("observations", "actions")
_DESK_FIELDS = ("assets", "window")
_COUNT_FIELDS = {
    _SAMPLES_FIELDS: ("samples", "test_count"),
    _AGENT_FIELDS: ("test_count",),
    _DESK_FIELDS: ("test_count",),
}
"""Fields beside the sample spec, which may differ between parties."""
_UNKNOWN_COUNTS = {"samples": 1, "test_count": 0}
JOINED_AFTER = "joined_after"
"""Key of the round after which a late party joined; absent for parties from the start."""
DESCRIBED_AFTER = "described_after"
"""Key of the round after which a party from the start sent its description; None: not yet."""
PLACEHOLDER_DESCRIPTIONS: tuple[Mapping[str, Any], ...] = (
    {"x": [0], "x_dtype": "float32", "y": [0], "y_dtype": "int64", "samples": _MAX_COUNT, "test_count": 0},
    {"observations": [0], "actions": 1, "test_count": 0},
    {"assets": 1, "window": 2, "test_count": 0},
)
"""A description of each kind for a party of which nothing is known: the most samples possible, all of them empty.

So ε is the smallest possible.
"""


def describe_party(party: Any) -> dict[str, Any]:
    """Return a party's description of its data: shapes, dtypes and counts, as JSON values; no data and no name.

    >>> describe_party(Party("a", torch.zeros(3, 2), torch.zeros(3).long(), torch.zeros(1, 2), torch.zeros(1).long()))
    {'x': [2], 'x_dtype': 'float32', 'y': [], 'y_dtype': 'int64', 'samples': 3, 'test_count': 1}
    >>> from descant.parties import agents, desks
    >>> describe_party(agents("CartPole-v1", count=1, length=0.3)["0"])
    {'observations': [4], 'actions': 2, 'test_count': 20}
    >>> describe_party(desks("generated", count=1, assets=4)["0"])
    {'assets': 4, 'window': 30, 'test_count': 261}
    """
    if isinstance(party, Agent):
        return {
            "observations": list(party.environment.observation_shape),
            "actions": party.environment.actions,
            "test_count": party.test_count,
        }
    if isinstance(party, Desk):
        return {"assets": len(party.assets), "window": party.window, "test_count": party.test_count}
    dtypes = [str(part.dtype).removeprefix("torch.") for part in (party.x, party.y)]
    shapes = [list(part.shape[1:]) for part in (party.x, party.y)]
    return {
        "x": shapes[0],
        "x_dtype": dtypes[0],
        "y": shapes[1],
        "y_dtype": dtypes[1],
        "samples": party.samples,
        "test_count": len(party.x_test),
    }


def common_fields(description: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a description that are the same for all parties of a federation."""
    return {name: description[name] for name in _schema(description)}


def known_fields(description: Mapping[str, Any]) -> dict[str, Any]:
    """Return the known fields of a description, without anything else that a party sent."""
    return {name: description[name] for name in (*_schema(description), *_COUNT_FIELDS[_schema(description)])}


def placeholder_description(description: Mapping[str, Any]) -> dict[str, Any]:
    """Return the assumed description of a party that has not joined yet, from another party's description."""
    return {
        **common_fields(description),
        **{name: _UNKNOWN_COUNTS[name] for name in _COUNT_FIELDS[_schema(description)]},
    }


def summarize_description(description: Mapping[str, Any]) -> str:
    """Return a description in words.

    >>> summarize_description({"observations": [4], "actions": 2, "test_count": 20})
    'an environment of its own'
    >>> summarize_description({"assets": 9, "window": 30, "test_count": 261})
    '9 assets to trade'
    """
    if _schema(description) == _SAMPLES_FIELDS:
        return f"{description['samples']} samples"
    return (
        "an environment of its own"
        if _schema(description) == _AGENT_FIELDS
        else f"{description['assets']} assets to trade"
    )


def _schema(description: Mapping[str, Any]) -> tuple[str, ...]:
    return next((kind for kind in _COUNT_FIELDS if kind[0] in description), _SAMPLES_FIELDS)


def remote_population(descriptions: Mapping[str, Mapping[str, Any]], note: str = "") -> Population:
    """Return the described parties, without their data.

    >>> description = {"x": [2], "x_dtype": "float32", "y": [], "y_dtype": "int64", "samples": 3, "test_count": 1}
    >>> population = remote_population({"a": description})
    >>> population["a"], population.samples
    (Party('a', 3 to train, 1 to test, x (2,)), {'a': 3})
    """
    if not descriptions:
        raise PartyError("There must be at least one party. Got none.")
    sources = [_build_source(name, description) for name, description in descriptions.items()]
    for source in sources:
        first = sources[0]
        if source.sample_spec != first.sample_spec:
            raise PartyError(
                f"Party {source.name!r} has {source.sample_spec}, party {first.name!r} has {first.sample_spec}. "
                "They must agree."
            )
    described_late = {
        name: description for name, description in descriptions.items() if description.get(DESCRIBED_AFTER) is not None
    }
    placeholders = {
        name: _build_source(name, placeholder_description(description)) for name, description in described_late.items()
    }
    joined_after = {
        name: description[JOINED_AFTER] for name, description in descriptions.items() if JOINED_AFTER in description
    }
    described_after = {name: description[DESCRIBED_AFTER] for name, description in described_late.items()}
    return Population(sources, note, joined_after=joined_after | described_after, placeholders=placeholders)


@dataclass(frozen=True, eq=False)
class _RemoteSource(PartySource):
    """A source of one number broadcast to all samples, which takes no memory."""

    def build_party(self) -> Party:
        x_test, y_test = self.test_set or (self.x[:0], self.y[:0])
        parts = zip(
            (self.x, self.y, x_test, y_test), (self.sample_spec.x_dtype, self.sample_spec.y_dtype) * 2, strict=True
        )
        return Party(self.name, *(torch.zeros(1, dtype=dtype).expand(part.shape) for part, dtype in parts))


@dataclass(frozen=True)
class _RemoteEnvironment:
    """Placeholder of an environment on another machine."""

    observation_shape: tuple[int, ...]
    actions: int
    name: str = "an environment of its own"

    def make_vector(self, environments: Sequence[Any], agent_names: Sequence[str], cache: Any = None) -> Any:
        raise PartyError(f"The environment of {agent_names[0]!r} is on its own machine and cannot be used here.")

    def __str__(self) -> str:
        return self.name


class _RemoteDesk(Desk):
    """Placeholder of a desk on another machine, with the most days possible and without prices."""

    @property
    def data(self) -> tuple[torch.Tensor, ...]:
        return (torch.tensor([len(self.assets), self.window, self.test_count]),)

    def __str__(self) -> str:
        return f"{len(self.assets)} assets of its own"


def _build_source(name: str, description: Mapping[str, Any]) -> Any:
    make: Callable[[str, Mapping[str, Any]], Any] = {
        _SAMPLES_FIELDS: _samples_source,
        _AGENT_FIELDS: _agent_source,
        _DESK_FIELDS: _desk_source,
    }[_schema(description)]
    try:
        return make(name, description)
    except (KeyError, TypeError, ValueError) as error:
        raise PartyError(f"The description of the data of party {name!r:.40} is invalid: {error}.") from error


def _samples_source(name: str, description: Mapping[str, Any]) -> PartySource:
    sample_spec = SampleSpec(
        tuple(description["x"]),
        _DTYPES[description["x_dtype"]],
        tuple(description["y"]),
        y_dtype=_DTYPES[description["y_dtype"]],
    )
    samples = description["samples"]
    test_count = description["test_count"]
    _check_counts(
        [*sample_spec.x_shape, *sample_spec.y_shape, samples, test_count],
        [samples],
        [sample_spec.x_shape, sample_spec.y_shape],
        max_values=_MAX_SAMPLE_VALUES,
    )
    x, y = (
        np.broadcast_to(np.zeros(1, kind), (samples, *shape))
        for kind, shape in zip("fi", (sample_spec.x_shape, sample_spec.y_shape), strict=True)
    )
    test_set = tuple(np.broadcast_to(part[:1], (test_count, *part.shape[1:])) for part in (x, y))
    return _RemoteSource(name, x, y, (test_set[0], test_set[1]), SplitSettings(0.0), sample_spec)


def _agent_source(name: str, description: Mapping[str, Any]) -> DatalessSource:
    environment = _RemoteEnvironment(tuple(description["observations"]), description["actions"])
    test_count = description["test_count"]
    _check_counts(
        [*environment.observation_shape, environment.actions, test_count],
        [environment.actions],
        [[*environment.observation_shape, environment.actions]],
        max_values=_MAX_OBSERVED_VALUES,
    )
    return DatalessSource(Agent(name, environment, test_count, seed=0))


def _desk_source(name: str, description: Mapping[str, Any]) -> DatalessSource:
    assets = description["assets"]
    window = description["window"]
    test_count = description["test_count"]
    _check_counts(
        [assets, window, test_count], [assets, window - 1], [[assets, window + 1]], max_values=_MAX_OBSERVED_VALUES
    )
    prices, dates = (np.broadcast_to(np.zeros(1), shape) for shape in ((_MAX_COUNT, assets), (test_count,)))
    return DatalessSource(
        _RemoteDesk(name, ("",) * assets, prices, prices[: window + test_count], dates, window, 0.0, "")
    )


def _check_counts(
    numbers: Sequence[Any], positive: Sequence[int], shapes: Sequence[Sequence[int]], max_values: int
) -> None:
    """Raise if untrusted numbers are not whole or not within limits, before anything is allocated."""
    valid = len(numbers) < 12 and all(type(number) is int and 0 <= number <= _MAX_COUNT for number in numbers)
    if not valid or min(positive) < 1 or max(map(math.prod, shapes)) > max_values:
        raise ValueError(f"its numbers are {[*numbers]!r:.120}")
