"""One party: its data as the caller has them, checked, and cut into train and test when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..core.seeds import stream
from ..core.settings import setting
from ..errors import PartyError

Array: TypeAlias = NDArray[Any]


@dataclass(frozen=True, eq=False, repr=False)
class Party:
    """One party and its data; the leading dimension is samples, and the test set may be empty."""

    name: str
    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor
    weights: Tensor | None = None  # [samples], how often each is drawn; None: all alike

    @property
    def samples(self) -> int:
        """How many samples it trains on."""
        return len(self.x)

    @property
    def data(self) -> tuple[Tensor, ...]:
        """All that it has."""
        return self.x, self.y, self.x_test, self.y_test

    def __repr__(self) -> str:
        return f"Party({self.name!r}, {len(self.x)} to train, {len(self.x_test)} to test, x {tuple(self.x.shape[1:])})"


@dataclass(frozen=True)
class Plan:
    """How parties are made of arrays."""

    test: float = setting(help="share of its samples that a party keeps for its test set", least=0, below=1)
    seed: int = 0
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class Form:
    """What must be alike for all parties: the shapes of one sample, and the dtypes."""

    x_shape: tuple[int, ...]
    x_dtype: torch.dtype
    y_shape: tuple[int, ...]
    y_dtype: torch.dtype

    @classmethod
    def of(cls, x: Array, y: Array, dtype: torch.dtype | None) -> Form:
        half = torch.float16 if x.dtype == np.float16 else torch.float32
        x_dtype = dtype or (torch.int64 if x.dtype.kind in "iu" else half)
        y_float = x_dtype if x_dtype.is_floating_point else torch.float32
        return cls(x.shape[1:], x_dtype, y.shape[1:], y_float if y.dtype.kind == "f" else torch.int64)

    def __str__(self) -> str:
        return f"features {self.x_shape} {self.x_dtype}, targets {self.y_shape} {self.y_dtype}".replace("torch.", "")


@dataclass(frozen=True, eq=False)
class Source:
    """A party before it is cut: arrays that many parties may share, which rows are its own, and how to cut them.

    Nothing is copied before somebody asks for the party: a thousand of them cost as much memory as their data set.
    """

    name: str
    x: Array
    y: Array
    own_test: tuple[Array, Array] | None
    plan: Plan
    form: Form
    rows: NDArray[np.int64] | None = None  # of x and y; None: all of them
    prepare: Callable[[Array], Array] | None = None  # what is done to its features, such as scaling or rotating

    @property
    def size(self) -> int:
        return len(self.x) if self.rows is None else len(self.rows)

    @property
    def labels(self) -> Array:
        """The targets of all its rows."""
        return self.y if self.rows is None else self.y[self.rows]

    @property
    def held_out(self) -> int:
        if self.own_test is not None or self.plan.test == 0:
            return 0
        return min(max(1, round(self.size * self.plan.test)), self.size - 1)

    @property
    def tested(self) -> int:
        return len(self.own_test[0]) if self.own_test else self.held_out

    def party(self) -> Party:
        train: slice | NDArray[np.int64] = slice(None)
        test: slice | NDArray[np.int64] = slice(0)
        if self.held_out:
            order = stream(self.plan.seed, 0, self.name, "split").permutation(self.size)
            train, test = np.sort(order[self.held_out :]), np.sort(order[: self.held_out])
        if self.rows is not None:
            train, test = self.rows[train], self.rows[test]
        x_test, y_test = self.own_test or (self.x[test], self.y[test])
        arrays = (self._prepared(self.x[train]), self.y[train], self._prepared(x_test), y_test)
        return Party(self.name, *map(_tensor, arrays, (self.form.x_dtype, self.form.y_dtype) * 2))

    def _prepared(self, x: Array) -> Array:
        return x if self.prepare is None else self.prepare(x)

    def line(self) -> str:
        """Its line in a table of parties."""
        sizes = f"{self.name:8} {self.size - self.held_out:5} {self.tested:5}"
        if self.y.ndim > 1 or self.y.dtype.kind == "f":
            return f"{sizes}       -  -"
        labels, counts = np.unique(self.labels, return_counts=True)
        return f"{sizes} {len(labels):7}  {labels[counts.argmax()]} ({100 * counts.max() / counts.sum():.0f} %)"


def read(name: str, entry: Sequence[Any], plan: Plan) -> Source:
    """A party of its own arrays, checked."""
    if not isinstance(entry, tuple | list) or len(entry) not in (2, 4):
        raise PartyError(f"Party {name!r} must be (x, y) or (x, y, x_test, y_test). Got a {type(entry).__name__}.")
    x, y, form = checked_pair(f"party {name!r}", "", entry[:2], plan)
    own_test = None
    if len(entry) == 4:
        x_test, y_test, test_form = checked_pair(f"party {name!r}", "test ", entry[2:], plan)
        own_test = (x_test, y_test) if len(x_test) else (x[:0], y[:0])
        if len(x) and len(x_test):
            check_alike(f"The test set of party {name!r}", test_form, "its training set", form)
    return Source(name, x, y, own_test, plan, form)


def checked_pair(whose: str, kind: str, pair: Sequence[Any], plan: Plan) -> tuple[Array, Array, Form]:
    """Features and targets as arrays of equal length, without anything that is not finite, and their form."""
    x = as_array(pair[0], f"The {kind}features of {whose}")
    y = as_array(pair[1], f"The {kind}targets of {whose}")
    if len(x) != len(y):
        found = f"{len(x)} {kind}samples but {len(y)} {kind}targets"
        raise PartyError(f"{whose[0].upper()}{whose[1:]} has {found}. Give one for each.")
    form = Form.of(x, y, plan.dtype)
    check_finite(x, form.x_dtype, f"the {kind}features of {whose}")
    check_finite(y, form.y_dtype, f"the {kind}targets of {whose}")
    if y.dtype.kind == "i" and y.size and y.min() < 0:
        row = np.argwhere(y < 0)[0][0]
        raise PartyError(f"Row {row} of the {kind}targets of {whose} is {y[row]}. Labels must be 0 or more.")
    return x, y, form


def as_array(values: Any, what: str) -> Array:
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
    via = _numpy(torch.float32 if dtype == torch.bfloat16 else dtype)
    ready = array.dtype == via and array.flags.carray
    return torch.from_numpy(array if ready else np.require(array, via, ["C", "W"])).to(dtype)


@cache
def _numpy(dtype: torch.dtype) -> np.dtype[Any]:
    return torch.empty(0, dtype=dtype).numpy().dtype


def check_finite(array: Array, dtype: torch.dtype, what: str) -> None:
    """Refuse NaN, infinities and what does not fit in the dtype, with the first such row."""
    if array.dtype.kind != "f" or not array.size:
        return
    most = torch.finfo(dtype).max
    if not (-most <= float(array.min()) and float(array.max()) <= most):  # a NaN makes both of them NaN
        row, *rest = np.argwhere(~(np.abs(array.astype(np.float64)) <= most))[0]
        found = f"Row {row} of {what} holds {array[(row, *rest)]}"
        raise PartyError(f"{found}. Every number must be finite and fit in {dtype}: mend or drop that row.")


def check_alike(who: str, form: Form, other: str, expected: Form) -> None:
    """Refuse a form that differs from another one's."""
    if form != expected:
        raise PartyError(f"{who} has {form}; expected {expected}, like {other}. Make the data agree.")
