"""Real handwritten digits that come with scikit-learn: nothing to download."""

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
    """1797 digits of 8 x 8 pixels in [0, 1] over `count` parties: bundled, nothing to download.

    `split` is one of :data:`.splits.SPLITS`; what the numbers behind it do stands at :func:`.splits.cut`.

    >>> people = digits(count=10, split="label", classes=2)
    >>> [len(people[name].y.unique()) for name in people]
    [2, 2, 2, 2, 2, 2, 2, 2, 2, 2]
    """
    from sklearn.datasets import load_digits  # here, because it takes a second that most users of Descant do not need

    pixels, labels = load_digits(return_X_y=True)
    x = (pixels / 16).astype(np.float32)
    y = labels.astype(np.int64)  # [1797, 64], [1797]
    rng = stream(seed, 0, ALL_PARTIES, purpose="parties")
    return from_rows(
        x, y, partition.split_rows(y, split, count, rng, alpha, classes, sigma, exponent), test=test, seed=seed
    )
