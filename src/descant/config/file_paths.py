"""Files that a recipe names: they are found from its own folder, and what a run keeps of it does without them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_NAMED = re.compile(r"\.(work|method|methods(\.\d+)?)\.schedule|\.vault\.(folder|key)|\.parties\.(market|file|folder)")


def located(value: Any, folder: Path, name: str = "") -> Any:
    """Tables of a file in that folder, with the paths in them as seen from here.

    >>> located({"work": {"schedule": "who.csv", "lr": 0.1}}, Path("silos"))
    {'work': {'schedule': 'silos/who.csv', 'lr': 0.1}}
    """
    if isinstance(value, Mapping):
        return {key: located(one, folder, f"{name}.{key}") for key, one in value.items()}
    if isinstance(value, list):
        return [located(one, folder, name) for one in value]
    return str(folder / value) if _is_path(value, name) else value


def self_contained(value: Any, name: str = "", place: Callable[[Path], Path] = Path.absolute) -> Any:
    """The same tables for any folder: a schedule's spans in place of its file, and other paths as ``place`` says."""
    if isinstance(value, Mapping):
        return {key: self_contained(one, f"{name}.{key}", place) for key, one in value.items()}
    if isinstance(value, list):
        return [self_contained(one, name, place) for one in value]
    if not _is_path(value, name):
        return value
    return _spans(value) if name.endswith(".schedule") else str(place(Path(value)))


def last_part(path: Path) -> Path:
    """What a path is called, wherever it lies."""
    return Path(path.name)


def _is_path(value: Any, name: str) -> bool:
    """Whether a value is a path; a market without an ending is known by its name."""
    found = _NAMED.search(name)
    named = isinstance(value, str) and found is not None and found.end() == len(name)
    return named and (not name.endswith(".market") or bool(Path(value).suffix))


def _spans(file: str) -> list[dict[str, Any]]:
    from ..algorithms import Timetable

    return [
        {"party": span.party, "from": span.first, **({} if span.last is None else {"to": span.last})}
        for span in Timetable.read(file).spans
    ]
