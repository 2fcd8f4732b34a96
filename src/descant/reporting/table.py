"""A small table: records for programs, aligned text for people, HTML for pages."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..storage.event_log import replace_non_finite


@dataclass(frozen=True)
class Table:
    """Rows under named columns, with sentences below them.

    >>> print(Table(("party", "own"), [{"party": "a", "own": 0.5}], "1 of 1 gained."))
    party   own
    a      0.500
    1 of 1 gained.
    """

    columns: tuple[str, ...]
    rows: Sequence[Mapping[str, Any]]
    verdict: str = ""
    decimals: Mapping[str, int] = field(default_factory=dict)  # decimals of a column, where they are not 3
    notes: tuple[str, ...] = ()  # what else should be known, a sentence each

    def __str__(self) -> str:
        cells = [list(self.columns), *(self._format_row(row) for row in self.rows)]
        widths = [max(len(line[i]) for line in cells) for i in range(len(self.columns))]
        lines = [
            "  ".join(_pad(cell, width, i) for i, (cell, width) in enumerate(zip(line, widths, strict=True)))
            for line in cells
        ]
        below = [self.verdict] if self.verdict else []
        return "\n".join([*(line.rstrip() for line in lines), *below, *(f"- {note}" for note in self.notes)])

    def to_json_rows(self) -> list[dict[str, Any]]:
        """The rows as JSON has them: there are no nan and no infinities in it."""
        return [replace_non_finite(row) for row in self.rows]

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{html.escape(name)}</th>" for name in self.columns)
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(text)}</td>" for text in self._format_row(row)) + "</tr>"
            for row in self.rows
        )
        verdict = f"<p>{html.escape(self.verdict)}</p>" if self.verdict else ""
        notes = "".join(f"<li>{html.escape(note)}</li>" for note in self.notes)
        below = verdict + (f"<ul>{notes}</ul>" if notes else "")
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{below}"

    def _format_row(self, row: Mapping[str, Any]) -> list[str]:
        return [format_cell(row.get(name), self.decimals.get(name, 3)) for name in self.columns]


def format_cell(value: Any, decimals: int) -> str:
    if isinstance(value, float):
        return "–" if value != value else f"{value:.{decimals}f}"
    return "–" if value is None else str(value)


def _pad(cell: str, width: int, column: int) -> str:
    return cell.ljust(width) if column == 0 else cell.rjust(width)
