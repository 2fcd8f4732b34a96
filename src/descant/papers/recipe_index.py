"""Location of the recipes: `papers/` in a checkout, inside the package once it is installed."""

from __future__ import annotations

from pathlib import Path

from ..config import Recipe, read_recipe
from ..core.settings import unknown_name_error

PACKAGED_FOLDER = Path(__file__).parents[1] / "_papers"  # in the wheel: see pyproject.toml


def papers_folder() -> Path:
    """Return the folder that holds one folder a paper."""
    return PACKAGED_FOLDER if PACKAGED_FOLDER.is_dir() else Path(__file__).parents[3] / "papers"


def experiment_keys() -> list[str]:
    """Return the keys of all experiments, as paper/name.

    >>> "fed_plus/synthetic" in experiment_keys()
    True
    """
    return sorted(f"{file.parent.name}/{file.stem}" for file in papers_folder().glob("*/*.toml"))


def load_recipe(key: str) -> Recipe:
    """Return the recipe of one experiment."""
    if key not in experiment_keys():
        raise unknown_name_error("experiment", key, experiment_keys())
    return read_recipe(papers_folder() / f"{key}.toml")
