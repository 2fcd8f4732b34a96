"""The workloads and their synthetic data: the same arrays and initial weights for every contestant."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np

from peer_comparison.peers.work import Array, Workload, store_work

_LOGISTIC = Workload(
    name="W1",
    title="logistic regression 784-10, 1,000 parties of different sizes, 10 a round, 20 steps of batch 10",
    model="logistic",
    method="FedAvg",
    parties=1000,
    mean_samples=60,
    min_samples=10,
    participants=10,
    steps=20,
    batch=10,
    rounds_per_turn=50,
    contrast=0.1,
)
_MLP = Workload(
    name="W2",
    title="MLP 784-200-200-10, 100 parties, 10 a round, 20 steps of batch 32",
    model="mlp",
    method="FedAvg",
    parties=100,
    mean_samples=600,
    min_samples=600,
    participants=10,
    steps=20,
    batch=32,
    rounds_per_turn=5,
    contrast=0.2,
)
_CNN = Workload(
    name="W3",
    title="CNN of two 5x5 convolutions (32, 64) and 512 units, 100 parties, 10 a round, 10 steps of batch 20",
    model="cnn",
    method="FedAvg",
    parties=100,
    mean_samples=600,
    min_samples=600,
    participants=10,
    steps=10,
    batch=20,
    rounds_per_turn=2,
    contrast=0.3,
)

_FED_PLUS = replace(_LOGISTIC, name="W1+", method="FedGeoMed+", contrast=0.3, loss_tolerance=0.3)

WORKLOADS = {work.name: work for work in (_LOGISTIC, _FED_PLUS, _MLP, _CNN)}

PROBE = 2000  # held-out samples, whose loss shows if contestants did the same work
_SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "logistic": {"weight": (10, 784), "bias": (10,)},
    "mlp": {
        "0.weight": (200, 784),
        "0.bias": (200,),
        "2.weight": (200, 200),
        "2.bias": (200,),
        "4.weight": (10, 200),
        "4.bias": (10,),
    },
    "cnn": {
        "0.weight": (32, 1, 5, 5),
        "0.bias": (32,),
        "3.weight": (64, 32, 5, 5),
        "3.bias": (64,),
        "7.weight": (512, 3136),
        "7.bias": (512,),
        "9.weight": (10, 512),
        "9.bias": (10,),
    },
}


def sizes(work: Workload) -> Array:
    """Return the samples of each party: log-normal above the minimum with the given mean, or all equal."""
    if work.mean_samples == work.min_samples:
        return np.full(work.parties, work.mean_samples)
    rng = np.random.default_rng([work.seed, 0])
    above = rng.lognormal(0.0, 1.0, work.parties)
    counts: Array = work.min_samples + np.floor(above * (work.mean_samples - work.min_samples) / above.mean()).astype(
        np.int64
    )
    return counts


def write(work: Workload, folder: Path) -> Path:
    """Write a workload as files: work.json, x, y, ends, the probe and the initial weights."""
    folder.mkdir(parents=True, exist_ok=True)
    store_work(folder, work)
    ends = np.cumsum(sizes(work))
    rng = np.random.default_rng([work.seed, 1])
    patterns = _patterns(rng)
    for prefix, count in (("", int(ends[-1])), ("probe_", PROBE)):
        x, y = _samples(count, work.contrast * patterns, rng)
        np.save(folder / f"{prefix}x.npy", x.reshape(-1, 1, 28, 28) if work.model == "cnn" else x)
        np.save(folder / f"{prefix}y.npy", y)
    np.save(folder / "ends.npy", ends)
    np.savez(folder / "initial.npz", **_weights(work))  # type: ignore[arg-type]  # its stub allows names no arrays
    return folder


def _patterns(rng: np.random.Generator) -> Array:
    """Return one coarse picture per class ``[10, 784]``; convolutions need coarse structure."""
    return np.kron(rng.normal(size=(10, 7, 7)), np.ones((1, 4, 4))).reshape(10, 784)


def _samples(count: int, patterns: Array, rng: np.random.Generator) -> tuple[Array, Array]:
    y = rng.integers(10, size=count)
    x = rng.standard_normal((count, 784), dtype=np.float32)
    x += patterns[y].astype(np.float32)
    x *= np.float32(0.4)  # about the norm of a handwritten digit, so that the learning rate fits
    return x, y


def _weights(work: Workload) -> dict[str, Array]:
    """Return weights uniform within 1/√(inputs), torch's initialization."""
    rng = np.random.default_rng([work.seed, 2])
    found = {}
    bound = 1.0
    for name, shape in _SHAPES[work.model].items():
        bound = (
            1 / math.sqrt(math.prod(shape[1:])) if len(shape) > 1 else bound
        )  # a bias uses the bound of the weight before it
        found[name] = rng.uniform(-bound, bound, shape).astype(np.float32)
    return found
