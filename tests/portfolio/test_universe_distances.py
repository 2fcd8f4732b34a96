"""Distances between asset universes, compared with plain dynamic programming."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from descant.errors import PartyError, SettingError
from descant.portfolio.universe_distances import alignment, covariance_norms, distance, pairwise_distances


def series(days: int, m: int = 3, seed: int = 0) -> Any:
    return 0.02 * np.random.default_rng(seed).standard_normal((days, m))


def reference_distance(a: Any, b: Any) -> float:
    """Return the least sum of Euclidean distances, cell by cell."""
    sums = np.full((len(a) + 1, len(b) + 1), np.inf)
    sums[0, 0] = 0
    for i, a_day in enumerate(a):
        for j, b_day in enumerate(b):
            before = min(sums[i, j], sums[i, j + 1], sums[i + 1, j])
            sums[i + 1, j + 1] = float(np.sqrt(((a_day - b_day) ** 2).sum())) + before
    return float(sums[-1, -1])


sizes = st.integers(1, 12)


@settings(max_examples=40, deadline=None)
@given(sizes, sizes, st.integers(1, 4), st.integers(0, 10**6))
def test_distance_is_the_least_sum_and_the_path_has_it(days: int, other: int, m: int, seed: int) -> None:
    pytest.importorskip("dtaidistance")
    a = series(days, m, seed)
    b = series(other, m, seed + 1)
    expected = reference_distance(a, b)
    assert distance(a, b) == pytest.approx(expected) == distance(b, a)
    path = alignment(a, b)
    assert path[0].tolist() == [0, 0] and path[-1].tolist() == [days - 1, other - 1]
    assert {tuple(step) for step in np.diff(path, axis=0).tolist()} <= {(0, 1), (1, 0), (1, 1)}
    assert np.linalg.norm(a[path[:, 0]] - b[path[:, 1]], axis=1).sum() == pytest.approx(expected)


def test_a_series_has_distance_0_to_itself_and_to_a_slower_copy() -> None:
    pytest.importorskip("dtaidistance")
    a = series(30)
    assert distance(a, a) == 0 == distance(a, np.repeat(a, 3, axis=0))
    assert alignment(a, a).tolist() == [[day, day] for day in range(30)]
    assert distance(a, a[:, ::-1]) > 0


def test_pairwise_distances_are_symmetric_and_averaged() -> None:
    pytest.importorskip("dtaidistance")
    universes = [series(20 + k, seed=k) for k in range(3)]
    mean, matrix = pairwise_distances(universes)
    expected = [reference_distance(universes[i], universes[j]) for i, j in ((0, 1), (0, 2), (1, 2))]
    assert mean == pytest.approx(np.mean(expected)) and (matrix == matrix.T).all() and (np.diag(matrix) == 0).all()
    assert matrix[[0, 0, 1], [1, 2, 2]].tolist() == pytest.approx(expected)


def test_a_stride_gives_about_the_same_distances() -> None:
    """Every 4th day, times 4: within 3 % over 1000 days."""
    pytest.importorskip("dtaidistance")
    universes = [series(1000, 9, seed=k) for k in range(3)]
    assert pairwise_distances(universes, stride=4)[0] == pytest.approx(pairwise_distances(universes)[0], rel=0.03)


def test_covariance_norms_by_hand() -> None:
    """v1's table 2: a covariance of diag(4, 1) has the norms 4 and √17."""
    returns = np.array([[2.0, 0], [-2, 0], [0, 1], [0, -1]]) * np.sqrt(3 / 2)
    assert covariance_norms(returns) == pytest.approx((4.0, np.sqrt(17)))
    assert covariance_norms(returns[:, :1]) == pytest.approx((4.0, 4.0))


def test_invalid_universes_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PartyError, match=r"with the same number of assets. Got \[4, 3\] and \[4, 2\]."):
        distance(series(4), series(4, 2))
    with pytest.raises(PartyError, match=r"Got \[0, 3\] and \[4, 3\]."):
        alignment(series(0), series(4))
    with pytest.raises(PartyError, match="Got NaN or infinity"):
        distance(series(4), np.full((4, 3), np.nan))
    with pytest.raises(PartyError, match="at least 2 asset universes"):
        pairwise_distances([series(4)])
    with pytest.raises(SettingError, match=r"The 'stride' of pairwise_distances must be a whole number >= 1. Got 0."):
        pairwise_distances([series(4)] * 2, stride=0)
    monkeypatch.setitem(sys.modules, "dtaidistance.dtw_cc", None)
    with pytest.raises(SettingError, match=r"pip install 'descant\[finance\]'"):
        distance(series(4), series(4))
