"""The report of a sweep: the effect of joining at each point, with links to the reports of the points."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..errors import StateError
from ..reporting.html import (
    figure_section,
    key_value_table,
    link_list,
    paragraph,
    render_page,
    score_table,
    sentence_list,
)
from ..reporting.table import Table

MANIFEST = "sweep.json"
PICTURE = "sweep.png"
PAGE = "report.html"
_CAPTION = "The mean over parties at every value; the spread is over seeds, and a star marks the paper's number."


def point_name(at: dict[str, Any]) -> str:
    """Return the name of a point, which is also the folder of its study."""
    return " ".join(f"{key}={value}" for key, value in at.items())


def write_sweep(folder: Path) -> tuple[str, Path]:
    """Write report.html from the files in a sweep's folder; return the verdict and the file."""
    try:
        found = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        verdict, text = _page(found, (folder / PICTURE).read_bytes())
        new = folder / f".{PAGE}.new"
        new.write_text(text, encoding="utf-8")
        new.replace(folder / PAGE)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise StateError(f"{folder} cannot be used: {error} ({type(error).__name__}). Run the sweep again.") from error
    return verdict, folder / PAGE


def _page(found: dict[str, Any], picture: bytes) -> tuple[str, str]:
    points = [(point_name(point["at"]), point) for point in found["points"]]
    verdict = _verdict(points)
    methods = [row["method"] for row in points[0][1]["table"]]
    rows = [
        {
            "at": name,
            **{row["method"]: _number(row["mean"]) for row in point["table"]},
            "helped": helpful_methods(point),
        }
        for name, point in points
    ]
    figures = [{**row, "paper": _number(row["paper"]), "ours": _number(row["ours"])} for row in found["figures"]]
    notes = {point["note"] for _, point in points if point["note"]}
    page = render_page(
        found["title"],
        verdict,
        *map(paragraph, [*sorted(notes), found["about"]]),
        figure_section("At a glance", _CAPTION, picture),
        score_table(
            "Value by value",
            Table(("at", *methods, "helped"), rows),
            "The mean over parties and seeds. Helped: the methods with which more parties gained by joining than lost, "
            "and the mean is above training alone.",
        ),
        link_list("The reports", [(f"{name}/{PAGE}", name, point["verdict"]) for name, point in points]),
        score_table("The paper's figures", Table(("the paper says", "where", "paper", "ours"), figures))
        if figures
        else None,
        sentence_list("What it took", [found["cost"]]),
        key_value_table("Made by", [("descant", found["descant"]), ("recipe", found["recipe"])]),
    )
    return verdict, page


def _verdict(points: list[tuple[str, dict[str, Any]]]) -> str:
    helped = [name for name, point in points if point["helped"]]
    if not helped:
        return f"Nothing beat training alone at any of {len(points)} values."
    where = "all" if len(helped) == len(points) else f"{len(helped)} of"
    named = "" if len(helped) == len(points) else f": {'; '.join(helped)}"
    return f"Some method served the parties better than training alone at {where} {len(points)} values{named}."


def helpful_methods(point: dict[str, Any]) -> str:
    return ", ".join(point["helped"]) or "none"


def _number(value: float | None) -> float:
    return float("nan") if value is None else value
