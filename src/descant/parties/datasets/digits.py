"""Real handwritten digits bundled with scikit-learn."""

from __future__ import annotations

import numpy as np

from ...core.seeds import ALL_PARTIES, stream
from .. import partition
from ..population import Population, from_rows


def digits(
    count: int = 10,
    split: str = "dirichlet",
    alpha: float = 0.1,
    classes: int = 2,
    test: float = 0.2,
    seed: int = 0,
    sigma: float = 2.0,
    exponent: float = 2.0,
) -> Population:
    """1797 digits of 8 x 8 pixels in [0, 1] over `count` parties: bundled, no download needed.

    `split` is one of :data:`.partition.SPLITS`; its settings are those of :func:`.partition.split_rows`.

    >>> population = digits(count=10, split="label", classes=2)
    >>> [len(population[name].y.unique()) for name in population]
    [2, 2, 2, 2, 2, 2, 2, 2, 2, 2]
    """
    from sklearn.datasets import load_digits  # slow to import, and needed only here

    pixels, labels = load_digits(return_X_y=True)
    x = (pixels / 16).astype(np.float32)
    y = labels.astype(np.int64)  # [1797, 64], [1797]
    rng = stream(seed, 0, ALL_PARTIES, purpose="parties")
    return from_rows(
        x, y, partition.split_rows(y, split, count, rng, alpha, classes, sigma, exponent), test=test, seed=seed
    )
