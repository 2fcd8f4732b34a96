"""Where the recipes are: in `papers/` of a checkout, inside the package once it is installed."""

from __future__ import annotations

from pathlib import Path

from ..config import Recipe, read_recipe
from ..core.settings import unknown_name_error

PACKAGED_FOLDER = Path(__file__).parents[1] / "_papers"  # where the wheel has them: see pyproject.toml


def papers_folder() -> Path:
    """The folder that holds one folder a paper."""
    return PACKAGED_FOLDER if PACKAGED_FOLDER.is_dir() else Path(__file__).parents[3] / "papers"


def experiment_keys() -> list[str]:
    """Every experiment, as paper/name.

    >>> "fed_plus/synthetic" in keys()
    True
    """
    return sorted(f"{file.parent.name}/{file.stem}" for file in papers_folder().glob("*/*.toml"))


def load_recipe(key: str) -> Recipe:
    """The recipe of one experiment."""
    if key not in experiment_keys():
        raise unknown_name_error("experiment", key, experiment_keys())
    return read_recipe(papers_folder() / f"{key}.toml")
