"""File paths in recipes: relative to the recipe's folder, and inlined or absolute in a stored recipe."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

PATH_KEYS = re.compile(
    r"\.(training|method|methods(\.\d+)?)\.schedule|\.vault\.(folder|key)|\.parties\.(market|file|folder)"
)


def resolve_paths(value: Any, folder: Path, key_path: str = "") -> Any:
    """Return the tables with the paths in them joined to the folder of their file.

    >>> resolve_paths({"training": {"schedule": "presence.csv", "lr": 0.1}}, Path("silos"))
    {'training': {'schedule': 'silos/presence.csv', 'lr': 0.1}}
    """
    if isinstance(value, Mapping):
        return {key: resolve_paths(one, folder, f"{key_path}.{key}") for key, one in value.items()}
    if isinstance(value, list):
        return [resolve_paths(one, folder, key_path) for one in value]
    return str(folder / value) if _is_path(value, key_path) else value


def inline_paths(value: Any, key_path: str = "", convert_path: Callable[[Path], Path] = Path.absolute) -> Any:
    """Return tables that do not depend on a folder: a schedule becomes its spans, other paths are converted."""
    if isinstance(value, Mapping):
        return {key: inline_paths(one, f"{key_path}.{key}", convert_path) for key, one in value.items()}
    if isinstance(value, list):
        return [inline_paths(one, key_path, convert_path) for one in value]
    if not _is_path(value, key_path):
        return value
    return schedule_spans(value) if key_path.endswith(".schedule") else str(convert_path(Path(value)))


def base_name(path: Path) -> Path:
    """Return the last part of a path."""
    return Path(path.name)


def _is_path(value: Any, key_path: str) -> bool:
    """Return whether a value is a path; a market without a file extension is a name."""
    match = PATH_KEYS.search(key_path)
    has_path_key = isinstance(value, str) and match is not None and match.end() == len(key_path)
    return has_path_key and (not key_path.endswith(".market") or bool(Path(value).suffix))


def schedule_spans(file: str) -> list[dict[str, Any]]:
    from ..algorithms import Timetable

    return [
        {"party": span.party, "from": span.first, **({} if span.last is None else {"to": span.last})}
        for span in Timetable.read(file).spans
    ]
