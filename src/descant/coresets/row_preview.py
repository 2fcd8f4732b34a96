"""Preview of the rows that would leave a party as its coreset."""

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
    """Return a table of the rows that would leave: row number, target, weight and the first `max_values` values.

    The values are those that would leave (None: all of them), with 0 in a dropped column.

    >>> from descant.parties import Selection, from_arrays
    >>> party = from_arrays({"a": ([[0.0, 9.0], [0.1, 9.0], [0.2, 9.0], [5.0, 9.0]], [0, 0, 0, 1])}, test=0)["a"]
    >>> selection = Selection(count=2, method="k-center", drop_columns=(1,))
    >>> print(coreset_preview(party, selection.choose(party, seed=0), selection.drop_columns))
    row  label  weight      0      1
    1        0   3.000  0.100  0.000
    3        1   1.000  5.000  0.000
    2 of the 4 rows of party 'a' would leave (50.0 %).
    - Columns 1 would not leave: they are 0 in the coreset.
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
        names = ", ".join(map(str, sorted(dropped_columns)))
        notes.append(f"Columns {names} would not leave: they are 0 in the coreset.")
    if has_class_labels(y):
        missing = sorted(set(torch.unique(party.y).tolist()) - set(torch.unique(y).tolist()))
        if missing:
            notes.append(f"The coreset would lack the labels {', '.join(map(str, missing))}, which the party has.")
    return notes
