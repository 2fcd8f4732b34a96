"""Parties and their data: read once and checked, shared with the caller's arrays, cut into train and test on demand.

A party's cut is drawn from a stream of its own name, so that adding a party never changes another one's test set.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..core.settings import check
from ..errors import DescantWarning, PartyError, SettingError
from .partition import Rows
from .party import Array, Form, Party, Plan, Source, check_alike, checked_pair, read

__all__ = ["Party", "People", "from_arrays", "from_rows"]

KEPT = 1024  # parties kept ready: all of a few large silos, but not all of a hundred thousand telephones
SHOWN = 20  # parties that a table or a message lists


class _NoSuchParty(PartyError, KeyError):
    """Also a KeyError, so that `in` and `get` work as they do for any mapping."""

    __str__ = Exception.__str__  # KeyError would print the message in quotes


class People(Mapping[str, Party]):
    """Parties by name, in order; they never change. Made by :func:`from_arrays`, a :class:`Party` at a time.

    >>> people = from_arrays({"north": ([[0.0], [1.0]], [0, 1]), "south": ([[2.0], [3.0]], [1, 1])}, test=0)
    >>> people.names, people["south"].x.flatten().tolist()
    (('north', 'south'), [2.0, 3.0])
    """

    def __init__(
        self,
        sources: Iterable[Source],
        note: str = "",
        validation: tuple[Tensor, Tensor] | None = None,
        since: Mapping[str, int] = MappingProxyType({}),
        before: Mapping[str, Source] = MappingProxyType({}),
    ) -> None:
        self.note = note
        """What whoever sees a result must know of the data ("the critics' reviews stand in for Sent140"), or ""."""
        self.validation = validation
        """The server's own small set (x, y), on which the loss of every new centre is measured, or None."""
        self.since = since
        """The round behind which each of those has come who were not there from the beginning."""
        self.before = before
        """What was taken for some of those until then, because nothing was known of them but that they would come."""
        self._sources = {source.name: source for source in sources}
        self._ready: dict[str, Party] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """The names, in order."""
        return tuple(self._sources)

    @property
    def samples(self) -> dict[str, int]:
        """How many samples each party trains on, without reading its data."""
        return {name: source.size - source.held_out for name, source in self._sources.items()}

    def __getitem__(self, name: str) -> Party:
        if name in self._ready:
            return self._ready[name]
        source = self._source(name)
        if len(self._ready) >= KEPT:
            self._ready.pop(next(iter(self._ready)), None)
        return self._ready.setdefault(name, source.party())

    def _source(self, name: str) -> Source:
        if name not in self._sources:
            raise _NoSuchParty(f"There is no party {name!r}. There are {len(self)}: {_some(self.names)}.")
        return self._sources[name]

    def __contains__(self, name: object) -> bool:
        return name in self._sources

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)

    __eq__, __hash__ = object.__eq__, object.__hash__  # by identity, like a Party

    def __repr__(self) -> str:
        return f"People({len(self)}: {_some(self.names)})"

    def subset(self, names: Iterable[str]) -> People:
        """Only these parties, in this order, each with the data and the test set that it has here."""
        chosen = check_names([names] if isinstance(names, str) else list(names))
        return People(map(self._source, chosen), self.note, self.validation, self.since, self.before)

    def at(self, round: int) -> People:
        """Those who were there in the round with that number, as they were known then."""
        late = {name for name, behind in self.since.items() if behind >= round}
        if not late & self._sources.keys():
            return self
        there = [self.before.get(name) if name in late else source for name, source in self._sources.items()]
        return People([one for one in there if one is not None], self.note, self.validation, self.since, self.before)

    def with_validation(self, x: Any, y: Any) -> People:
        """The same parties, and a small set of the server's own, prepared as theirs are; it must represent them.

        >>> people = from_arrays({"a": ([[0.0], [1.0]], [0, 1])}).with_validation([[0.5]], [1])
        >>> people.validation
        (tensor([[0.5000]]), tensor([1]))
        """
        first = self._source(self.names[0])
        x, y, form = checked_pair("the validation set", "", (x, y), first.plan)
        if not len(x):
            raise PartyError("The validation set is empty. Give it at least one sample, or leave it out.")
        check_alike("The validation set", form, f"party {first.name!r}", first.form)
        if not form.y_shape and not form.y_dtype.is_floating_point:
            unknown = np.setdiff1d(y, self.label_counts()[0])
            if len(unknown):
                raise PartyError(f"The validation set has labels that no party has: {_some(unknown.tolist())}.")
        made = Source("validation", x, y, None, replace(first.plan, test=0.0), form).party()
        return People(self._sources.values(), self.note, (made.x, made.y), self.since, self.before)

    def label_counts(self) -> tuple[Array, NDArray[np.int64]]:
        """The labels there are, and how many rows of each every party has, ``[parties, labels]``."""
        sources = tuple(self._sources.values())
        if sources[0].form.y_shape or sources[0].form.y_dtype.is_floating_point:
            raise PartyError(f"Only parties with one whole number a row as target have labels. Got {sources[0].form}.")
        found = [np.unique(source.labels, return_counts=True) for source in sources]
        labels = np.unique(np.concatenate([one for one, _ in found]))
        counts = np.zeros((len(found), len(labels)), dtype=np.int64)
        for row, (one, times) in zip(counts, found, strict=True):
            row[np.searchsorted(labels, one)] = times
        return labels, counts

    def label_beyond(self, classes: int) -> str:
        """Who has a label that is not below `classes`, in words; "" if nobody has. It reads no features.

        >>> from_arrays({"a": ([[0.0], [1.0]], [0, 7])}).label_beyond(2)
        "Party 'a' has the label 7 in row 1"
        """
        fine: set[int] = set()  # targets that many parties share are looked through once
        for source in self._sources.values():
            if id(source.y) not in fine and source.y.max() < classes:
                fine.add(id(source.y))
            own = () if id(source.y) in fine else ((source.labels, ""),)
            tested = () if source.own_test is None else ((source.own_test[1], " of its test set"),)
            for labels, where in (*own, *tested):
                if labels.max(initial=0) >= classes:
                    row = int(np.argmax(labels >= classes))
                    return f"Party {source.name!r} has the label {labels[row]} in row {row}{where}"
        return ""

    def plot(self, file: str | Path) -> Path:
        """Draw the map of parties and classes into a PNG file."""
        from .population_plot import draw

        return draw(self, Path(file))

    def describe(self) -> str:
        """A table for people to read: the sizes of each party and the label it has most of.

        >>> print(from_arrays({"a": ([[0.0], [1.0], [2.0]], [1, 1, 0]), "b": ([[3.0]], [0])}).describe())
        2 parties: 3 samples to train, 1 to test; features (1,) float32, targets () int64
        party    train  test  labels  most common
        a            2     1       2  1 (67 %)
        b            1     0       1  0 (100 %)
        """
        sources = tuple(self._sources.values())
        train, test = sum(self.samples.values()), sum(source.tested for source in sources)
        title = f"{len(self)} parties: {train} samples to train, {test} to test; {sources[0].form}"
        lines = [title, "party    train  test  labels  most common", *(source.line() for source in sources[:SHOWN])]
        lines += [f"and {len(self) - SHOWN} more"] * (len(self) > SHOWN)
        lines += [] if self.validation is None else [f"the server validates on {len(self.validation[0])} of its own"]
        return "\n".join([*lines, self.note] if self.note else lines)


def from_arrays(
    data: Mapping[str, Sequence[Any]] | Iterable[Sequence[Any]],
    test: float = 0.2,
    seed: int = 0,
    names: Iterable[str] | None = None,
    dtype: torch.dtype | None = None,
    note: str = "",
    validation: Sequence[Any] | None = None,
) -> People:
    """Parties from pairs (x, y), or (x, y, x_test, y_test) where a party brings its own test set.

    Arrays, tensors and nested lists will do. From a pair the share `test` is held out, at least one sample of two.
    Features: float64 becomes float32 and whole numbers stay whole, unless `dtype` says otherwise. Labels become int64.
    `validation` is a pair, too: the server's own small set (see `People.with_validation`).

    >>> people = from_arrays([([[0.0], [1.0], [2.0], [3.0]], [0, 1, 0, 1])], test=0.25, names=["north"])
    >>> people["north"]
    Party('north', 3 to train, 1 to test, x (1,))
    """
    plan = _plan("from_arrays", test, seed, dtype)
    if isinstance(data, Mapping):
        if names is not None:
            raise PartyError("The keys of a mapping name the parties. Leave names= out, or give a list of pairs.")
        names, data = data.keys(), data.values()
    entries = list(data)
    given = check_names(list(range(len(entries)) if names is None else names))
    if len(given) != len(entries):
        raise PartyError(f"Every party needs one name. There are {len(entries)} parties and {len(given)} names.")
    sources = [read(name, entry, plan) for name, entry in zip(given, entries, strict=True)]
    people = _whole(sources, note)
    first = people._source(people.names[0])
    for name in people:
        check_alike(f"Party {name!r}", people._source(name).form, f"party {first.name!r}", first.form)
    if validation is None:
        return people
    if not isinstance(validation, tuple | list) or len(validation) != 2:
        raise PartyError(f"The validation set must be a pair (x, y). Got a {type(validation).__name__}.")
    return people.with_validation(*validation)


def from_rows(
    x: Any,
    y: Any,
    rows: Mapping[str, Rows] | Sequence[Rows],
    test: float = 0.2,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    prepare: Callable[[int, Array], Array] | None = None,
    note: str = "",
    tests: Sequence[Rows] | None = None,
) -> People:
    """Parties that share one data set: each has some rows of it, as :mod:`.splits` deals them out.

    The data set is checked once and not copied; a party's rows are taken out of it when it is asked for. Then `prepare`
    is called with the party's number and with them: to scale small integers, say, or to rotate its images. `tests` are
    the rows that each party is tested on, in their order, where these are not a share of its own.

    >>> people = from_rows([[0.0], [1.0], [2.0]], [0, 1, 1], {"north": np.array([0, 2]), "south": np.array([1])})
    >>> people["north"].x.tolist(), people["north"].x_test.tolist()
    ([[2.0]], [[0.0]])
    """
    plan = _plan("from_rows", test, seed, dtype)
    x, y, form = checked_pair("the data", "", (x, y), plan)
    if prepare is not None:
        form = Form.of(prepare(0, x[:1]), y, dtype)
    named = rows if isinstance(rows, Mapping) else {str(k): part for k, part in enumerate(rows)}
    if tests is not None and len(tests) != len(named):
        raise PartyError(f"Every party needs its test rows. There are {len(named)} parties and {len(tests)} of these.")
    sources = []
    for k, name in enumerate(check_names(list(named))):
        own = _checked_rows(name, named[name], len(x))
        tested = None if tests is None else _checked_rows(name, tests[k], len(x))
        own_test = None if tested is None else (x[tested], y[tested])
        sources.append(Source(name, x, y, own_test, plan, form, own, prepare and partial(prepare, k)))
    return _whole(sources, note)


def _checked_rows(name: str, rows: Rows, most: int) -> Rows:
    own = np.asarray(rows)
    if own.ndim != 1 or own.dtype.kind not in "iu" or (own.size and not 0 <= own.min() <= own.max() < most):
        raise PartyError(f"The rows of party {name!r} must be whole numbers from 0 to {most - 1}, one a row.")
    return own


def _plan(owner: str, test: float, seed: int, dtype: torch.dtype | None) -> Plan:
    plan = Plan(float(test), int(seed), dtype)
    check(plan, owner)
    if dtype is not None and not dtype.is_floating_point:
        raise SettingError(f"The 'dtype' of {owner} must be a floating dtype such as torch.float32. Got {dtype}.")
    return plan


def _whole(sources: Sequence[Source], note: str) -> People:
    """The parties that have samples; a warning names the others."""
    empty = [source.name for source in sources if not source.size]
    if len(empty) == len(sources):
        raise PartyError(f"All {len(empty)} parties are empty: {_some(empty)}. At least one needs a sample.")
    if empty:
        warnings.warn(f"Left out, because they have no samples: {_some(empty)}.", DescantWarning, stacklevel=3)
    return People((source for source in sources if source.size), note)


def check_names(given: Sequence[Any]) -> list[str]:
    names = [str(name) for name in given]
    if not names:
        raise PartyError("There must be at least one party. Got none.")
    bad = [name for name, times in Counter(names).items() if times > 1 or not name]
    if bad:
        raise PartyError(f"Every party needs a name of its own that is not empty. Given twice or empty: {_some(bad)}.")
    return names


def _some(names: Sequence[Any]) -> str:
    return ", ".join(map(repr, names[:SHOWN])) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
