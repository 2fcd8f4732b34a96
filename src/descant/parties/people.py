"""Parties and their data: read once and checked, shared with the caller's arrays, cut into train and test on demand.

A party's cut is drawn from a stream of its own name, so that adding a party never changes another one's test set.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import DescantWarning, PartyError, SettingError
from ..seeds import stream
from ..settings import check, setting

Array: TypeAlias = NDArray[Any]
KEPT = 1024  # parties kept ready: all of a few large silos, but not all of a hundred thousand telephones
SHOWN = 20  # parties that a table or a message lists


@dataclass(frozen=True, eq=False, repr=False)
class Party:
    """One party and its data; the leading dimension is samples, and the test set may be empty."""

    name: str
    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor

    @property
    def samples(self) -> int:
        """How many samples it trains on."""
        return len(self.x)

    def __repr__(self) -> str:
        return f"Party({self.name!r}, {len(self.x)} to train, {len(self.x_test)} to test, x {tuple(self.x.shape[1:])})"


class _NoSuchParty(PartyError, KeyError):
    """Also a KeyError, so that `in` and `get` work as they do for any mapping."""

    __str__ = Exception.__str__  # KeyError would print the message in quotes


class People(Mapping[str, Party]):
    """Parties by name, in order; they never change. Made by :func:`from_arrays`, a :class:`Party` at a time.

    >>> people = from_arrays({"north": ([[0.0], [1.0]], [0, 1]), "south": ([[2.0], [3.0]], [1, 1])}, test=0)
    >>> people.names, people["south"].x.flatten().tolist()
    (('north', 'south'), [2.0, 3.0])
    """

    def __init__(self, sources: Iterable[_Source]) -> None:
        self._sources = {source.name: source for source in sources}
        self._ready: dict[str, Party] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """The names, in order."""
        return tuple(self._sources)

    @property
    def samples(self) -> dict[str, int]:
        """How many samples each party trains on, without reading its data."""
        return {name: len(source.x) - source.held_out for name, source in self._sources.items()}

    def __getitem__(self, name: str) -> Party:
        if name in self._ready:
            return self._ready[name]
        source = self._source(name)
        if len(self._ready) >= KEPT:
            self._ready.pop(next(iter(self._ready)), None)
        return self._ready.setdefault(name, source.party())

    def _source(self, name: str) -> _Source:
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
        return People(map(self._source, _check_names([names] if isinstance(names, str) else list(names))))

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
        return "\n".join(lines + [f"and {len(self) - SHOWN} more"] * (len(self) > SHOWN))


def from_arrays(
    data: Mapping[str, Sequence[Any]] | Iterable[Sequence[Any]],
    test: float = 0.2,
    seed: int = 0,
    names: Iterable[str] | None = None,
    dtype: torch.dtype | None = None,
) -> People:
    """Parties from pairs (x, y), or (x, y, x_test, y_test) where a party brings its own test set.

    Arrays, tensors and nested lists will do. From a pair the share `test` is held out, at least one sample of two.
    Features: float64 becomes float32 and whole numbers stay whole, unless `dtype` says otherwise. Labels become int64.

    >>> people = from_arrays([([[0.0], [1.0], [2.0], [3.0]], [0, 1, 0, 1])], test=0.25, names=["north"])
    >>> people["north"]
    Party('north', 3 to train, 1 to test, x (1,))
    """
    plan = _Plan(float(test), int(seed), dtype)
    check(plan, "from_arrays")
    if dtype is not None and not dtype.is_floating_point:
        raise SettingError(f"The 'dtype' of from_arrays must be a floating dtype such as torch.float32. Got {dtype}.")
    if isinstance(data, Mapping):
        if names is not None:
            raise PartyError("The keys of a mapping name the parties. Leave names= out, or give a list of pairs.")
        names, data = data.keys(), data.values()
    entries = list(data)
    given = _check_names(list(range(len(entries)) if names is None else names))
    if len(given) != len(entries):
        raise PartyError(f"Every party needs one name. There are {len(entries)} parties and {len(given)} names.")
    sources = [_read(name, entry, plan) for name, entry in zip(given, entries, strict=True)]
    full = [source for source in sources if len(source.x)]
    empty = [source.name for source in sources if not len(source.x)]
    if not full:
        raise PartyError(f"All {len(empty)} parties are empty: {_some(empty)}. At least one needs a sample.")
    if empty:
        warnings.warn(f"Left out, because they have no samples: {_some(empty)}.", DescantWarning, stacklevel=2)
    for source in full:
        _check_alike(f"Party {source.name!r}", source.form, f"party {full[0].name!r}", full[0].form)
    return People(full)


@dataclass(frozen=True)
class _Plan:
    test: float = setting(help="share of its samples that a party keeps for its test set", least=0, below=1)
    seed: int = 0
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class _Form:
    """What must be alike for all parties: the shapes of one sample, and the dtypes."""

    x_shape: tuple[int, ...]
    x_dtype: torch.dtype
    y_shape: tuple[int, ...]
    y_dtype: torch.dtype

    @classmethod
    def of(cls, x: Array, y: Array, dtype: torch.dtype | None) -> _Form:
        half = torch.float16 if x.dtype == np.float16 else torch.float32
        x_dtype = dtype or (torch.int64 if x.dtype.kind in "iu" else half)
        y_float = x_dtype if x_dtype.is_floating_point else torch.float32
        return cls(x.shape[1:], x_dtype, y.shape[1:], y_float if y.dtype.kind == "f" else torch.int64)

    def __str__(self) -> str:
        return f"features {self.x_shape} {self.x_dtype}, targets {self.y_shape} {self.y_dtype}".replace("torch.", "")


@dataclass(frozen=True, eq=False)
class _Source:
    """A party before it is cut: the caller's own arrays, and how to cut them."""

    name: str
    x: Array
    y: Array
    own_test: tuple[Array, Array] | None
    plan: _Plan
    form: _Form

    @property
    def held_out(self) -> int:
        if self.own_test is not None or self.plan.test == 0:
            return 0
        return min(max(1, round(len(self.x) * self.plan.test)), len(self.x) - 1)

    @property
    def tested(self) -> int:
        return len(self.own_test[0]) if self.own_test else self.held_out

    def party(self) -> Party:
        arrays = (self.x, self.y, *(self.own_test or (self.x[:0], self.y[:0])))
        if self.held_out:
            order = stream(self.plan.seed, 0, self.name, "split").permutation(len(self.x))
            train, test = np.sort(order[self.held_out :]), np.sort(order[: self.held_out])
            arrays = (self.x[train], self.y[train], self.x[test], self.y[test])
        return Party(self.name, *map(_tensor, arrays, (self.form.x_dtype, self.form.y_dtype) * 2))

    def line(self) -> str:
        sizes = f"{self.name:8} {len(self.x) - self.held_out:5} {self.tested:5}"
        if self.y.ndim > 1 or self.y.dtype.kind == "f":
            return f"{sizes}       -  -"
        labels, counts = np.unique(self.y, return_counts=True)
        return f"{sizes} {len(labels):7}  {labels[counts.argmax()]} ({100 * counts.max() / counts.sum():.0f} %)"


def _read(name: str, entry: Sequence[Any], plan: _Plan) -> _Source:
    if not isinstance(entry, tuple | list) or len(entry) not in (2, 4):
        raise PartyError(f"Party {name!r} must be (x, y) or (x, y, x_test, y_test). Got a {type(entry).__name__}.")
    x, y, form = _pair(name, "", entry[:2], plan)
    own_test = None
    if len(entry) == 4:
        x_test, y_test, test_form = _pair(name, "test ", entry[2:], plan)
        own_test = (x_test, y_test) if len(x_test) else (x[:0], y[:0])
        if len(x) and len(x_test):
            _check_alike(f"The test set of party {name!r}", test_form, "its training set", form)
    return _Source(name, x, y, own_test, plan, form)


def _pair(name: str, kind: str, pair: Sequence[Any], plan: _Plan) -> tuple[Array, Array, _Form]:
    x = _array(pair[0], f"The {kind}features of party {name!r}")
    y = _array(pair[1], f"The {kind}targets of party {name!r}")
    if len(x) != len(y):
        raise PartyError(f"Party {name!r} has {len(x)} {kind}samples but {len(y)} {kind}targets. Give one for each.")
    form = _Form.of(x, y, plan.dtype)
    _check_finite(x, form.x_dtype, f"the {kind}features of party {name!r}")
    _check_finite(y, form.y_dtype, f"the {kind}targets of party {name!r}")
    if y.dtype.kind == "i" and y.size and y.min() < 0:
        row = np.argwhere(y < 0)[0][0]
        raise PartyError(f"Row {row} of the {kind}targets of party {name!r} is {y[row]}. Labels must be 0 or more.")
    return x, y, form


def _array(values: Any, what: str) -> Array:
    """The values as an array; a tensor's or an array's memory is shared."""
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        values = (values.float() if values.dtype == torch.bfloat16 else values).numpy()
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise PartyError(f"{what} must be numbers in rows of one length: {error}") from error
    if array.ndim == 0 or array.dtype.kind not in "fiub":
        raise PartyError(f"{what} must be numbers, one row a sample. Got shape {array.shape} of {array.dtype}.")
    return array


def _tensor(array: Array, dtype: torch.dtype) -> Tensor:
    """The array as a tensor; its memory is shared where dtype and layout allow, and it may be written."""
    via = torch.float32 if dtype == torch.bfloat16 else dtype
    return torch.from_numpy(np.require(array, torch.empty(0, dtype=via).numpy().dtype, ["C", "W"])).to(dtype)


def _check_finite(array: Array, dtype: torch.dtype, what: str) -> None:
    if array.dtype.kind != "f" or not array.size:
        return
    most = torch.finfo(dtype).max
    if not (-most <= float(array.min()) and float(array.max()) <= most):  # a NaN makes both of them NaN
        row, *rest = np.argwhere(~(np.abs(array.astype(np.float64)) <= most))[0]
        found = f"Row {row} of {what} holds {array[(row, *rest)]}"
        raise PartyError(f"{found}. Every number must be finite and fit in {dtype}: mend or drop that row.")


def _check_alike(who: str, form: _Form, other: str, expected: _Form) -> None:
    if form != expected:
        raise PartyError(f"{who} has {form}; expected {expected}, like {other}. Make the data agree.")


def _check_names(given: Sequence[Any]) -> list[str]:
    names = [str(name) for name in given]
    if not names:
        raise PartyError("There must be at least one party. Got none.")
    bad = [name for name, times in Counter(names).items() if times > 1 or not name]
    if bad:
        raise PartyError(f"Every party needs a name of its own that is not empty. Given twice or empty: {_some(bad)}.")
    return names


def _some(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:SHOWN])) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
