"""Nothing that can be named is left out where engines are compared; Flower and Ray are not needed to see that."""

from __future__ import annotations

import inspect

import pytest

from descant import algorithms
from descant.training import SOLVERS
from recipe_matrix import (
    ALL_SILO_CASES,
    NOT_IN_RECIPES_REASONS,
    NOT_OVER_SILOS_REASONS,
    SILO_CASES,
    SIMULATION_ONLY_CASES,
    SOLVER_CASES,
    RecipeCase,
)
from toy_problems import ALL_METHODS

NAMED = {*algorithms.ALGORITHMS, *algorithms.WRAPPERS, *SOLVERS}


def names_in(way: RecipeCase) -> set[str]:
    tables = way.recipe.tables
    wraps = [one["wrapper"] for one in tables["method"].get("wrap", [])]
    return {tables["method"]["algorithm"], tables["training"].get("solver", "sgd"), *wraps}


def test_every_method_that_is_public_has_a_name_in_recipes() -> None:
    found = [getattr(algorithms, name) for name in algorithms.__all__]
    made = {one for one in found if inspect.isfunction(one) and one.__annotations__["return"] == "Algorithm"}
    assert made == {*algorithms.ALGORITHMS.values(), *algorithms.WRAPPERS.values()}


def test_every_name_runs_over_real_silos_or_says_why_not() -> None:
    run = set[str]().union(*map(names_in, ALL_SILO_CASES.values()))
    assert run | NOT_OVER_SILOS_REASONS.keys() == NAMED and not run & NOT_OVER_SILOS_REASONS.keys()


def test_every_method_of_the_laws_runs_over_real_silos_or_says_why_not() -> None:
    assert SILO_CASES.keys() & ALL_METHODS.keys() == ALL_METHODS.keys() - NOT_IN_RECIPES_REASONS.keys()


def test_what_is_for_simulations_says_why() -> None:
    assert all(names_in(way) & NOT_OVER_SILOS_REASONS.keys() for way in SIMULATION_ONLY_CASES.values())


def test_every_solver_runs_on_ray() -> None:
    assert SOLVER_CASES.keys() == SOLVERS.keys()


@pytest.mark.parametrize("name", ALL_SILO_CASES | SIMULATION_ONLY_CASES)
def test_a_way_is_a_recipe(name: str) -> None:
    recipe = (ALL_SILO_CASES | SIMULATION_ONLY_CASES)[name].recipe
    assert recipe.algorithm().name and recipe.solver().hyper.lr > 0
