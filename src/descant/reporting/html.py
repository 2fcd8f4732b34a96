"""HTML pages from templates: one file each, which opens anywhere without a network.

A page is a title, a verdict and sections. Sections hold plain values; the templates in ``templates/`` escape them all.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from .table import Table

if TYPE_CHECKING:
    from jinja2 import Environment


@dataclass(frozen=True)
class Section:
    """One part of a page: a macro of ``sections.html.j2`` and its arguments, as plain text and numbers."""

    kind: str
    values: Mapping[str, Any]


@cache
def template_environment() -> Environment:
    """Return the templates of this package, with automatic escaping."""
    from jinja2 import Environment, PackageLoader, StrictUndefined  # here, because only a written page needs it

    loader = PackageLoader("descant.reporting")
    return Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True
    )


def render_page(title: str, verdict: str, *sections: Section | None) -> str:
    """Return one HTML page that needs no other file; None stands for a section without content."""
    shown = [section for section in sections if section is not None]
    page = template_environment().get_template("page.html.j2")
    return page.render(title=title, verdict=verdict, sections=shown)


def table_html(table: Table) -> str:
    """Return a table with its verdict and notes as an HTML fragment."""
    macros: Any = template_environment().get_template("sections.html.j2").module
    return str(macros.table(table.columns, table.format_rows(), table.verdict, table.notes))


def paragraph(text: str) -> Section | None:
    """Return a paragraph; None if the text is empty."""
    return Section("paragraph", {"text": text}) if text else None


def score_table(heading: str, table: Table, note: str = "") -> Section:
    """Return a table of numbers with a note on how to read it; the table's own verdict and notes are left out."""
    return Section(
        "score_table", {"heading": heading, "columns": table.columns, "rows": table.format_rows(), "note": note}
    )


def figure_section(heading: str, caption: str, png: bytes, better_side: str = "above") -> Section:
    """Return a picture, embedded in the page, with its caption."""
    encoded = base64.b64encode(png).decode("ascii")
    return Section("figure", {"heading": heading, "caption": caption.format(side=better_side), "png": encoded})


def sentence_list(heading: str, sentences: Iterable[str]) -> Section | None:
    """Return a bullet list of sentences; None if there are none."""
    items = tuple(sentences)
    return Section("sentence_list", {"heading": heading, "sentences": items}) if items else None


def link_list(heading: str, rows: Iterable[tuple[str, str, str]]) -> Section:
    """Return a list of links; each row is a relative address, a name and a description."""
    links = tuple((quote(href), name, text) for href, name, text in rows)
    return Section("link_list", {"heading": heading, "links": links})


def key_value_table(heading: str, rows: Iterable[tuple[str, str]]) -> Section:
    """Return a table of two columns, names and values."""
    return Section("key_value_table", {"heading": heading, "rows": tuple(rows)})


def format_setting(value: Any) -> str:
    """Return a setting of a JSON record as a short phrase.

    >>> format_setting({"is": "Sgd", "lr": 0.1, "steps": None, "options": {}})
    'Sgd(lr=0.1)'
    """
    if isinstance(value, dict):
        parts = [
            f"{key}={format_setting(part)}" for key, part in value.items() if key != "is" and part not in (None, {}, [])
        ]
        return f"{value.get('is', '')}({', '.join(parts)})" if parts else str(value.get("is", "–"))
    if isinstance(value, list):
        return ", ".join(format_setting(part) for part in value) or "none"
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
