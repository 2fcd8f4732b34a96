"""TOML in both directions, and changes of nested tables by dotted paths.

>>> print(write({"title": "a", "run": {"rounds": 2}}))
title = "a"
<BLANKLINE>
[run]
rounds = 2
<BLANKLINE>
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tomli_w

from ..errors import SettingError


def read(text: str, name: str) -> dict[str, Any]:
    """Return the tables of a TOML text; messages call it ``name``."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SettingError(f"{name} is not TOML: {error}.") from error


def parse_value(text: str) -> Any:
    """Parse one TOML value; a text that is not TOML is a string, so that a word needs no quotes.

    >>> parse_value("[1, 2]"), parse_value("{start = 0.1}"), parse_value("fedavg+"), parse_value("true")
    ([1, 2], {'start': 0.1}, 'fedavg+', True)
    """
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return parsed["value"] if len(parsed) == 1 else text


def write(tables: Mapping[str, Any]) -> str:
    """Return the TOML text that reads back as these tables."""
    return tomli_w.dumps(tables)


def merge_tables(base: Mapping[str, Any], override: Mapping[str, Any]) -> dict[str, Any]:
    """Merge tables recursively; a list in ``override`` replaces the whole list in ``base``."""
    merged = dict(base)
    for key, value in override.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = merge_tables(merged[key], value) if both else value
    return merged


def with_value(tables: Any, path: Sequence[str], value: Any, assignment: str) -> Any:
    """Return the tables with one value replaced; a number in the path is an index into a list."""
    if not path:
        return value
    first = path[0]
    rest = path[1:]
    if isinstance(tables, list):
        if not first.isdecimal() or int(first) >= len(tables):
            raise SettingError(f"{assignment!r}: {first!r} must be a number from 0 to {len(tables) - 1}.")
        at = int(first)
        return [*tables[:at], with_value(tables[at], rest, value, assignment=assignment), *tables[at + 1 :]]
    if not isinstance(tables, Mapping):
        raise SettingError(f"{assignment!r}: {first!r} is a key of {tables!r:.40}, which is not a table.")
    return {**tables, first: with_value(tables.get(first, {}), rest, value, assignment=assignment)}


def flatten_tables(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted path and the value of every leaf."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from flatten_tables(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
