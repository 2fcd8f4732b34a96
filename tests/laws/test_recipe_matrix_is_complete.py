"""Completeness of the recipe matrix that compares engines; runs without Flower and Ray."""

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


def names_in(case: RecipeCase) -> set[str]:
    tables = case.recipe.tables
    wraps = [one["wrapper"] for one in tables["method"].get("wrap", [])]
    return {tables["method"]["algorithm"], tables["training"].get("solver", "sgd"), *wraps}


def test_every_public_method_has_a_recipe_name() -> None:
    public = [getattr(algorithms, name) for name in algorithms.__all__]
    methods = {one for one in public if inspect.isfunction(one) and one.__annotations__["return"] == "Algorithm"}
    assert methods == {*algorithms.ALGORITHMS.values(), *algorithms.WRAPPERS.values()}


def test_every_name_runs_over_silos_or_has_a_reason_why_not() -> None:
    run = set[str]().union(*map(names_in, ALL_SILO_CASES.values()))
    assert run | NOT_OVER_SILOS_REASONS.keys() == NAMED and not run & NOT_OVER_SILOS_REASONS.keys()


def test_every_method_of_the_laws_runs_over_silos_or_has_a_reason_why_not() -> None:
    assert SILO_CASES.keys() & ALL_METHODS.keys() == ALL_METHODS.keys() - NOT_IN_RECIPES_REASONS.keys()


def test_every_simulation_only_case_has_a_reason() -> None:
    assert all(names_in(case) & NOT_OVER_SILOS_REASONS.keys() for case in SIMULATION_ONLY_CASES.values())


def test_every_solver_runs_on_ray() -> None:
    assert SOLVER_CASES.keys() == SOLVERS.keys()


@pytest.mark.parametrize("name", ALL_SILO_CASES | SIMULATION_ONLY_CASES)
def test_every_case_is_a_valid_recipe(name: str) -> None:
    recipe = (ALL_SILO_CASES | SIMULATION_ONLY_CASES)[name].recipe
    assert recipe.algorithm().name and recipe.solver().hyper.lr > 0
