"""The structure of the code: import direction, unique names and lazy exports."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "descant"
FILES = sorted(SOURCE.rglob("*.py"))

# A package may import from its own line and from the lines above it. A module that is listed by itself is an exception.
# Imports inside functions do not count: that is how optional features are attached.
LAYERS = [
    {"errors"},
    {"core"},
    {"serialization", "storage", "parties", "privacy.gaussian_mechanism"},
    {"models", "aggregation", "rl", "portfolio"},
    {"algorithms", "training", "parties.population_names", "parties.remote_parties"},
    {"rounds"},
    {"engines", "privacy", "coresets", "reporting", "storage.vault", "training.dp_sgd", "training.solver_names"},
    {"analysis", "algorithms.method_names"},
    {"federation"},
    {"tracking", "studies", "config"},
    {"deployment", "papers"},
    {"cli", "__main__"},
]
LAYER = {name: level for level, names in enumerate(LAYERS) for name in names}


def layer_of(module: str) -> int:
    """Return the layer of a module: its own entry, or that of its package."""
    return LAYER[module] if module in LAYER else layer_of(module.rpartition(".")[0])


def module_of(file: Path) -> str:
    return ".".join(file.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")


def imported(file: Path) -> set[str]:
    """Return the modules of other packages that a file imports when it is loaded, except for type checking."""
    package = ("descant", *file.relative_to(SOURCE).parts[:-1])
    found = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.level:
            base = ".".join((*package[: len(package) + 1 - node.level], *filter(None, [node.module])))
            for name in (f"{base}.{alias.name}".removeprefix("descant.") for alias in node.names):
                is_module = SOURCE.joinpath(*name.split(".")).with_suffix(".py").exists()
                found.add(name if is_module or (SOURCE / name).is_dir() else base.removeprefix("descant."))
    return found - {"descant"}


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_imports_go_down_the_layers(file: Path) -> None:
    here = module_of(file)
    if here == "__init__":
        return
    for other in imported(file):
        assert layer_of(other) <= layer_of(here), f"{here} imports {other}, which is a layer above it"


def test_no_two_modules_share_a_name() -> None:
    names = Counter(file.stem for file in FILES if file.stem not in ("__init__", "__main__"))
    assert [name for name, count in names.items() if count > 1] == []


def test_no_two_public_classes_share_a_name() -> None:
    nodes = [node for file in FILES for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef)]
    names = Counter(node.name for node in nodes if not node.name.startswith("_"))
    assert [name for name, count in names.items() if count > 1] == []


def test_the_package_has_few_top_level_modules() -> None:
    assert len(list(SOURCE.glob("*.py"))) <= 5


def test_importing_federation_loads_few_modules() -> None:
    code = "import sys; from descant import Federation; print(sum(name.startswith('descant') for name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) <= 80


PACKAGES = ["descant", *(one.name for one in pkgutil.walk_packages([str(SOURCE)], "descant.") if one.ispkg)]
EXTRAS = ("descant.deployment.flower", "descant.engines.ray")  # they need the extras [flower] and [ray]


@pytest.mark.parametrize("package", [name for name in PACKAGES if name not in EXTRAS])
def test_no_lazy_export_is_hidden_by_a_module_of_its_name(package: str) -> None:
    """`from descant import compare` must be the function, whatever was imported before."""
    here = importlib.import_module(package)
    modules = {one.name for one in pkgutil.iter_modules(here.__path__)}
    for name in set(getattr(here, "__all__", ())) & modules:
        assert getattr(here, name) is importlib.import_module(f"{package}.{name}"), f"{package}.{name} is a module"


@pytest.mark.parametrize("package", [name for name in PACKAGES if name not in EXTRAS])
def test_every_name_in_all_can_be_imported(package: str) -> None:
    """The three lists of a lazy ``__init__.py`` agree."""
    here = importlib.import_module(package)
    names = getattr(here, "__all__", [])
    assert set(names) <= set(dir(here))
    for name in names:
        assert getattr(here, name) is not None
