"""The pieces of a page that opens anywhere, without a network; they know nothing of studies, and take any numbers."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable
from dataclasses import replace
from typing import Any
from urllib.parse import quote

from .table import Table


def render_page(title: str, verdict: str, *sections: str) -> str:
    """One HTML page that needs nothing else: a title, the verdict, and sections that are HTML already."""
    body = "\n".join(section for section in sections if section)
    return _PAGE.format(title=html.escape(title), verdict=html.escape(verdict), body=body, style=_STYLE)


def paragraph(text: str) -> str:
    """A sentence or two; nothing where there are none."""
    return f"<p>{html.escape(text)}</p>" if text else ""


def score_table(heading: str, table: Table, note: str = "") -> str:
    """A table of numbers, and how to read it."""
    shown = replace(table, verdict="", notes=())._repr_html_()
    return f'{_h2(heading)}<div class="wide scores">{shown}</div>{paragraph(note)}'


def figure_section(heading: str, caption: str, png: bytes, better_side: str = "above") -> str:
    """A picture, inside the page, with its caption."""
    caption_html = html.escape(caption.format(side=better_side))
    source = f"data:image/png;base64,{base64.b64encode(png).decode('ascii')}"
    image = f'<img alt="{html.escape(heading)}" src="{source}">'
    return f"{_h2(heading)}<figure>{image}<figcaption>{caption_html}</figcaption></figure>"


def sentence_list(heading: str, items_text: Iterable[str]) -> str:
    """A list of sentences; nothing where there are none."""
    items = "".join(f"<li>{html.escape(sentence)}</li>" for sentence in items_text)
    return f"{_h2(heading)}<ul>{items}</ul>" if items else ""


def link_list(heading: str, rows: Iterable[tuple[str, str, str]]) -> str:
    """Other pages: where each is, its name, and what it says."""
    items = "".join(
        f'<li><a href="{html.escape(quote(href), quote=True)}">{html.escape(name)}</a>: {html.escape(says)}</li>'
        for href, name, says in rows
    )
    return f"{_h2(heading)}<ul>{items}</ul>"


def key_value_table(heading: str, rows: Iterable[tuple[str, str]]) -> str:
    """Names and what they stand for."""
    body = "\n".join(f"<tr><th>{html.escape(key)}</th><td>{html.escape(text)}</td></tr>" for key, text in rows)
    return f'{_h2(heading)}<div class="wide"><table><tbody>{body}</tbody></table></div>'


def _h2(heading: str) -> str:
    return f"<h2>{html.escape(heading)}</h2>\n"


_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #59636e; --line: #d5dae0; --paper: #fff; --card: #f4f6f8 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ec; --soft: #a3adb8; --line: #3a424b; --paper: #14181c; --card: #1f252b } }
body { margin: 0 auto; max-width: 60rem; padding: 2rem 1.25rem 4rem; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif }
h1 { font-size: 1.9rem; margin: 0 0 .8rem } h2 { font-size: 1.2rem; margin: 2.2rem 0 .6rem; break-after: avoid }
p.verdict { font-size: 1.2rem; background: var(--card); border-left: 4px solid #0072B2; padding: .9rem 1.1rem;
  margin: 0; color: var(--ink) }
.wide { overflow-x: auto } table { border-collapse: collapse; font-size: .93rem; width: 100% }
th, td { padding: .4rem .7rem; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top }
th { font-weight: 600; white-space: nowrap } thead th { border-bottom-width: 2px } td { overflow-wrap: anywhere;
  white-space: pre-wrap }
.scores th + th, .scores td + td { text-align: right; font-variant-numeric: tabular-nums }
.scores table { font-size: .85rem } .scores th, .scores td { padding: .4rem .45rem }
.scores td { white-space: nowrap } .scores td:first-child { font-weight: 600 } figure { margin: 0; break-inside: avoid }
img { width: 100%; height: auto; background: #fff; border-radius: 6px }
p, figcaption, li { color: var(--soft) } li { margin: .3rem 0 } tr { break-inside: avoid }
@media print { body { max-width: none; padding: 0; font-size: 11pt } }
"""

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>{style}</style></head><body>
<h1>{title}</h1>
<p class="verdict">{verdict}</p>
{body}
</body></html>
"""


def format_setting(value: Any) -> str:
    """A described record as a person would write it.

    >>> phrase({"is": "Sgd", "lr": 0.1, "steps": None, "options": {}})
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
