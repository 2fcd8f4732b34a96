"""The parts of a recipe and their form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..core.settings import unknown_name_error
from ..errors import SettingError
from . import toml_io
from .arguments import matches_type
from .sections import check_tables as tables_in

VERSION = 1
TABLES = ("run", "parties", "model", "training", "method", "vault", "quick", "sweep")
LISTS = ("wrap", "methods", "paper")
NAMES = ("version", "title", "about", *LISTS, *TABLES)


def check_shape(tables: Mapping[str, Any], name: str) -> None:
    """Raise unless these are the tables of a recipe of a known version."""
    version = tables.get("version", VERSION)
    if not matches_type(version, int) or version < 1:
        raise SettingError(f"The 'version' of {name} must be a whole number >= 1. Got {version!r}.")
    if version > VERSION:
        raise SettingError(
            f"{name} is a recipe of version {version}, and this Descant reads version {VERSION} and older ones. "
            "Install a newer Descant."
        )
    for key, value in tables.items():
        if key not in NAMES:
            raise unknown_name_error(f"part of {name}", key, NAMES)
        if key in TABLES and not isinstance(value, Mapping):
            raise SettingError(f"[{key}] of {name} must be a table. Got {value!r:.80}.")
        if key in LISTS:
            tables_in(value, f"[[{key}]] of {name}")
    check_quick_and_sweep(tables)


def check_quick_and_sweep(tables: Mapping[str, Any]) -> None:
    """Raise unless [quick] has only parts of a recipe, and every value of [sweep] is a non-empty list."""
    parts = [name for name in (*TABLES, "methods", "wrap") if name != "quick"]
    for key in tables.get("quick", {}):
        if key not in parts:
            raise unknown_name_error("part of [quick]", key, parts)
    for path, values in toml_io.flatten_tables(tables.get("sweep", {})):
        if not isinstance(values, list) or not values:
            raise SettingError(f"The {path!r} of [sweep] must be a list of values. Got {values!r:.80}.")
