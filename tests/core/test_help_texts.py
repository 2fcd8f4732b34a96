"""`help()` shows the meaning of every parameter of the public interface."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from descant import Federation
from descant.algorithms import ALGORITHMS, WRAPPERS
from descant.training import SOLVERS

PUBLIC = {"Federation": Federation, **ALGORITHMS, **WRAPPERS, **SOLVERS}


@pytest.mark.parametrize("name", PUBLIC)
def test_help_shows_the_meaning_of_every_parameter(name: str) -> None:
    documented: Callable[..., Any] = PUBLIC[name]
    lines = (inspect.getdoc(documented) or "").splitlines()
    for parameter in inspect.signature(documented).parameters:
        meaning = lines[lines.index(f"{parameter}:") + 1]
        assert meaning.startswith("    ") and len(meaning.strip()) > 5, parameter
