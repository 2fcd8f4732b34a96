"""Files that a recipe names: they are found from its own folder, and what a run keeps of it does without them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

PATH_KEYS = re.compile(
    r"\.(training|method|methods(\.\d+)?)\.schedule|\.vault\.(folder|key)|\.parties\.(market|file|folder)"
)


def resolve_paths(value: Any, folder: Path, key_path: str = "") -> Any:
    """Tables of a file in that folder, with the paths in them as seen from here.

    >>> located({"work": {"schedule": "who.csv", "lr": 0.1}}, Path("silos"))
    {'work': {'schedule': 'silos/who.csv', 'lr': 0.1}}
    """
    if isinstance(value, Mapping):
        return {key: resolve_paths(one, folder, f"{key_path}.{key}") for key, one in value.items()}
    if isinstance(value, list):
        return [resolve_paths(one, folder, key_path) for one in value]
    return str(folder / value) if _is_path(value, key_path) else value


def inline_paths(value: Any, key_path: str = "", convert_path: Callable[[Path], Path] = Path.absolute) -> Any:
    """The same tables for any folder: a schedule's spans in place of its file, and other paths as ``place`` says."""
    if isinstance(value, Mapping):
        return {key: inline_paths(one, f"{key_path}.{key}", convert_path) for key, one in value.items()}
    if isinstance(value, list):
        return [inline_paths(one, key_path, convert_path) for one in value]
    if not _is_path(value, key_path):
        return value
    return schedule_spans(value) if key_path.endswith(".schedule") else str(convert_path(Path(value)))


def base_name(path: Path) -> Path:
    """What a path is called, wherever it lies."""
    return Path(path.name)


def _is_path(value: Any, key_path: str) -> bool:
    """Whether a value is a path; a market without an ending is known by its name."""
    found = PATH_KEYS.search(key_path)
    named = isinstance(value, str) and found is not None and found.end() == len(key_path)
    return named and (not key_path.endswith(".market") or bool(Path(value).suffix))


def schedule_spans(file: str) -> list[dict[str, Any]]:
    from ..algorithms import Timetable

    return [
        {"party": span.party, "from": span.first, **({} if span.last is None else {"to": span.last})}
        for span in Timetable.read(file).spans
    ]
