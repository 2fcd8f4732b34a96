"""What runs here, and how a model of yours would: said in sentences. Light to import: torch waits for the work."""

from __future__ import annotations

import os
import platform
import shutil
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..federation import Federation

_WAYS = {
    "stacked": "many parties at once, each layer by one operation on all of them",
    "single": "one party after another, each layer by a kernel with its gradient written out",
    "vectorised": "many parties at once, by torch.vmap",
    "looped": "one party after another, by the module itself",
}
_PACKAGES = ("torch", "numpy", "safetensors", "scikit-learn", "matplotlib", "gymnasium", "flwr", "ray")


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    what: str
    found: str
    advice: str = ""

    def __str__(self) -> str:
        return f"{self.what:>14}: {self.found}" + (f"\n{'':16}{self.advice}" if self.advice else "")


def look() -> list[Finding]:
    """The machine and what is installed on it."""
    from ..engines.processes.process_engine import cores

    installed = {name: _version(name) for name in _PACKAGES}
    there = ", ".join(f"{name} {found}" for name, found in installed.items() if found)
    missing = ", ".join(name for name, found in installed.items() if not found)
    shared = Path("/dev/shm")
    free = f"{shutil.disk_usage(shared).free / 2**30:.1f} GB free" if shared.is_dir() else "none"
    data = os.environ.get("DESCANT_DATA", "")
    return [
        Finding("system", f"Python {platform.python_version()}, {platform.system()} {platform.machine()}"),
        Finding("packages", there, f"Not installed, and only needed for what they do: {missing}." if missing else ""),
        Finding("cores", f"{cores()}; {_threads()}"),
        Finding("shared memory", free, "" if shared.is_dir() else "Worker processes will use ordinary files."),
        Finding(
            "DESCANT_DATA", data or "not set", "" if not data or Path(data).is_dir() else "There is no such folder."
        ),
    ]


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _threads() -> str:
    import torch

    return f"torch uses {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()} instructions"


def explain(federation: Federation) -> list[Finding]:
    """How the stacks of a federation would be computed, and why not otherwise."""
    plan, layout = federation.plan_, federation.plan_.net.layout
    size = layout.size * layout.dtype.itemsize / 1e6
    ways = federation.ways()
    chosen = next(way for way, reason in ways.items() if not reason)
    findings = [
        Finding("model", f"{layout.size:,} parameters in {layout.parameters} tensors, {layout.dtype}, {size:.2f} MB"),
        Finding("parties", f"{len(plan.people)}, of {_range(list(plan.people.samples.values()))} samples"),
        Finding("way", f"your model runs {chosen}: {_WAYS.get(chosen, chosen)}"),
    ]
    better = list(ways)[: list(ways).index(chosen)]
    return findings + [Finding("not " + way, f"because {ways[way]}") for way in better]


def _range(sizes: list[int]) -> str:
    return f"{min(sizes)} to {max(sizes)}" if min(sizes) < max(sizes) else str(min(sizes))
