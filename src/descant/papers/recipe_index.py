"""Where the recipes are: in `papers/` of a checkout, inside the package once it is installed."""

from __future__ import annotations

from pathlib import Path

from ..config import Recipe, read
from ..core.settings import unknown

PACKED = Path(__file__).parents[1] / "_papers"  # where the wheel has them: see pyproject.toml


def home() -> Path:
    """The folder that holds one folder a paper."""
    return PACKED if PACKED.is_dir() else Path(__file__).parents[3] / "papers"


def keys() -> list[str]:
    """Every experiment, as paper/name.

    >>> "fed_plus/synthetic" in keys()
    True
    """
    return sorted(f"{file.parent.name}/{file.stem}" for file in home().glob("*/*.toml"))


def recipe_of(key: str) -> Recipe:
    """The recipe of one experiment."""
    if key not in keys():
        raise unknown("experiment", key, keys())
    return read(home() / f"{key}.toml")
