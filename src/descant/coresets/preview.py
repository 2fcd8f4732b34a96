"""Which rows of a party would leave it as a coreset: to be looked at before they do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.metrics import has_class_labels
from ..parties.party import Party
from ..reporting.table import Table
from .selection import SelectedCoreset


def coreset_preview(
    party: Party, chosen: SelectedCoreset, dropped_columns: Sequence[int] = (), max_values: int | None = 6
) -> Table:
    """Every row that would leave: its number among the party's training rows, target, weight and so many first values.

    The values are those that leave (None: all of them): 0 in a column that is dropped.

    >>> from descant.parties import Selection, from_arrays
    >>> party = from_arrays({"a": ([[0.0, 9.0], [0.1, 9.0], [0.2, 9.0], [5.0, 9.0]], [0, 0, 0, 1])}, test=0)["a"]
    >>> selection = Selection(count=2, by="k-center", drop=(1,))
    >>> print(preview(party, selection.choose(party, seed=0), selection.drop))
    row  label  weight      0      1
    1        0   3.000  0.100  0.000
    3        1   1.000  5.000  0.000
    2 of the 4 rows of party 'a' would leave (50.0 %).
    - Columns 1 would not leave: 0 stands in their place.
    """
    coreset = chosen.coreset
    label = "label" if has_class_labels(party.y) else "target"
    shown = coreset.x.flatten(1)[:, :max_values]
    columns = [str(column) for column in range(shown.shape[1])]
    rows = []
    for row, y, weight, numbers in zip(chosen.rows, coreset.y, coreset.weights, shown.tolist(), strict=True):
        entry: dict[str, Any] = {"row": int(row), label: y.tolist(), "weight": float(weight)}
        rows.append(entry | dict(zip(columns, numbers, strict=True)))
    m = len(rows)
    n = party.samples
    verdict = f"{m} of the {n} rows of party {party.name!r} would leave ({100 * m / n:.1f} %)."
    return Table(
        ("row", label, "weight", *columns), rows, verdict, notes=tuple(_notes(party, coreset.y, dropped_columns))
    )


def _notes(party: Party, y: Tensor, dropped_columns: Sequence[int]) -> list[str]:
    notes = []
    if dropped_columns:
        notes.append(
            f"Columns {', '.join(map(str, sorted(dropped_columns)))} would not leave: 0 stands in their place."
        )
    if has_class_labels(y):
        missing = sorted(set(torch.unique(party.y).tolist()) - set(torch.unique(y).tolist()))
        if missing:
            notes.append(f"Nothing would stand for the labels {', '.join(map(str, missing))}, which the party has.")
    return notes
