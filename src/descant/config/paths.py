"""Files that a recipe names: they are found from its own folder, and what a run keeps of it does without them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_NAMED = re.compile(r"\.(work|method|methods(\.\d+)?)\.schedule|\.vault\.(folder|key)")


def located(value: Any, folder: Path, name: str = "") -> Any:
    """Tables of a file in that folder, with the paths in them as seen from here.

    >>> located({"work": {"schedule": "who.csv", "lr": 0.1}}, Path("silos"))
    {'work': {'schedule': 'silos/who.csv', 'lr': 0.1}}
    """
    if isinstance(value, Mapping):
        return {key: located(one, folder, f"{name}.{key}") for key, one in value.items()}
    if isinstance(value, list):
        return [located(one, folder, name) for one in value]
    return str(folder / value) if isinstance(value, str) and _names_a_path(name) else value


def self_contained(value: Any, name: str = "") -> Any:
    """The same tables for any folder: the spans of a schedule in place of its file, and the whole path of a vault."""
    if isinstance(value, Mapping):
        return {key: self_contained(one, f"{name}.{key}") for key, one in value.items()}
    if isinstance(value, list):
        return [self_contained(one, name) for one in value]
    if not isinstance(value, str) or not _names_a_path(name):
        return value
    return _spans(value) if name.endswith(".schedule") else str(Path(value).absolute())


def _names_a_path(name: str) -> bool:
    found = _NAMED.search(name)
    return found is not None and found.end() == len(name)


def _spans(file: str) -> list[dict[str, Any]]:
    from ..algorithms import Timetable

    return [
        {"party": span.party, "from": span.first, **({} if span.last is None else {"to": span.last})}
        for span in Timetable.read(file).spans
    ]
