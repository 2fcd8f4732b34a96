"""Splits by size, by group and round robin, and rotated images."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from descant.errors import PartyError, SettingError
from descant.parties import images, partition

seeds = st.integers(0, 2**32)


def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def assert_no_row_twice(parts: list[np.ndarray], n: int) -> None:
    rows = np.concatenate(parts)
    assert len(np.unique(rows)) == len(rows) and (not len(rows) or 0 <= rows.min() <= rows.max() < n)
    assert all((np.diff(part) > 0).all() for part in parts)


@settings(deadline=None)
@given(st.integers(0, 60), st.lists(st.integers(0, 20), min_size=1, max_size=6), seeds)
def test_by_size_gives_each_party_its_size(n: int, sizes: list[int], seed: int) -> None:
    if sum(sizes) > n:
        with pytest.raises(PartyError, match=f"need {sum(sizes)} rows. Got {n}"):
            partition.by_size(n, sizes, rng(seed))
        return
    parts = partition.by_size(n, sizes, rng(seed))
    assert [len(part) for part in parts] == sizes
    assert_no_row_twice(parts, n)


@settings(deadline=None)
@given(st.lists(st.sampled_from("abcde"), max_size=60), st.integers(0, 8))
def test_by_group_keeps_whole_groups(groups: list[str], min_rows: int) -> None:
    kept = {name for name in groups if groups.count(name) >= min_rows}
    if not kept:
        with pytest.raises(PartyError, match="None of the"):
            partition.by_group(groups, min_rows)
        return
    rows_by_group = partition.by_group(groups, min_rows)
    assert rows_by_group.keys() == kept
    for name, rows in rows_by_group.items():
        assert rows.tolist() == [row for row, group in enumerate(groups) if group == name]


@settings(deadline=None)
@given(
    st.integers(1, 6), st.integers(1, 8), st.integers(1, 6), st.integers(1, 30), st.integers(0, 3), st.booleans(), seeds
)
def test_round_robin_assigns_classes_in_turn(
    available: int, count: int, classes: int, each: int, min_rows: int, fill: bool, seed: int
) -> None:
    y = rng(seed).permutation(np.repeat(np.arange(available) + 3, each))
    desired = rng(seed).integers(0, 20, (count, classes))

    def draw() -> list[np.ndarray]:
        return partition.round_robin(y, desired, rng(seed), min_rows, fill)

    holders = np.bincount(((np.arange(count)[:, None] + np.arange(classes)) % available).ravel(), minlength=available)
    if classes > available or (holders * min_rows > each).any():
        with pytest.raises(PartyError, match=r"at most the|should hold at least"):
            draw()
        return
    parts = draw()
    assert_no_row_twice(parts, len(y))
    for party, part in enumerate(parts):
        counts = np.bincount(y[part] - 3, minlength=available)
        own = [(party + j) % available for j in range(classes)]
        assert not counts[np.setdiff1d(np.arange(available), own)].any(), "no class but its own"
        assert (counts[own] >= min_rows).all()
        assert fill or (counts[own] <= np.maximum(desired[party], min_rows)).all()
    taken = np.bincount(y[np.concatenate(parts)] - 3, minlength=available)
    if fill:
        assert (taken[holders > 0] == each).all(), "nothing is left over"
    else:
        expected = np.bincount(
            partition.round_robin_classes(count, classes, available).ravel(),
            np.maximum(desired, min_rows).ravel(),
            available,
        )
        assert (taken == np.minimum(expected, each)).all(), "the desired rows, up to the available ones"
    assert all(np.array_equal(a, b) for a, b in zip(parts, draw(), strict=True))


def test_a_class_with_too_few_rows_is_shared_in_proportion() -> None:
    parts = partition.round_robin(np.zeros(70, dtype=int), [[101], [201], [401]], rng(0))
    assert [len(part) for part in parts] == [11, 20, 39]


@pytest.mark.parametrize("split", partition.SPLITS)
@settings(deadline=None, max_examples=30)
@given(st.integers(4, 12), st.floats(0, 3), st.floats(1.1, 4), seeds)
def test_every_named_split_is_a_partition(split: str, count: int, sigma: float, exponent: float, seed: int) -> None:
    y = np.arange(400) % 4

    def draw() -> list[np.ndarray]:
        return partition.split_rows(y, split, count, rng(seed), classes=2, sigma=sigma, exponent=exponent)

    parts = draw()
    assert len(parts) == count and min(map(len, parts)) >= 1
    assert sum(map(len, parts)) == 400
    assert_no_row_twice(parts, 400)
    assert all(np.array_equal(a, b) for a, b in zip(parts, draw(), strict=True))


def test_sizes_have_the_law_that_they_are_named_after() -> None:
    normal = partition.log_normal_sizes(20_000, rng(0), mean=4.0, sigma=1.0, min_rows=50)
    assert normal.min() >= 50 and abs(np.log(normal - 49.5).std() - 1) < 0.05
    assert abs(np.median(normal - 50) - np.exp(4)) < 2
    power = partition.power_law_sizes(20_000, rng(0), exponent=3.0, min_rows=10)
    assert power.min() == 10
    for s in (20, 40, 80):
        assert abs((power >= s).mean() / (s / 10) ** -2 - 1) < 0.15, "the share above s falls as s^(1-3)"


def test_named_splits_differ_as_they_should() -> None:
    y = np.arange(1000) % 10
    sizes = {name: [len(part) for part in partition.split_rows(y, name, 20, rng(0))] for name in partition.SPLITS}
    assert max(sizes["iid"]) - min(sizes["iid"]) <= 1
    assert max(sizes["lognormal"]) > 5 * np.median(sizes["lognormal"])
    assert max(sizes["powerlaw"]) > 2 * np.median(sizes["powerlaw"])
    turns = partition.split_rows(y, "round_robin", 20, rng(0), classes=3)
    assert [sorted(set(y[part])) for part in turns[:2]] == [[0, 1, 2], [1, 2, 3]]


def test_impossible_splits_are_rejected_with_a_reason() -> None:
    with pytest.raises(SettingError, match=r"There is no split 'round_robn'\. Did you mean 'round_robin'"):
        partition.split_rows([0, 1], "round_robn", 2, rng(0))
    with pytest.raises(SettingError, match=r"The 'sigma' of the split must be >= 0"):
        partition.split_rows([0, 1], "round_robin", 2, rng(0), sigma=-1.0)
    with pytest.raises(SettingError, match=r"The 'exponent' of power_law_sizes must be > 1"):
        partition.power_law_sizes(3, rng(0), exponent=1.0)
    with pytest.raises(PartyError, match="Class 1 has 1 rows for the 2 parties that should hold at least 2"):
        partition.round_robin([0, 0, 0, 0, 1], [[2, 2], [2, 2]], rng(0), min_rows=2)
    with pytest.raises(PartyError, match="Sizes must be whole numbers"):
        partition.by_size(10, [1.5], rng(0))
    with pytest.raises(PartyError, match="The data set has 2 rows for the 3 parties"):
        partition.split_rows([0, 1], "lognormal", 3, rng(0))


@settings(deadline=None)
@given(st.integers(-8, 8), st.integers(1, 6), seeds)
def test_quarter_turns_are_exact(quarters: int, side: int, seed: int) -> None:
    x = rng(seed).integers(0, 256, (3, 2, side, side), dtype=np.uint8)
    rotated = images.rotate(x, 90 * quarters)
    assert rotated.dtype == np.uint8 and np.array_equal(rotated, np.rot90(x, quarters, axes=(-2, -1)))


def smooth(height: int, width: int) -> np.ndarray:
    """Return a hill off the center, smooth enough for bilinear interpolation."""
    up, right = np.mgrid[:height, :width]
    return np.exp(-((up - 0.35 * height) ** 2 + (right - 0.6 * width) ** 2) / 12)[None].astype(np.float32)


@pytest.mark.parametrize("shape", [(28, 28), (20, 32)])
def test_other_angles_are_consistent_and_invertible(shape: tuple[int, int]) -> None:
    x = smooth(*shape)
    assert np.abs(images.rotate(images.rotate(x, 30), -30) - x).max() < 0.1
    assert np.abs(images.rotate(images.rotate(x, 30), 60) - images.rotate(x, 90.001)).max() < 0.1
    if shape[0] == shape[1]:
        assert np.abs(images.rotate(x, 90.001) - images.rotate(x, 90)).max() < 0.01, "in the same direction"
    else:
        assert np.abs(images.rotate(x, 179.999) - images.rotate(x, 180)).max() < 0.01
    as_bytes = (200 * x).astype(np.uint8)
    rotated = images.rotate(as_bytes, 30)
    assert rotated.dtype == np.uint8
    assert np.array_equal(rotated, np.rint(images.rotate(as_bytes.astype(np.float32), 30)))


@pytest.mark.parametrize("split", ["lognormal", "round_robin"])
def test_a_spread_of_sizes_that_overflows_is_rejected(split: str) -> None:
    with pytest.raises(SettingError, match=r"The 'sigma' of the split must be >= 0 and <= 50\. Got 1000"):
        partition.split_rows(np.zeros(50, dtype=np.int64), split, 5, np.random.default_rng(0), sigma=1000.0)
