"""The work that every contestant does, and how it reads it: plain arrays and one JSON file in a folder."""

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
    min_samples: int  # samples of the smallest party; equal to the mean, all have the same
    participants: int  # parties a round
    steps: int
    batch: int
    rounds_per_turn: int  # rounds in one turn of a contestant
    contrast: float  # of the classes: such that 20 rounds neither learn nothing nor everything
    loss_tolerance: float = 0.1  # how far two losses of the same work may lie apart, as a share of what was learnt
    lr: float = 0.05
    alpha: float = 0.01  # Fed+'s α and ρ, the paper's
    rho: float = 10.0
    seed: int = 0


@dataclass(frozen=True)
class SharedWorkload:
    """A workload as it was written into a folder, for all contestants alike."""

    work: Workload
    folder: Path
    threads: int = 1

    @cached_property
    def ends(self) -> list[int]:
        """Where each party's samples end; the first begins at 0."""
        return [int(end) for end in read(self.folder / "ends.npy")]

    @cached_property
    def x(self) -> Array:
        return read(self.folder / "x.npy")

    @cached_property
    def y(self) -> Array:
        return read(self.folder / "y.npy")

    def cuts(self) -> list[slice]:
        """The samples of each party."""
        return [slice(begin, end) for begin, end in zip([0, *self.ends], self.ends, strict=False)]

    def initial(self) -> dict[str, Array]:
        """The weights that everybody begins with, named as torch names them."""
        return read_named(self.folder / "initial.npz")

    def batches(self, n: int, rng: np.random.Generator) -> Array:
        """The samples of each step ``[steps, batch]``: a party's data in a new order, again and again."""
        size = min(self.work.batch, n)
        wanted = self.work.steps * size
        orders = [rng.permutation(n) for _ in range(-(-wanted // n))]
        return np.concatenate(orders)[:wanted].reshape(self.work.steps, size)


def open_shared(folder: Path, threads: int = 1) -> SharedWorkload:
    """The workload in a folder."""
    return SharedWorkload(Workload(**json.loads((folder / "work.json").read_text())), folder, threads)


def store_work(folder: Path, work: Workload) -> None:
    """Write the description of a workload."""
    (folder / "work.json").write_text(json.dumps(dataclasses.asdict(work)))


def read(file: Path, mapped: bool = False) -> Array:
    """One array from a file; never an object."""
    found: Array = np.load(file, mmap_mode="c" if mapped else None, allow_pickle=False)  # noqa: TID251
    return found


def read_named(file: Path) -> dict[str, Array]:
    """Several arrays by name from a file; never an object."""
    with np.load(file, allow_pickle=False) as found:  # noqa: TID251
        return {name: found[name] for name in found.files}
