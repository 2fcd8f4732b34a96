"""Pages escape every value and need no other file; tables print every column anywhere."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

from descant.papers.sweep_report import MANIFEST, PICTURE, write_sweep
from descant.reporting.html import (
    Section,
    figure_section,
    key_value_table,
    link_list,
    paragraph,
    render_page,
    score_table,
    sentence_list,
)
from descant.reporting.table import Table

NASTY = "<script>alert(\"x\")</script><img src=x onerror='y'>&{{ 7*7 }}"
ESCAPED = "&lt;script&gt;alert(&#34;x&#34;)&lt;/script&gt;&lt;img src=x onerror=&#39;y&#39;&gt;&amp;{{ 7*7 }}"


def nasty_table() -> Table:
    return Table((NASTY,), [{NASTY: NASTY}], NASTY, notes=(NASTY,))


SECTIONS = {
    "paragraph": (paragraph(NASTY), 1),
    "table": (score_table(NASTY, nasty_table(), NASTY), 4),
    "figure": (figure_section(NASTY, NASTY.replace("{", "").replace("}", ""), b"png"), 2),
    "sentences": (sentence_list(NASTY, [NASTY, NASTY]), 3),
    "links": (link_list(NASTY, [("javascript:alert(1)//\"'<b>", NASTY, NASTY)]), 3),
    "pairs": (key_value_table(NASTY, [(NASTY, NASTY)]), 3),
}


@pytest.mark.parametrize("kind", SECTIONS)
def test_every_section_escapes_every_value(kind: str) -> None:
    section, count = SECTIONS[kind]
    text = render_page("title", "verdict", section)
    assert "<script" not in text and "onerror='" not in text and "javascript:" not in text
    if kind == "figure":  # its caption is a format string without the braces
        assert text.count("&lt;script&gt;") == count + 1  # the heading is also the alternative text
    else:
        assert text.count(ESCAPED) == count


def test_title_verdict_and_notebook_tables_are_escaped() -> None:
    assert render_page(NASTY, NASTY).count(ESCAPED) == 3  # the title is also the first heading
    assert nasty_table()._repr_html_().count(ESCAPED) == 4
    assert "<script" not in nasty_table()._repr_html_()


def test_values_of_a_sweep_are_escaped(tmp_path: Path) -> None:
    point = {"at": {"parties.count": NASTY}, "verdict": NASTY, "note": NASTY, "helped": [NASTY]}
    point["table"] = [{"method": NASTY, "mean": None}]
    figure = {"the paper says": NASTY, "where": NASTY, "paper": None, "ours": 0.5}
    sweep = dict.fromkeys(("title", "about", "cost", "descant", "recipe"), NASTY)
    (tmp_path / MANIFEST).write_text(json.dumps({**sweep, "points": [point], "figures": [figure]}))
    (tmp_path / PICTURE).write_bytes(b"png")
    _, page = write_sweep(tmp_path)
    assert "<script" not in page.read_text("utf-8") and page.read_text("utf-8").count("&lt;script&gt;") >= 12


def test_empty_sections_are_left_out() -> None:
    assert paragraph("") is None and sentence_list("heading", []) is None
    assert render_page("t", "v", None, paragraph("")) == render_page("t", "v")


def test_an_undefined_value_in_a_template_raises() -> None:
    with pytest.raises(Exception, match="parameter 'text' was not provided"):
        render_page("t", "v", Section("paragraph", {}))


def test_templates_are_files_of_the_package() -> None:
    folder = files("descant.reporting") / "templates"
    assert {"page.html.j2", "sections.html.j2", "page.css"} <= {file.name for file in folder.iterdir()}


def test_a_table_prints_whole_names_without_markup_or_color(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("FORCE_COLOR", "1")
    name = "[red]a party[/red] :smile: " + "x" * 300
    rows = [{"party": name, "score": 0.5, "rounds": 3}, {"party": "b", "score": float("nan"), "rounds": None}]
    table = Table(("party", "score", "rounds"), rows, "A verdict.", decimals={"score": 1}, notes=("A note.",))
    head, first, second, *below = str(table).splitlines()
    assert head.split() == ["party", "score", "rounds"] and below == ["A verdict.", "- A note."]
    assert first == f"{name}    0.5       3" and second.split() == ["b", "–", "–"]
    assert len(head) == len(first) == len(second)
    assert "\x1b" not in str(table) and "…" not in str(table)


def test_wide_characters_keep_columns_aligned() -> None:
    text = str(Table(("party", "score"), [{"party": "漢字", "score": 0.5}, {"party": "abcd", "score": 0.5}]))
    assert text == "party  score\n漢字   0.500\nabcd   0.500"


def test_rich_and_jinja2_are_imported_on_first_use() -> None:
    code = (
        "import sys; from descant.reporting import html, table; import descant.cli; "
        "print([name for name in ('jinja2', 'rich') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
