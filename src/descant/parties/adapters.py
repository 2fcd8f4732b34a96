"""Data sets of other libraries as arrays: torch and Hugging Face, recognized by their interface."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from torch.utils.data import TensorDataset

from ..core.settings import unknown_name_error
from ..errors import PartyError
from .party import Array, as_array


def arrays_of(dataset: Any, x: str | None = None, y: str = "label") -> tuple[Array, Array]:
    """Return features and labels of a torch Dataset or a Hugging Face data set.

    A torch Dataset is anything with a length whose items are pairs. A Hugging Face data set has columns; `x` and `y`
    name two of them (``pip install 'descant[hf]'``). All items are read into memory, with the data set's transforms.

    >>> import torch
    >>> x, y = arrays_of(TensorDataset(torch.zeros(3, 2), torch.tensor([0, 1, 0])))
    >>> x.shape, y.tolist()
    ((3, 2), [0, 1, 0])
    """
    if hasattr(dataset, "column_names"):
        return _from_columns(dataset, x, y)
    if isinstance(dataset, TensorDataset) and len(dataset.tensors) == 2:
        features, labels = dataset.tensors
        return as_array(features, "The features"), as_array(labels, "The labels")
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise PartyError(f"Give a data set with a length and items, not a stream. Got a {type(dataset).__name__}.")
    items = [dataset[row] for row in range(len(dataset))]
    for row, item in enumerate(items):
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise PartyError(f"Item {row} of the data set must be a pair (x, y). Got a {type(item).__name__}.")
    return _stack_rows("features", (item[0] for item in items)), _stack_rows("labels", (item[1] for item in items))


def _from_columns(dataset: Any, x: str | None, y: str) -> tuple[Array, Array]:
    if isinstance(dataset.column_names, Mapping):
        splits = ", ".join(map(repr, dataset.column_names))
        raise PartyError(f"This data set has parts: {splits}. Give one of them, such as dataset['train'].")
    for name in (x, y):
        if name not in dataset.column_names:
            raise unknown_name_error("column", str(name), dataset.column_names)
    return _stack_rows(f"column {x!r}", dataset[x]), _stack_rows(f"column {y!r}", dataset[y])


def _stack_rows(label: str, values: Iterable[Any]) -> Array:
    """Return one array from many of equal shape: numbers, lists, tensors or images."""
    rows = [np.asarray(value) for value in values]
    for row, values_of_row in enumerate(rows):
        if values_of_row.dtype.kind not in "fiub" or values_of_row.shape != rows[0].shape:
            raise PartyError(
                f"Row {row} of the {label} has shape {values_of_row.shape} of {values_of_row.dtype}; expected numbers "
                f"of shape {rows[0].shape}, like row 0. Give all rows the same shape."
            )
    if not rows:
        raise PartyError(f"The data set has no rows in its {label}.")
    return np.stack(rows)
