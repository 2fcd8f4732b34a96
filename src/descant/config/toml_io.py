"""TOML in both directions: the standard library reads it, and a recipe with its overrides is written again.

>>> print(write({"title": "a", "run": {"rounds": 2}, "methods": [{"algorithm": "fedavg"}]}))
title = "a"
<BLANKLINE>
[run]
rounds = 2
<BLANKLINE>
[[methods]]
algorithm = "fedavg"
<BLANKLINE>
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..errors import SettingError

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def read(text: str, name: str) -> dict[str, Any]:
    """The tables of a text; ``name`` is what messages call it."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SettingError(f"{name} is not TOML: {error}.") from error


def parse_value(text: str) -> Any:
    """One value, as TOML has it; what is no TOML value is a text, so that a word needs no quotes.

    >>> value("[1, 2]"), value("{start = 0.1}"), value("fedavg+"), value("true")
    ([1, 2], {'start': 0.1}, 'fedavg+', True)
    """
    try:
        found = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return found["value"] if len(found) == 1 else text


def write(tables: Mapping[str, Any]) -> str:
    """The text that reads back as these tables: plain values first, then tables, then lists of tables."""
    plain = [f"{format_key(key)} = {format_value(one)}\n" for key, one in tables.items() if not _is_table(one)]
    parts = ["".join(plain)] if plain else []
    for key, one in tables.items():
        if isinstance(one, Mapping):
            parts.append(f"[{format_key(key)}]\n{format_table(one)}")
        elif _is_table(one):
            parts += [f"[[{format_key(key)}]]\n{format_table(each)}" for each in one]
    return "\n".join(parts)


def _is_table(one: Any) -> bool:
    return isinstance(one, Mapping) or (
        isinstance(one, list) and bool(one) and all(isinstance(x, Mapping) for x in one)
    )


def format_table(table: Mapping[str, Any]) -> str:
    return "".join(f"{format_key(key)} = {format_value(one)}\n" for key, one in table.items())


def format_key(key: str) -> str:
    return key if _BARE.fullmatch(key) else quote_text(key)


def quote_text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")  # JSON's escapes are TOML's, but for this


def format_value(one: Any) -> str:
    if isinstance(one, bool):
        return "true" if one else "false"
    if isinstance(one, str):
        return quote_text(one)
    if isinstance(one, float):
        return repr(one) if math.isfinite(one) else str(one)
    if isinstance(one, Mapping):
        return "{" + ", ".join(f"{format_key(key)} = {format_value(part)}" for key, part in one.items()) + "}"
    if isinstance(one, list | tuple):
        return "[" + ", ".join(map(format_value, one)) + "]"
    return str(one)  # whole numbers, dates and times


def merge_tables(base: Mapping[str, Any], override: Mapping[str, Any]) -> dict[str, Any]:
    """Tables with other values put in, table by table; a list takes another's place."""
    found = dict(base)
    for key, value in override.items():
        both = isinstance(value, Mapping) and isinstance(found.get(key), Mapping)
        found[key] = merge_tables(found[key], value) if both else value
    return found


def with_value(tables: Any, path: Sequence[str], value: Any, assignment: str) -> Any:
    """Tables with one value put in; a number in the path counts the entries of a list, from 0."""
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
        raise SettingError(f"{assignment!r}: {first!r} stands below {tables!r:.40}, which is not a table.")
    return {**tables, first: with_value(tables.get(first, {}), rest, value, assignment=assignment)}


def flatten_tables(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted paths and what stands at them."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from flatten_tables(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
