"""Real handwritten digits that come with scikit-learn: nothing to download."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..seeds import EVERYBODY, stream
from ..settings import unknown
from . import splits
from .people import People, from_arrays

SPLITS = ("dirichlet", "iid", "label")


def digits(
    count: int = 10,
    split: str = "dirichlet",
    alpha: float = 0.1,
    classes: int = 2,
    test: float = 0.2,
    seed: int = 0,
) -> People:
    """1797 digits of 8 x 8 pixels in [0, 1] over `count` parties; `alpha` is for "dirichlet", `classes` for "label".

    >>> people = digits(count=10, split="label", classes=2)
    >>> [len(people[name].y.unique()) for name in people]
    [2, 2, 2, 2, 2, 2, 2, 2, 2, 2]
    """
    if split not in SPLITS:
        raise unknown("split", split, SPLITS)
    from sklearn.datasets import load_digits  # here, because it takes a second that most users of Descant do not need

    pixels, labels = load_digits(return_X_y=True)
    x, y = (pixels / 16).astype(np.float32), labels.astype(np.int64)  # [1797, 64], [1797]
    rng = stream(seed, 0, EVERYBODY, "parties")
    return from_arrays([(x[rows], y[rows]) for rows in _rows(y, count, split, alpha, classes, rng)], test, seed)


def _rows(
    y: NDArray[Any], count: int, split: str, alpha: float, classes: int, rng: np.random.Generator
) -> list[splits.Rows]:
    if split == "dirichlet":
        return splits.by_dirichlet(y, count, alpha, rng)
    if split == "label":
        return splits.by_label(y, count, classes, rng)
    return splits.evenly(len(y), count, rng)
