"""One party: the caller's data, checked, and split into train and test on demand."""

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
    weights: Tensor | None = None  # [samples], sampling weights; None: uniform

    @property
    def samples(self) -> int:
        """The number of training samples."""
        return len(self.x)

    @property
    def data(self) -> tuple[Tensor, ...]:
        """All tensors of the party."""
        return self.x, self.y, self.x_test, self.y_test

    def __repr__(self) -> str:
        return f"Party({self.name!r}, {len(self.x)} to train, {len(self.x_test)} to test, x {tuple(self.x.shape[1:])})"


@dataclass(frozen=True)
class SplitSettings:
    """Settings for building parties from arrays."""

    test: float = setting(help="share of its samples that a party keeps for its test set", least=0, below=1)
    seed: int = 0
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class SampleSpec:
    """Shapes of one sample and dtypes, which must agree for all parties."""

    x_shape: tuple[int, ...]
    x_dtype: torch.dtype
    y_shape: tuple[int, ...]
    y_dtype: torch.dtype

    @classmethod
    def of(cls, x: Array, y: Array, dtype: torch.dtype | None) -> SampleSpec:
        default_float = torch.float16 if x.dtype == np.float16 else torch.float32
        x_dtype = dtype or (torch.int64 if x.dtype.kind in "iu" else default_float)
        y_float = x_dtype if x_dtype.is_floating_point else torch.float32
        return cls(x.shape[1:], x_dtype, y.shape[1:], y_float if y.dtype.kind == "f" else torch.int64)

    def __str__(self) -> str:
        return f"features {self.x_shape} {self.x_dtype}, targets {self.y_shape} {self.y_dtype}".replace("torch.", "")


@dataclass(frozen=True, eq=False)
class PartySource:
    """A party before its train/test split: arrays that parties may share, its own rows, and split settings.

    Nothing is copied before the party is requested: a thousand parties cost as much memory as their data set.
    """

    name: str
    x: Array
    y: Array
    test_set: tuple[Array, Array] | None
    split_settings: SplitSettings
    sample_spec: SampleSpec
    rows: NDArray[np.int64] | None = None  # of x and y; None: all of them
    prepare: Callable[[Array], Array] | None = None  # applied to the features, such as scaling or rotating

    @property
    def size(self) -> int:
        return len(self.x) if self.rows is None else len(self.rows)

    @property
    def labels(self) -> Array:
        """Targets of all rows of the party."""
        return self.y if self.rows is None else self.y[self.rows]

    @property
    def held_out_count(self) -> int:
        if self.test_set is not None or self.split_settings.test == 0:
            return 0
        return min(max(1, round(self.size * self.split_settings.test)), self.size - 1)

    @property
    def test_count(self) -> int:
        return len(self.test_set[0]) if self.test_set else self.held_out_count

    def build_party(self) -> Party:
        train: slice | NDArray[np.int64] = slice(None)
        test: slice | NDArray[np.int64] = slice(0)
        if self.held_out_count:
            order = stream(self.split_settings.seed, 0, self.name, purpose="split").permutation(self.size)
            train = np.sort(order[self.held_out_count :])
            test = np.sort(order[: self.held_out_count])
        if self.rows is not None:
            train = self.rows[train]
            test = self.rows[test]
        x_test, y_test = self.test_set or (self.x[test], self.y[test])
        arrays = (self._apply_prepare(self.x[train]), self.y[train], self._apply_prepare(x_test), y_test)
        return Party(self.name, *map(_to_tensor, arrays, (self.sample_spec.x_dtype, self.sample_spec.y_dtype) * 2))

    def _apply_prepare(self, x: Array) -> Array:
        return x if self.prepare is None else self.prepare(x)

    def table_row(self) -> str:
        """Return this party's line in a table of parties."""
        sizes = f"{self.name:8} {self.size - self.held_out_count:5} {self.test_count:5}"
        if self.y.ndim > 1 or self.y.dtype.kind == "f":
            return f"{sizes}       -  -"
        labels, counts = np.unique(self.labels, return_counts=True)
        return f"{sizes} {len(labels):7}  {labels[counts.argmax()]} ({100 * counts.max() / counts.sum():.0f} %)"


def party_source(name: str, arrays: Sequence[Any], split_settings: SplitSettings) -> PartySource:
    """Return the checked source of a party with arrays of its own."""
    if not isinstance(arrays, tuple | list) or len(arrays) not in (2, 4):
        raise PartyError(f"Party {name!r} must be (x, y) or (x, y, x_test, y_test). Got a {type(arrays).__name__}.")
    x, y, sample_spec = validate_pair(f"party {name!r}", "", arrays[:2], split_settings=split_settings)
    test_set = None
    if len(arrays) == 4:
        x_test, y_test, test_spec = validate_pair(f"party {name!r}", "test ", arrays[2:], split_settings=split_settings)
        test_set = (x_test, y_test) if len(x_test) else (x[:0], y[:0])
        if len(x) and len(x_test):
            check_same_spec(f"The test set of party {name!r}", test_spec, "its training set", expected=sample_spec)
    return PartySource(name, x, y, test_set=test_set, split_settings=split_settings, sample_spec=sample_spec)


def validate_pair(
    owner: str, kind: str, pair: Sequence[Any], split_settings: SplitSettings
) -> tuple[Array, Array, SampleSpec]:
    """Return features and targets as finite arrays of equal length, with their sample spec."""
    x = as_array(pair[0], f"The {kind}features of {owner}")
    y = as_array(pair[1], f"The {kind}targets of {owner}")
    if len(x) != len(y):
        counts = f"{len(x)} {kind}samples but {len(y)} {kind}targets"
        raise PartyError(f"{owner[0].upper()}{owner[1:]} has {counts}. Give one for each.")
    sample_spec = SampleSpec.of(x, y, split_settings.dtype)
    check_finite(x, sample_spec.x_dtype, f"the {kind}features of {owner}")
    check_finite(y, sample_spec.y_dtype, f"the {kind}targets of {owner}")
    if y.dtype.kind == "i" and y.size and y.min() < 0:
        row = np.argwhere(y < 0)[0][0]
        raise PartyError(f"Row {row} of the {kind}targets of {owner} is {y[row]}. Labels must be 0 or more.")
    return x, y, sample_spec


def as_array(values: Any, label: str) -> Array:
    """Return the values as an array; the memory of a tensor or an array is shared."""
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        values = (values.float() if values.dtype == torch.bfloat16 else values).numpy()
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise PartyError(f"{label} must be numbers in rows of one length: {error}") from error
    if array.ndim == 0 or array.dtype.kind not in "fiub":
        raise PartyError(f"{label} must be numbers, one row per sample. Got shape {array.shape} of {array.dtype}.")
    return array


def _to_tensor(array: Array, dtype: torch.dtype) -> Tensor:
    """Return the array as a writable tensor; memory is shared where dtype and layout allow."""
    numpy_dtype = _numpy_dtype(torch.float32 if dtype == torch.bfloat16 else dtype)
    shareable = array.dtype == numpy_dtype and array.flags.carray
    return torch.from_numpy(array if shareable else np.require(array, numpy_dtype, ["C", "W"])).to(dtype)


@cache
def _numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    return torch.empty(0, dtype=dtype).numpy().dtype


def check_finite(array: Array, dtype: torch.dtype, label: str) -> None:
    """Raise if a number is NaN, infinite or too large for the dtype, with its row."""
    if array.dtype.kind != "f" or not array.size:
        return
    max_value = torch.finfo(dtype).max
    if not (-max_value <= float(array.min()) and float(array.max()) <= max_value):  # a NaN makes both of them NaN
        row, *rest = np.argwhere(~(np.abs(array.astype(np.float64)) <= max_value))[0]
        problem = f"Row {row} of {label} holds {array[(row, *rest)]}"
        raise PartyError(f"{problem}. Every number must be finite and fit in {dtype}: correct or drop that row.")


def check_same_spec(subject: str, sample_spec: SampleSpec, reference: str, expected: SampleSpec) -> None:
    """Raise if a sample spec differs from the expected one."""
    if sample_spec != expected:
        raise PartyError(f"{subject} has {sample_spec}; expected {expected}, like {reference}. Make the data agree.")
