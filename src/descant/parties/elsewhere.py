"""Parties whose data are on other machines: what they say of themselves, and what stands in their places here.

A server makes its plan with these: names, shapes and counts are true, and every number is 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..errors import PartyError
from .party import Form, Party, Plan, Source
from .people import People

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype for dtype in (torch.float16, torch.float32, torch.float64, torch.int64)
}
_MOST = 10**9  # samples; more than that nobody has
_LARGEST = 2**27  # numbers of a sample: two of them are tried when a party comes
FORM = ("x", "x_dtype", "y", "y_dtype")
"""What is the same for all parties of a federation."""
KEYS = (*FORM, "samples", "tested")
"""What is said of a party's data."""
SINCE = "since"
"""The round behind which a party has come, where it was not there from the beginning."""
KNOWN = "known"
"""The round behind which a party that was there from the beginning has said this of its data; None: not yet."""
UNKNOWN = {"samples": 1, "tested": 0}
"""What is taken for true of a party's data until then."""


def description(party: Party) -> dict[str, Any]:
    """What a party says of its data: shapes, dtypes and counts, as JSON values.

    >>> description(Party("a", torch.zeros(3, 2), torch.zeros(3).long(), torch.zeros(1, 2), torch.zeros(1).long()))
    {'x': [2], 'x_dtype': 'float32', 'y': [], 'y_dtype': 'int64', 'samples': 3, 'tested': 1}
    """
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
    before = {name: _source(name, {**said, **UNKNOWN}) for name, said in late.items()}
    since = {name: said[SINCE] for name, said in described.items() if SINCE in said}
    return People(sources, note, None, since | {name: said[KNOWN] for name, said in late.items()}, before)


@dataclass(frozen=True, eq=False)
class _Elsewhere(Source):
    """One number, seen as often as there are samples: it takes no memory, however many they are."""

    def party(self) -> Party:
        x_test, y_test = self.own_test or (self.x[:0], self.y[:0])
        parts = zip((self.x, self.y, x_test, y_test), (self.form.x_dtype, self.form.y_dtype) * 2, strict=True)
        return Party(self.name, *(torch.zeros(1, dtype=dtype).expand(part.shape) for part, dtype in parts))


def _source(name: str, said: Mapping[str, Any]) -> Source:
    try:
        form = Form(tuple(said["x"]), _DTYPES[said["x_dtype"]], tuple(said["y"]), _DTYPES[said["y_dtype"]])
        samples, tested = said["samples"], said["tested"]
        whole = [*form.x_shape, *form.y_shape, samples, tested]
        small = len(whole) < 12 and all(type(number) is int and 0 <= number <= _MOST for number in whole)
        if not small or samples < 1 or math.prod(form.x_shape) > _LARGEST:
            raise ValueError(f"its numbers are {whole}")
        x, y = (
            np.broadcast_to(np.zeros(1, kind), (samples, *shape))
            for kind, shape in zip("fi", (form.x_shape, form.y_shape), strict=True)
        )
        own_test = tuple(np.broadcast_to(part[:1], (tested, *part.shape[1:])) for part in (x, y))
    except (KeyError, TypeError, ValueError) as error:
        raise PartyError(f"What party {name!r:.40} says of its data is not understood: {error}.") from error
    return _Elsewhere(name, x, y, (own_test[0], own_test[1]), Plan(0.0), form)
