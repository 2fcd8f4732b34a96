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


def value(text: str) -> Any:
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
    plain = [f"{_key(key)} = {_spelled(one)}\n" for key, one in tables.items() if not _is_table(one)]
    parts = ["".join(plain)] if plain else []
    for key, one in tables.items():
        if isinstance(one, Mapping):
            parts.append(f"[{_key(key)}]\n{_lines(one)}")
        elif _is_table(one):
            parts += [f"[[{_key(key)}]]\n{_lines(each)}" for each in one]
    return "\n".join(parts)


def _is_table(one: Any) -> bool:
    return isinstance(one, Mapping) or (
        isinstance(one, list) and bool(one) and all(isinstance(x, Mapping) for x in one)
    )


def _lines(table: Mapping[str, Any]) -> str:
    return "".join(f"{_key(key)} = {_spelled(one)}\n" for key, one in table.items())


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else _text(key)


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")  # JSON's escapes are TOML's, but for this


def _spelled(one: Any) -> str:
    if isinstance(one, bool):
        return "true" if one else "false"
    if isinstance(one, str):
        return _text(one)
    if isinstance(one, float):
        return repr(one) if math.isfinite(one) else str(one)
    if isinstance(one, Mapping):
        return "{" + ", ".join(f"{_key(key)} = {_spelled(part)}" for key, part in one.items()) + "}"
    if isinstance(one, list | tuple):
        return "[" + ", ".join(map(_spelled, one)) + "]"
    return str(one)  # whole numbers, dates and times


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Tables with other values put in, table by table; a list takes another's place."""
    found = dict(below)
    for key, value in above.items():
        both = isinstance(value, Mapping) and isinstance(found.get(key), Mapping)
        found[key] = merged(found[key], value) if both else value
    return found


def assigned(tables: Any, path: Sequence[str], value: Any, told: str) -> Any:
    """Tables with one value put in; a number in the path counts the entries of a list, from 0."""
    if not path:
        return value
    first, rest = path[0], path[1:]
    if isinstance(tables, list):
        if not first.isdecimal() or int(first) >= len(tables):
            raise SettingError(f"{told!r}: {first!r} must be a number from 0 to {len(tables) - 1}.")
        at = int(first)
        return [*tables[:at], assigned(tables[at], rest, value, told), *tables[at + 1 :]]
    if not isinstance(tables, Mapping):
        raise SettingError(f"{told!r}: {first!r} stands below {tables!r:.40}, which is not a table.")
    return {**tables, first: assigned(tables.get(first, {}), rest, value, told)}


def flat(table: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted paths and what stands at them."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value
