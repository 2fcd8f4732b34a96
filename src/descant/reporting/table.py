"""Tables: records for programs, aligned text for terminals, HTML for pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..storage.event_log import replace_non_finite

if TYPE_CHECKING:
    from rich.table import Table as RichTable

TEXT_WIDTH = 100_000  # wider than any table, so that nothing is wrapped or cut, in a pipe as in a terminal


@dataclass(frozen=True)
class Table:
    """Rows under named columns, with sentences below them.

    >>> print(Table(("party", "personal"), [{"party": "a", "personal": 0.5}], "1 of 1 gained."))
    party  personal
    a         0.500
    1 of 1 gained.
    """

    columns: tuple[str, ...]
    rows: Sequence[Mapping[str, Any]]
    verdict: str = ""
    decimals: Mapping[str, int] = field(default_factory=dict)  # decimals of a column, where they are not 3
    notes: tuple[str, ...] = ()  # further remarks, one sentence each

    def __str__(self) -> str:
        from rich.console import Console  # here, because only a printed table needs it

        plain = Console(width=TEXT_WIDTH, color_system=None, force_terminal=False, force_jupyter=False)
        with plain.capture() as capture:
            plain.print(self, crop=False)
        lines = [line.rstrip() for line in capture.get().splitlines()]
        below = [self.verdict] if self.verdict else []
        return "\n".join([*lines, *below, *(f"- {note}" for note in self.notes)])

    def __rich__(self) -> RichTable:
        """Return the columns and rows for rich; cells are literal text without markup."""
        from rich.table import Table as RichTable
        from rich.text import Text

        shown = RichTable(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
        for index, name in enumerate(self.columns):
            shown.add_column(Text(name), justify="right" if index else "left", no_wrap=True)
        for row in self.format_rows():
            shown.add_row(*map(Text, row))
        return shown

    def to_json_rows(self) -> list[dict[str, Any]]:
        """Return the rows with None for nan and infinities, which JSON does not have."""
        return [replace_non_finite(row) for row in self.rows]

    def format_rows(self) -> list[list[str]]:
        """Return the printed text of every cell, row by row."""
        return [[format_cell(row.get(name), self.decimals.get(name, 3)) for name in self.columns] for row in self.rows]

    def _repr_html_(self) -> str:
        from .html import table_html

        return table_html(self)


def format_cell(value: Any, decimals: int) -> str:
    if isinstance(value, float):
        return "–" if value != value else f"{value:.{decimals}f}"
    return "–" if value is None else str(value)
