"""Parties whose data are on other machines: what they say of themselves, and what stands in their places here.

A server makes its plan with these: names, shapes and counts are true, and every number is 0.
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
from ..rl.agent import Agent, Bare
from .party import Form, Party, Plan, Source
from .population import People

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype for dtype in (torch.float16, torch.float32, torch.float64, torch.int64)
}
_MOST = 10**9  # samples; more than that nobody has
_LARGEST = 2**27  # numbers of a sample: two of them are tried when a party comes
_SEEN = 2**22  # numbers that an agent or a desk sees at once: eight of these are tried, and drawn before that
_ROWS, _AGENT, _DESK = ("x", "x_dtype", "y", "y_dtype"), ("observations", "actions"), ("assets", "window")
_COUNTS = {_ROWS: ("samples", "tested"), _AGENT: ("tested",), _DESK: ("tested",)}  # beside the form: may differ
_UNKNOWN = {"samples": 1, "tested": 0}
SINCE = "since"
"""The round behind which a party has come, where it was not there from the beginning."""
KNOWN = "known"
"""The round behind which a party that was there from the beginning has said this of its data; None: not yet."""
UNSEEN: tuple[Mapping[str, Any], ...] = (
    {"x": [0], "x_dtype": "float32", "y": [0], "y_dtype": "int64", "samples": _MOST, "tested": 0},
    {"observations": [0], "actions": 1, "tested": 0},
    {"assets": 1, "window": 2, "tested": 0},
)
"""What a party of each kind could say of which nothing is known: as many samples as there can be, and nothing in them.

So ε is the least that it can be.
"""


def description(party: Any) -> dict[str, Any]:
    """What a party says of its data: shapes, dtypes and counts, as JSON values. No number of them, and no name.

    >>> description(Party("a", torch.zeros(3, 2), torch.zeros(3).long(), torch.zeros(1, 2), torch.zeros(1).long()))
    {'x': [2], 'x_dtype': 'float32', 'y': [], 'y_dtype': 'int64', 'samples': 3, 'tested': 1}
    >>> from descant.parties import agents, desks
    >>> description(agents("CartPole-v1", count=1, length=0.3)["0"])
    {'observations': [4], 'actions': 2, 'tested': 20}
    >>> description(desks("generated", count=1, assets=4)["0"])
    {'assets': 4, 'window': 30, 'tested': 261}
    """
    if isinstance(party, Agent):
        return {"observations": list(party.world.shape), "actions": party.world.actions, "tested": party.tests}
    if isinstance(party, Desk):
        return {"assets": len(party.assets), "window": party.window, "tested": party.tests}
    dtypes = [str(part.dtype).removeprefix("torch.") for part in (party.x, party.y)]
    shapes = [list(part.shape[1:]) for part in (party.x, party.y)]
    return {
        "x": shapes[0],
        "x_dtype": dtypes[0],
        "y": shapes[1],
        "y_dtype": dtypes[1],
        "samples": party.samples,
        "tested": len(party.x_test),
    }


def in_common(said: Mapping[str, Any]) -> dict[str, Any]:
    """What is the same for all parties of a federation, of what one of them says."""
    return {name: said[name] for name in _kind(said)}


def only_known(said: Mapping[str, Any]) -> dict[str, Any]:
    """What a party says of its data, and nothing else that it may have sent along."""
    return {name: said[name] for name in (*_kind(said), *_COUNTS[_kind(said)])}


def not_yet_known(said: Mapping[str, Any]) -> dict[str, Any]:
    """What is taken for true of a party that has not come, like one that says this of its data."""
    return {**in_common(said), **{name: _UNKNOWN[name] for name in _COUNTS[_kind(said)]}}


def told(said: Mapping[str, Any]) -> str:
    """What a party brings, in words.

    >>> told({"observations": [4], "actions": 2, "tested": 20}), told({"assets": 9, "window": 30, "tested": 261})
    ('an environment of its own', '9 assets to trade')
    """
    if _kind(said) == _ROWS:
        return f"{said['samples']} samples"
    return "an environment of its own" if _kind(said) == _AGENT else f"{said['assets']} assets to trade"


def _kind(said: Mapping[str, Any]) -> tuple[str, ...]:
    return next((kind for kind in _COUNTS if kind[0] in said), _ROWS)


def elsewhere(described: Mapping[str, Mapping[str, Any]], note: str = "") -> People:
    """The parties that were described, without their data.

    >>> said = {"x": [2], "x_dtype": "float32", "y": [], "y_dtype": "int64", "samples": 3, "tested": 1}
    >>> people = elsewhere({"a": said})
    >>> people["a"], people.samples
    (Party('a', 3 to train, 1 to test, x (2,)), {'a': 3})
    """
    if not described:
        raise PartyError("There must be at least one party. Got none.")
    sources = [_source(name, said) for name, said in described.items()]
    for source in sources:
        if source.form != sources[0].form:
            first = sources[0]
            raise PartyError(
                f"Party {source.name!r} has {source.form}, party {first.name!r} {first.form}. They must be alike."
            )
    late = {name: said for name, said in described.items() if said.get(KNOWN) is not None}
    before = {name: _source(name, not_yet_known(said)) for name, said in late.items()}
    since = {name: said[SINCE] for name, said in described.items() if SINCE in said}
    return People(sources, note, None, since | {name: said[KNOWN] for name, said in late.items()}, before)


@dataclass(frozen=True, eq=False)
class _Elsewhere(Source):
    """One number, seen as often as there are samples: it takes no memory, however many they are."""

    def party(self) -> Party:
        x_test, y_test = self.own_test or (self.x[:0], self.y[:0])
        parts = zip((self.x, self.y, x_test, y_test), (self.form.x_dtype, self.form.y_dtype) * 2, strict=True)
        return Party(self.name, *(torch.zeros(1, dtype=dtype).expand(part.shape) for part, dtype in parts))


@dataclass(frozen=True)
class _World:
    """An environment that is on another machine."""

    shape: tuple[int, ...]
    actions: int
    name: str = "an environment of its own"

    def beside(self, worlds: Sequence[Any], names: Sequence[str], kept: Any = None) -> Any:
        raise PartyError(f"The environment of {names[0]!r} is on its own machine, and nobody acts in it here.")

    def __str__(self) -> str:
        return self.name


class _Desk(Desk):
    """A desk whose prices are on another machine: as many days as there can be, of which none is written down."""

    @property
    def data(self) -> tuple[torch.Tensor, ...]:
        return (torch.tensor([len(self.assets), self.window, self.tests]),)

    def __str__(self) -> str:
        return f"{len(self.assets)} assets of its own"


def _source(name: str, said: Mapping[str, Any]) -> Any:
    make: Callable[[str, Mapping[str, Any]], Any] = {_ROWS: _rows, _AGENT: _agent, _DESK: _desk}[_kind(said)]
    try:
        return make(name, said)
    except (KeyError, TypeError, ValueError) as error:
        raise PartyError(f"What party {name!r:.40} says of its data is not understood: {error}.") from error


def _rows(name: str, said: Mapping[str, Any]) -> Source:
    form = Form(tuple(said["x"]), _DTYPES[said["x_dtype"]], tuple(said["y"]), _DTYPES[said["y_dtype"]])
    samples, tested = said["samples"], said["tested"]
    _check([*form.x_shape, *form.y_shape, samples, tested], [samples], [form.x_shape, form.y_shape], _LARGEST)
    x, y = (
        np.broadcast_to(np.zeros(1, kind), (samples, *shape))
        for kind, shape in zip("fi", (form.x_shape, form.y_shape), strict=True)
    )
    own_test = tuple(np.broadcast_to(part[:1], (tested, *part.shape[1:])) for part in (x, y))
    return _Elsewhere(name, x, y, (own_test[0], own_test[1]), Plan(0.0), form)


def _agent(name: str, said: Mapping[str, Any]) -> Bare:
    world, tested = _World(tuple(said["observations"]), said["actions"]), said["tested"]
    _check([*world.shape, world.actions, tested], [world.actions], [[*world.shape, world.actions]], _SEEN)
    return Bare(Agent(name, world, tested, seed=0))


def _desk(name: str, said: Mapping[str, Any]) -> Bare:
    assets, window, tested = said["assets"], said["window"], said["tested"]
    _check([assets, window, tested], [assets, window - 1], [[assets, window + 1]], _SEEN)
    prices, dates = (np.broadcast_to(np.zeros(1), shape) for shape in ((_MOST, assets), (tested,)))
    return Bare(_Desk(name, ("",) * assets, prices, prices[: window + tested], dates, window, 0.0, ""))


def _check(numbers: Sequence[Any], positive: Sequence[int], shapes: Sequence[Sequence[int]], largest: int) -> None:
    """Numbers that anybody may have written: whole ones, within reason, before anything is made of them."""
    whole = len(numbers) < 12 and all(type(number) is int and 0 <= number <= _MOST for number in numbers)
    if not whole or min(positive) < 1 or max(map(math.prod, shapes)) > largest:
        raise ValueError(f"its numbers are {[*numbers]!r:.120}")
