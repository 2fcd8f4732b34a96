"""Distances between the asset universes of parties: dynamic time warping (Berndt, Clifford, 1994), v1 §4.2 of Fed+.

The distance between two series of returns is the least sum of Euclidean distances over all alignments of both. An
alignment goes from the first days to the last ones and advances one day in one series or in both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import combinations
from typing import Any

import numpy as np

from ..core.settings import check_settings, setting
from ..errors import PartyError, SettingError
from .market import Array


@dataclass(frozen=True)
class _WarpingSettings:
    stride: int = setting(1, "use every n-th day", least=1, whole=True)


def distance(a: Array, b: Array) -> float:
    """Return the distance between returns ``[T, m]`` and ``[S, m]`` of two asset universes."""
    _check_returns(a, b)
    return float(_import_dtaidistance("dtw_ndim").distance_fast(_contiguous(a), _contiguous(b), inner_dist="euclidean"))


def alignment(a: Array, b: Array) -> Array:
    """Return the alignment with the least distance: ``[L, 2]`` pairs of days, for v1's figure 5."""
    _check_returns(a, b)
    # dtaidistance 2.5.1: warping_path_fast uses squared distances and ignores inner_dist
    _, sums = _import_dtaidistance("dtw_ndim").warping_paths_fast(
        _contiguous(a), _contiguous(b), inner_dist="euclidean"
    )
    return np.array(_import_dtaidistance("dtw").best_path(sums), dtype=np.int64)


def pairwise_distances(universes: Sequence[Array], stride: int = 1) -> tuple[float, Array]:
    """Return the mean distance of all pairs of universes, and the distance matrix ``[K, K]``.

    With `stride` = n every n-th day is used and the distance multiplied by n: about the same result in 1/n² of the
    time.
    """
    check_settings(_WarpingSettings(stride), "pairwise_distances")
    if len(universes) < 2:
        raise PartyError(f"Distances need at least 2 asset universes. Got {len(universes)}.")
    matrix = np.zeros((len(universes), len(universes)))
    for i, j in combinations(range(len(universes)), 2):
        matrix[i, j] = matrix[j, i] = stride * distance(universes[i][::stride], universes[j][::stride])
    return float(matrix[np.triu_indices_from(matrix, 1)].mean()), matrix


def covariance_norms(returns: Array) -> tuple[float, float]:
    """Return the ℓ2 and the Frobenius norm of the covariance of returns ``[T, m]``: v1's table 2.

    >>> covariance_norms(np.array([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]]))
    (0.666..., 0.942...)
    """
    covariance = np.atleast_2d(np.cov(returns, rowvar=False))
    return float(np.linalg.norm(covariance, 2)), float(np.linalg.norm(covariance))


def _check_returns(a: Array, b: Array) -> None:
    shapes = f"{list(a.shape)} and {list(b.shape)}"
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1] or not a.size or not b.size:
        raise PartyError(
            f"Asset universes must be returns [days, assets] with the same number of assets. Got {shapes}."
        )
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise PartyError("Asset universes must have a return for every asset and day. Got NaN or infinity.")


def _contiguous(returns: Array) -> Array:
    return np.ascontiguousarray(returns, dtype=np.float64)


def _import_dtaidistance(module: str) -> Any:
    try:
        import_module("dtaidistance.dtw_cc")
        return import_module(f"dtaidistance.{module}")
    except ImportError as error:
        raise SettingError(
            "Distances between asset universes need dtaidistance with its compiled library: pip install"
            " 'descant[finance]'."
        ) from error
