"""The work of every contestant, stored as plain arrays and one JSON file in a folder."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]


@dataclass(frozen=True)
class Workload:
    """One workload: data, a model and rounds of local SGD."""

    name: str
    title: str
    model: Literal["logistic", "mlp", "cnn"]
    method: Literal["FedAvg", "FedGeoMed+"]
    parties: int
    mean_samples: int  # samples of a party, on average
    min_samples: int  # samples of the smallest party; if equal to the mean, all parties have as many
    participants: int  # parties per round
    steps: int
    batch: int
    rounds_per_turn: int  # rounds per turn of a contestant
    contrast: float  # of the classes, chosen so that 20 rounds learn something but not everything
    loss_tolerance: float = 0.1  # allowed difference of two losses as a share of the improvement
    lr: float = 0.05
    alpha: float = 0.01  # Fed+'s α and ρ, the paper's
    rho: float = 10.0
    seed: int = 0


@dataclass(frozen=True)
class SharedWorkload:
    """A workload in a folder, the same for all contestants."""

    work: Workload
    folder: Path
    threads: int = 1

    @cached_property
    def ends(self) -> list[int]:
        """The end of each party's samples; the first party starts at 0."""
        return [int(end) for end in read(self.folder / "ends.npy")]

    @cached_property
    def x(self) -> Array:
        return read(self.folder / "x.npy")

    @cached_property
    def y(self) -> Array:
        return read(self.folder / "y.npy")

    def cuts(self) -> list[slice]:
        """Return the samples of each party as slices."""
        return [slice(begin, end) for begin, end in zip([0, *self.ends], self.ends, strict=False)]

    def initial(self) -> dict[str, Array]:
        """Return the initial weights under torch's names."""
        return read_named(self.folder / "initial.npz")

    def batches(self, n: int, rng: np.random.Generator) -> Array:
        """Return the samples of each step ``[steps, batch]``: repeated passes over the data in new orders."""
        size = min(self.work.batch, n)
        wanted = self.work.steps * size
        orders = [rng.permutation(n) for _ in range(-(-wanted // n))]
        return np.concatenate(orders)[:wanted].reshape(self.work.steps, size)


def open_shared(folder: Path, threads: int = 1) -> SharedWorkload:
    """Return the workload in a folder."""
    return SharedWorkload(Workload(**json.loads((folder / "work.json").read_text())), folder, threads)


def store_work(folder: Path, work: Workload) -> None:
    """Write the description of a workload."""
    (folder / "work.json").write_text(json.dumps(dataclasses.asdict(work)))


def read(file: Path, mapped: bool = False) -> Array:
    """Read one array from a file without unpickling."""
    array: Array = np.load(file, mmap_mode="c" if mapped else None, allow_pickle=False)  # noqa: TID251
    return array


def read_named(file: Path) -> dict[str, Array]:
    """Read several arrays by name from a file without unpickling."""
    with np.load(file, allow_pickle=False) as arrays:  # noqa: TID251
        return {name: arrays[name] for name in arrays.files}
