"""Synthetic parties: the data of FedProx and Fed+, and a population with shared structure.

"Fed+: A Unified Approach to Robust Personalized Federated Learning" (Yu et al., v2 §8.1), after "Federated Optimization
in Heterogeneous Networks" (Li et al., 2020). A party's data are drawn from a stream keyed by its name. So the first
three of thirty parties equal the parties of a population of three.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...core.seeds import ALL_PARTIES, stream
from ...core.settings import check_settings, setting
from ..partition import log_normal_sizes
from ..party import Array
from ..population import Population, from_arrays

FEATURE_COUNT = 60
CLASS_COUNT = 10
_FEATURE_SCALES = np.arange(1, FEATURE_COUNT + 1) ** -0.6  # the square root of Σ_jj = j^-1.2


@dataclass(frozen=True)
class _SyntheticSettings:
    count: int = setting(30, "number of parties", least=1, whole=True)
    zeta: float = setting(1000, "spread of the mean of a party's model", least=0)
    beta: float = setting(10, "spread of the mean of a party's features", least=0)


def synthetic(
    count: int = 30, zeta: float = 1000, beta: float = 10, class_shift: bool = False, test: float = 0.2, seed: int = 0
) -> Population:
    """The papers' synthetic data: 60 features, 10 classes, one model per party, log-normal sizes.

    y = argmax(W x + b) with W, b ~ N(u, 1), u ~ N(0, ζ) and x ~ N(v, Σ), Σ_jj = j^-1.2, v ~ N(B, 1), B ~ N(0, β). ζ and
    β are standard deviations, as in FedProx's code, and the argmax is taken without the softmax that overflows there
    (ERRATA 24). Sizes are ⌊log-normal(4, 2)⌋ + 50, as in that code; the papers say "a power law" (ERRATA 23).

    The defaults are the printed ζ=1000, β=10, which are degenerate. u shifts all classes equally, so **ζ has no effect
    at all**. At β=10 one class holds 95 % of a party's rows on average. Every party has its own model, so there is
    nothing to share, and local training is hard to beat. With `class_shift` each class has its own u, and ζ acts.
    :func:`shared_structure` is a population on which federation can help.

    >>> synthetic(count=3)
    Population(3: '0', '1', '2')
    """
    check_settings(_SyntheticSettings(count, zeta, beta), "synthetic")
    return from_arrays(
        (_synthetic_party(seed, k, zeta, beta=beta, class_shift=class_shift) for k in range(count)), test, seed
    )


def _synthetic_party(seed: int, k: int, zeta: float, beta: float, class_shift: bool) -> tuple[Array, Array]:
    rng = stream(seed, 0, str(k), purpose="synthetic")
    n = int(log_normal_sizes(1, rng)[0])
    u = zeta * rng.normal(size=CLASS_COUNT if class_shift else 1)
    weight = u + rng.normal(size=(FEATURE_COUNT, CLASS_COUNT))
    bias = u + rng.normal(size=CLASS_COUNT)
    feature_mean = beta * rng.normal() + rng.normal(size=FEATURE_COUNT)
    return _label(feature_mean + _FEATURE_SCALES * rng.normal(size=(n, FEATURE_COUNT)), weight, bias)


@dataclass(frozen=True)
class _SharedStructureSettings:
    count: int = setting(30, "number of parties", least=1, whole=True)
    offset: float = setting(0.8, "distance of a party's model from the common one, relative to its size", least=0)
    shift: float = setting(0.5, "standard deviation of the mean of a party's features", least=0)
    min_rows: int = setting(50, "minimum number of training rows per party", least=1, whole=True)
    test_rows: int = setting(200, "number of test rows per party", least=1, whole=True)


def shared_structure(
    count: int = 30, offset: float = 0.8, shift: float = 0.5, min_rows: int = 50, test_rows: int = 200, seed: int = 0
) -> Population:
    """Parties with shared structure: one common model, plus an offset per party. Not from a paper.

    y = argmax((W + offset·D) x) with W and D ~ N(0, 1), where only W is common, and x ~ N(v, 1), v ~ N(0, shift²), in
    60 features and 10 classes. A party trains on ⌊log-normal(3, 1)⌋ + `min_rows` rows, far too few for its 600 model
    parameters, so it needs the others. It is tested on `test_rows` more rows, so that a gain exceeds chance. At offset
    0 all parties are equal and the mean is best; at a large offset there is nothing to share. All numbers are ours,
    chosen so that parties can gain.

    >>> shared_structure(count=3)["0"]
    Party('0', 73 to train, 200 to test, x (60,))
    """
    settings = _SharedStructureSettings(count, offset, shift, min_rows=min_rows, test_rows=test_rows)
    check_settings(settings, "shared_structure")
    common_weight = stream(seed, 0, ALL_PARTIES, purpose="shared").normal(size=(FEATURE_COUNT, CLASS_COUNT))
    return from_arrays(
        (
            _shared_structure_party(seed, k, common_weight, offset=offset, shift=shift, sizes=(min_rows, test_rows))
            for k in range(count)
        ),
        seed=seed,
    )


def _shared_structure_party(
    seed: int, k: int, common: Array, offset: float, shift: float, sizes: tuple[int, int]
) -> tuple[Array, Array, Array, Array]:
    rng = stream(seed, 0, str(k), purpose="shared")
    n = int(log_normal_sizes(1, rng, 3.0, sigma=1.0, min_rows=sizes[0])[0])
    weight = common + offset * rng.normal(size=common.shape)
    feature_mean = shift * rng.normal(size=FEATURE_COUNT)
    x, y = _label(feature_mean + rng.normal(size=(n + sizes[1], FEATURE_COUNT)), weight, np.zeros(CLASS_COUNT))
    return x[:n], y[:n], x[n:], y[n:]


def _label(x: Array, weight: Array, bias: Array) -> tuple[Array, Array]:
    return x.astype(np.float32), np.argmax(x @ weight + bias, axis=1)
