"""Facts about this machine, and the execution mode of a model. Torch is imported only when needed."""

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

MODE_DESCRIPTIONS = {
    "stacked": "many parties at once, each layer by one operation on all of them",
    "single": "one party after another, each layer by a kernel with its gradient written out",
    "vectorized": "many parties at once, by torch.vmap",
    "looped": "one party after another, by the module itself",
}
CHECKED_PACKAGES = ("torch", "numpy", "safetensors", "scikit-learn", "matplotlib", "gymnasium", "flwr", "ray")


@dataclass(frozen=True)
class DoctorCheck:
    """One finding about the machine or the model."""

    subject: str
    result: str
    advice: str = ""

    def __str__(self) -> str:
        return f"{self.subject:>14}: {self.result}" + (f"\n{'':16}{self.advice}" if self.advice else "")


def inspect_machine() -> list[DoctorCheck]:
    """Return the facts about the machine and its installed packages."""
    from ..engines.processes.process_engine import available_cores

    installed = {name: _version(name) for name in CHECKED_PACKAGES}
    installed_list = ", ".join(f"{name} {number}" for name, number in installed.items() if number)
    missing = ", ".join(name for name, number in installed.items() if not number)
    shared_memory = Path("/dev/shm")
    free = f"{shutil.disk_usage(shared_memory).free / 2**30:.1f} GB free" if shared_memory.is_dir() else "none"
    data = os.environ.get("DESCANT_DATA", "")
    return [
        DoctorCheck("system", f"Python {platform.python_version()}, {platform.system()} {platform.machine()}"),
        DoctorCheck(
            "packages",
            installed_list,
            f"Not installed, and optional: {missing}." if missing else "",
        ),
        DoctorCheck("cores", f"{available_cores()}; {_threads()}"),
        DoctorCheck(
            "shared memory", free, "" if shared_memory.is_dir() else "Worker processes will use ordinary files."
        ),
        DoctorCheck(
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


def explain_execution(federation: Federation) -> list[DoctorCheck]:
    """Return the execution mode of a federation's models, and why faster modes are not available."""
    plan = federation.plan_
    layout = federation.plan_.net.layout
    size = layout.trainable_width * layout.dtype.itemsize / 1e6
    execution_modes = federation.execution_modes()
    selected = next(mode for mode, reason in execution_modes.items() if not reason)
    findings = [
        DoctorCheck(
            "model",
            f"{layout.trainable_width:,} parameters in {layout.parameter_count} tensors, {layout.dtype}, {size:.2f} MB",
        ),
        DoctorCheck(
            "parties", f"{len(plan.population)}, of {format_range(list(plan.population.samples.values()))} samples"
        ),
        DoctorCheck("execution mode", f"your model runs {selected}: {MODE_DESCRIPTIONS.get(selected, selected)}"),
    ]
    faster_modes = list(execution_modes)[: list(execution_modes).index(selected)]
    return findings + [DoctorCheck("not " + mode, f"because {execution_modes[mode]}") for mode in faster_modes]


def format_range(sizes: list[int]) -> str:
    return f"{min(sizes)} to {max(sizes)}" if min(sizes) < max(sizes) else str(min(sizes))
