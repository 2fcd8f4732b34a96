"""The papers' indexes, cited tests, faults and errata agree with the code, in both directions."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "src" / "descant").rglob("*.py"))

INDEXES = [file.read_text() for file in sorted((ROOT / "papers").glob("*/index.md"))]
ROW = re.compile(r"^\| (?:v[12] )?([^|]+?) \| ([^|]*`.+?) \|", re.MULTILINE)
NAME = re.compile(r"`([\w.]+)`")


def entries(part: str) -> list[tuple[str, str]]:
    """Return the (place in the paper, name) pairs under one heading of the papers' indexes."""
    found = [index.partition(f"## {part}\n")[2].split("\n## ")[0] for index in INDEXES]
    rows = [row for text in found for row in ROW.findall(text)]
    return [(place.strip(), name) for place, names in rows for name in NAME.findall(names)]


def docstring(name: str, package: str) -> str:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(package + module), attribute).__doc__ or ""


@pytest.mark.parametrize(("place", "name"), entries("In the code"))
def test_code_in_the_index_exists_and_names_its_equation(place: str, name: str) -> None:
    assert place.lower() in docstring(name, "descant.").lower(), f"{name} does not name {place} in its docstring"


@pytest.mark.parametrize(("place", "name"), entries("As laws"))
def test_laws_in_the_index_exist_and_name_their_equation(place: str, name: str) -> None:
    (file,) = (ROOT / "tests").rglob(f"{name.split('.')[0]}.py")
    tree = ast.parse(file.read_text())
    found = {node.name: ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    whole = found[name.split(".")[1]] + (ast.get_docstring(tree) or "")
    assert place in whole, f"{name} does not name {place}"


def test_every_equation_named_in_the_code_is_in_the_index() -> None:
    listed = {place for place, _ in entries("In the code")}
    named = re.compile(r"eq\. \(\d+\)(?:-\(\d+\))?|§5\.[2-4]\.\d")
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                for place in named.findall(ast.get_docstring(node) or ""):
                    assert place in listed or _ends(place) & listed, f"{file.name}: {node.name} names {place}"


def _ends(place: str) -> set[str]:
    """Return the ends of a range such as eq. (4)-(5), which counts if one of them is listed."""
    return {f"eq. {number}" for number in re.findall(r"\(\d+\)", place)}


READING = "\n".join([(ROOT / "docs" / "reading-the-papers.md").read_text(), *INDEXES])
FAULTS = (ROOT / "docs" / "faults.md").read_text()


@pytest.mark.parametrize("test", dict.fromkeys(re.findall(r"`([\w/]+\.py::\w+)`", READING + FAULTS)))
def test_tests_cited_for_departures_and_faults_exist(test: str) -> None:
    file, _, name = test.partition("::")
    assert f"def {name}(" in (ROOT / "tests" / file).read_text()


def test_every_tested_fault_has_a_row() -> None:
    text = (ROOT / "tests" / "deployment" / "test_deployment_faults.py").read_text()
    for name in re.findall(r"^def (test_\w+)", text, re.MULTILINE):
        assert f"`deployment/test_deployment_faults.py::{name}`" in FAULTS


def test_every_erratum_named_in_the_code_has_a_row() -> None:
    rows = set(re.findall(r"^\| (\d+) \|", READING, re.MULTILINE))
    for file in FILES:
        for numbers in re.findall(r"ERRATA (\d+(?:, \d+)*)", file.read_text()):
            assert set(numbers.split(", ")) <= rows, f"{file.name} names ERRATA {numbers}"
