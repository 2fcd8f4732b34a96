"""Parties and their data: checked once, shared with the caller's arrays, split into train and test on demand.

The split of a party is drawn from a stream keyed by its name, so adding a party never changes another party's test set.
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

from ..core.settings import check_settings
from ..errors import DescantWarning, PartyError, SettingError
from .partition import RowIndices
from .party import Array, Party, PartySource, SampleSpec, SplitSettings, check_same_spec, party_source, validate_pair

__all__ = ["Party", "Population", "from_arrays", "from_rows"]

PARTY_CACHE_SIZE = 1024  # parties kept in memory: enough for all silos, but not for a hundred thousand phones
MAX_LISTED_NAMES = 20  # in a table or a message


class _UnknownParty(PartyError, KeyError):
    """Also a KeyError, so that `in` and `get` work as for any mapping."""

    __str__ = Exception.__str__  # KeyError would print the message in quotes


class Population(Mapping[str, Party]):
    """An immutable mapping of parties by name, in order, which builds each :class:`Party` on demand.

    :func:`from_arrays` and the functions of :data:`POPULATIONS` return one.

    >>> population = from_arrays({"north": ([[0.0], [1.0]], [0, 1]), "south": ([[2.0], [3.0]], [1, 1])}, test=0)
    >>> population.names, population["south"].x.flatten().tolist()
    (('north', 'south'), [2.0, 3.0])
    """

    def __init__(
        self,
        sources: Iterable[PartySource],
        note: str = "",
        validation: tuple[Tensor, Tensor] | None = None,
        joined_after: Mapping[str, int] = MappingProxyType({}),
        placeholders: Mapping[str, PartySource] = MappingProxyType({}),
    ) -> None:
        self.note = note
        """A caveat on the data that every result must show ("film critics' reviews replace Sent140"), or ""."""
        self.validation = validation
        """The server's own small set (x, y), on which the loss of every new global model is measured, or None."""
        self.joined_after = joined_after
        """The round after which each late party joined; parties from the start are not listed."""
        self.placeholders = placeholders
        """Sources used for some late parties until then, when only their names were known."""
        self._sources = {source.name: source for source in sources}
        self._cache: dict[str, Party] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the parties, in order."""
        return tuple(self._sources)

    @property
    def samples(self) -> dict[str, int]:
        """Number of training samples of each party; reads no data."""
        return {name: source.size - source.held_out_count for name, source in self._sources.items()}

    def __getitem__(self, name: str) -> Party:
        if name in self._cache:
            return self._cache[name]
        source = self._source(name)
        if len(self._cache) >= PARTY_CACHE_SIZE:
            self._cache.pop(next(iter(self._cache)), None)
        return self._cache.setdefault(name, source.build_party())

    def _source(self, name: str) -> PartySource:
        if name not in self._sources:
            raise _UnknownParty(f"There is no party {name!r}. There are {len(self)}: {_format_names(self.names)}.")
        return self._sources[name]

    def __contains__(self, name: object) -> bool:
        return name in self._sources

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)

    __eq__ = object.__eq__
    __hash__ = object.__hash__  # by identity, like a Party

    def __repr__(self) -> str:
        return f"Population({len(self)}: {_format_names(self.names)})"

    def subset(self, names: Iterable[str]) -> Population:
        """Return only these parties, in this order, with unchanged data and test sets."""
        selected = validate_names([names] if isinstance(names, str) else list(names))
        return Population(
            map(self._source, selected),
            self.note,
            self.validation,
            joined_after=self.joined_after,
            placeholders=self.placeholders,
        )

    def at_round(self, round: int) -> Population:
        """Return the parties present in a round, as they were known then."""
        late = {name for name, last_absent in self.joined_after.items() if last_absent >= round}
        if not late & self._sources.keys():
            return self
        present_sources = [
            self.placeholders.get(name) if name in late else source for name, source in self._sources.items()
        ]
        return Population(
            [source for source in present_sources if source is not None],
            self.note,
            self.validation,
            joined_after=self.joined_after,
            placeholders=self.placeholders,
        )

    def with_validation(self, x: Any, y: Any) -> Population:
        """Return the same parties with a small validation set of the server.

        It is prepared like the parties' data and must be representative of them.

        >>> population = from_arrays({"a": ([[0.0], [1.0]], [0, 1])}).with_validation([[0.5]], [1])
        >>> population.validation
        (tensor([[0.5000]]), tensor([1]))
        """
        first = self._source(self.names[0])
        x, y, spec = validate_pair("the validation set", "", (x, y), split_settings=first.split_settings)
        if not len(x):
            raise PartyError("The validation set is empty. Give it at least one sample, or leave it out.")
        check_same_spec("The validation set", spec, f"party {first.name!r}", expected=first.sample_spec)
        if not spec.y_shape and not spec.y_dtype.is_floating_point:
            unknown = np.setdiff1d(y, self.label_counts()[0])
            if len(unknown):
                raise PartyError(f"The validation set has labels that no party has: {_format_names(unknown.tolist())}.")
        validation_party = PartySource(
            "validation", x, y, test_set=None, split_settings=replace(first.split_settings, test=0.0), sample_spec=spec
        ).build_party()
        return Population(
            self._sources.values(),
            self.note,
            (validation_party.x, validation_party.y),
            joined_after=self.joined_after,
            placeholders=self.placeholders,
        )

    def label_counts(self) -> tuple[Array, NDArray[np.int64]]:
        """Return all labels, and the number of rows per party and label, ``[parties, labels]``."""
        sources = tuple(self._sources.values())
        if sources[0].sample_spec.y_shape or sources[0].sample_spec.y_dtype.is_floating_point:
            raise PartyError(
                f"Only parties whose targets are one whole number per row have labels. Got {sources[0].sample_spec}."
            )
        counts_by_party = [np.unique(source.labels, return_counts=True) for source in sources]
        labels = np.unique(np.concatenate([party_labels for party_labels, _ in counts_by_party]))
        counts = np.zeros((len(counts_by_party), len(labels)), dtype=np.int64)
        for row, (party_labels, party_counts) in zip(counts, counts_by_party, strict=True):
            row[np.searchsorted(labels, party_labels)] = party_counts
        return labels, counts

    def find_invalid_label(self, classes: int) -> str:
        """Return a sentence on the first label that is not below `classes`, or "" if there is none; reads no features.

        >>> from_arrays({"a": ([[0.0], [1.0]], [0, 7])}).find_invalid_label(2)
        "Party 'a' has the label 7 in row 1"
        """
        checked_targets: set[int] = set()  # targets shared by many parties are checked once
        for source in self._sources.values():
            if id(source.y) not in checked_targets and source.y.max() < classes:
                checked_targets.add(id(source.y))
            own_labels = () if id(source.y) in checked_targets else ((source.labels, ""),)
            test_labels = () if source.test_set is None else ((source.test_set[1], " of its test set"),)
            for labels, where in (*own_labels, *test_labels):
                if labels.max(initial=0) >= classes:
                    row = int(np.argmax(labels >= classes))
                    return f"Party {source.name!r} has the label {labels[row]} in row {row}{where}"
        return ""

    def plot(self, file: str | Path) -> Path:
        """Draw the map of parties and classes into a PNG file; return its path."""
        from .population_plot import plot_population

        return plot_population(self, Path(file))

    def describe(self) -> str:
        """Return a readable table: the sizes of each party and its most common label.

        >>> print(from_arrays({"a": ([[0.0], [1.0], [2.0]], [1, 1, 0]), "b": ([[3.0]], [0])}).describe())
        2 parties: 3 samples to train, 1 to test; features (1,) float32, targets () int64
        party    train  test  labels  most common
        a            2     1       2  1 (67 %)
        b            1     0       1  0 (100 %)
        """
        sources = tuple(self._sources.values())
        train = sum(self.samples.values())
        test = sum(source.test_count for source in sources)
        title = f"{len(self)} parties: {train} samples to train, {test} to test; {sources[0].sample_spec}"
        lines = [
            title,
            "party    train  test  labels  most common",
            *(source.table_row() for source in sources[:MAX_LISTED_NAMES]),
        ]
        lines += [f"and {len(self) - MAX_LISTED_NAMES} more"] * (len(self) > MAX_LISTED_NAMES)
        lines += (
            [] if self.validation is None else [f"the server validates on {len(self.validation[0])} samples of its own"]
        )
        return "\n".join([*lines, self.note] if self.note else lines)


def from_arrays(
    data: Mapping[str, Sequence[Any]] | Iterable[Sequence[Any]],
    test: float = 0.2,
    seed: int = 0,
    names: Iterable[str] | None = None,
    dtype: torch.dtype | None = None,
    note: str = "",
    validation: Sequence[Any] | None = None,
) -> Population:
    """Return parties from pairs (x, y), or from (x, y, x_test, y_test) for a party with its own test set.

    Arrays, tensors and nested lists are accepted. From a pair the share `test` is held out, at least one sample of two.
    Float64 features become float32 and integer features become int64, unless `dtype` is given. Labels become int64.
    `validation` is also a pair: the server's own small set (see `Population.with_validation`).

    >>> population = from_arrays([([[0.0], [1.0], [2.0], [3.0]], [0, 1, 0, 1])], test=0.25, names=["north"])
    >>> population["north"]
    Party('north', 3 to train, 1 to test, x (1,))
    """
    split_settings = _split_settings("from_arrays", test, seed, dtype=dtype)
    if isinstance(data, Mapping):
        if names is not None:
            raise PartyError("The keys of a mapping name the parties. Leave names= out, or give a list of pairs.")
        names = data.keys()
        data = data.values()
    entries = list(data)
    party_names = validate_names(list(range(len(entries)) if names is None else names))
    if len(party_names) != len(entries):
        raise PartyError(f"Every party needs one name. There are {len(entries)} parties and {len(party_names)} names.")
    sources = [party_source(name, entry, split_settings) for name, entry in zip(party_names, entries, strict=True)]
    population = _non_empty_population(sources, note)
    first = population._source(population.names[0])
    for name in population:
        check_same_spec(
            f"Party {name!r}", population._source(name).sample_spec, f"party {first.name!r}", expected=first.sample_spec
        )
    if validation is None:
        return population
    if not isinstance(validation, tuple | list) or len(validation) != 2:
        raise PartyError(f"The validation set must be a pair (x, y). Got a {type(validation).__name__}.")
    return population.with_validation(*validation)


def from_rows(
    x: Any,
    y: Any,
    rows: Mapping[str, RowIndices] | Sequence[RowIndices],
    test: float = 0.2,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    prepare: Callable[[int, Array], Array] | None = None,
    note: str = "",
    test_rows: Sequence[RowIndices] | None = None,
) -> Population:
    """Return parties that share one data set: each has some of its rows, for example from :mod:`.partition`.

    The data set is checked once and not copied; the rows of a party are read when the party is requested. Then
    `prepare` is called with the party's index and these rows, for example to scale bytes or to rotate images.
    `test_rows` are the test rows of each party, in the order of the parties, if they are not a share of its own rows.

    >>> population = from_rows([[0.0], [1.0], [2.0]], [0, 1, 1], {"north": np.array([0, 2]), "south": np.array([1])})
    >>> population["north"].x.tolist(), population["north"].x_test.tolist()
    ([[2.0]], [[0.0]])
    """
    split_settings = _split_settings("from_rows", test, seed, dtype=dtype)
    x, y, sample_spec = validate_pair("the data", "", (x, y), split_settings=split_settings)
    if prepare is not None:
        sample_spec = SampleSpec.of(prepare(0, x[:1]), y, dtype)
    rows_by_name = rows if isinstance(rows, Mapping) else {str(k): part for k, part in enumerate(rows)}
    if test_rows is not None and len(test_rows) != len(rows_by_name):
        raise PartyError(
            f"Every party needs its test rows. There are {len(rows_by_name)} parties and {len(test_rows)} sets of "
            "test rows."
        )
    sources = []
    for k, name in enumerate(validate_names(list(rows_by_name))):
        party_rows = _validated_rows(name, rows_by_name[name], len(x))
        party_test_rows = None if test_rows is None else _validated_rows(name, test_rows[k], len(x))
        test_set = None if party_test_rows is None else (x[party_test_rows], y[party_test_rows])
        sources.append(
            PartySource(
                name,
                x,
                y,
                test_set=test_set,
                split_settings=split_settings,
                sample_spec=sample_spec,
                rows=party_rows,
                prepare=prepare and partial(prepare, k),
            )
        )
    return _non_empty_population(sources, note)


def _validated_rows(name: str, rows: RowIndices, row_count: int) -> RowIndices:
    indices = np.asarray(rows)
    if (
        indices.ndim != 1
        or indices.dtype.kind not in "iu"
        or (indices.size and not 0 <= indices.min() <= indices.max() < row_count)
    ):
        raise PartyError(
            f"The rows of party {name!r} must be whole numbers from 0 to {row_count - 1}, in a flat array."
        )
    return indices


def _split_settings(function_name: str, test: float, seed: int, dtype: torch.dtype | None) -> SplitSettings:
    settings = SplitSettings(float(test), int(seed), dtype)
    check_settings(settings, function_name)
    if dtype is not None and not dtype.is_floating_point:
        raise SettingError(
            f"The 'dtype' of {function_name} must be a floating dtype such as torch.float32. Got {dtype}."
        )
    return settings


def _non_empty_population(sources: Sequence[PartySource], note: str) -> Population:
    """Return the parties that have samples; warn about the others."""
    empty = [source.name for source in sources if not source.size]
    if len(empty) == len(sources):
        raise PartyError(f"All {len(empty)} parties are empty: {_format_names(empty)}. At least one needs a sample.")
    if empty:
        warnings.warn(
            f"Parties left out because they have no samples: {_format_names(empty)}.", DescantWarning, stacklevel=3
        )
    return Population((source for source in sources if source.size), note)


def validate_names(raw_names: Sequence[Any]) -> list[str]:
    names = [str(name) for name in raw_names]
    if not names:
        raise PartyError("There must be at least one party. Got none.")
    invalid = [name for name, count in Counter(names).items() if count > 1 or not name]
    if invalid:
        raise PartyError(
            f"Every party needs a unique name that is not empty. Given twice or empty: {_format_names(invalid)}."
        )
    return names


def _format_names(names: Sequence[Any]) -> str:
    return ", ".join(map(repr, names[:MAX_LISTED_NAMES])) + (
        f" and {len(names) - MAX_LISTED_NAMES} more" if len(names) > MAX_LISTED_NAMES else ""
    )
