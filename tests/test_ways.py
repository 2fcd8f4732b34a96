"""Nothing that can be named is left out where engines are compared; Flower and Ray are not needed to see that."""

from __future__ import annotations

import inspect

import pytest

from descant import algorithms
from descant.training import SOLVERS
from problems import EVERY
from ways import EVERY_WAY, NOT_BY_RECIPE, NOT_OVER_SILOS, SIMULATED, SOLVED, WAYS, Way

NAMED = {*algorithms.ALGORITHMS, *algorithms.WRAPPERS, *SOLVERS}


def names_in(way: Way) -> set[str]:
    tables = way.recipe.tables
    wraps = [one["by"] for one in tables["method"].get("wrap", [])]
    return {tables["method"]["algorithm"], tables["work"].get("solver", "sgd"), *wraps}


def test_every_method_that_is_public_has_a_name_in_recipes() -> None:
    found = [getattr(algorithms, name) for name in algorithms.__all__]
    made = {one for one in found if inspect.isfunction(one) and one.__annotations__["return"] == "Algorithm"}
    assert made == {*algorithms.ALGORITHMS.values(), *algorithms.WRAPPERS.values()}


def test_every_name_runs_over_real_silos_or_says_why_not() -> None:
    run = set[str]().union(*map(names_in, EVERY_WAY.values()))
    assert run | NOT_OVER_SILOS.keys() == NAMED and not run & NOT_OVER_SILOS.keys()


def test_every_method_of_the_laws_runs_over_real_silos_or_says_why_not() -> None:
    assert WAYS.keys() & EVERY.keys() == EVERY.keys() - NOT_BY_RECIPE.keys()


def test_what_is_for_simulations_says_why() -> None:
    assert all(names_in(way) & NOT_OVER_SILOS.keys() for way in SIMULATED.values())


def test_every_solver_runs_on_ray() -> None:
    assert SOLVED.keys() == SOLVERS.keys()


@pytest.mark.parametrize("name", EVERY_WAY | SIMULATED)
def test_a_way_is_a_recipe(name: str) -> None:
    recipe = (EVERY_WAY | SIMULATED)[name].recipe
    assert recipe.algorithm().name and recipe.solver().hyper.lr > 0
