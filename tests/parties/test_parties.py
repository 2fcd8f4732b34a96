"""Parties: data come out as they went in, splits are partitions, and invalid data are rejected with a reason."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from descant import parties
from descant.errors import DescantWarning, PartyError, SettingError
from descant.parties import partition


def rows(n: int, start: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    return np.arange(n, dtype=np.float64)[:, None] + start, np.arange(n) % 2


def flat(tensor: torch.Tensor) -> list[float]:
    return tensor.flatten().tolist()


@settings(deadline=None)
@given(st.integers(1, 40), st.floats(0, 1, exclude_max=True), st.integers(0, 5))
def test_train_and_test_are_a_partition_of_the_data(n: int, test: float, seed: int) -> None:
    population = parties.from_arrays([rows(n)], test=test, seed=seed)
    party = population["0"]
    assert sorted(flat(party.x) + flat(party.x_test)) == list(range(n))
    assert flat(party.x) == sorted(flat(party.x)), "the order of the samples is kept"
    assert [v % 2 for v in flat(party.x) + flat(party.x_test)] == flat(party.y) + flat(party.y_test)
    assert party.samples == population.samples["0"] >= 1
    assert (len(party.x_test) > 0) == (n > 1 and test > 0)
    assert abs(len(party.x_test) - n * test) <= 1


def test_a_new_party_never_changes_the_split_of_another() -> None:
    before = parties.from_arrays({"a": rows(50)}, seed=3)["a"]
    after = parties.from_arrays({"new": rows(30), "a": rows(50), "z": rows(7)}, seed=3)["a"]
    other_seed = parties.from_arrays({"a": rows(50)}, seed=4)["a"]
    other_name = parties.from_arrays({"b": rows(50)}, seed=3)["b"]
    assert torch.equal(before.x_test, after.x_test)
    assert not torch.equal(before.x_test, other_seed.x_test)
    assert not torch.equal(before.x_test, other_name.x_test)


def test_a_party_may_bring_its_own_test_set() -> None:
    population = parties.from_arrays([(*rows(5), *rows(3, start=100)), (*rows(4), [], []), rows(10)])
    assert flat(population["0"].x) == [0, 1, 2, 3, 4] and flat(population["0"].x_test) == [100, 101, 102]
    assert population["1"].x_test.shape == (0, 1) and population["1"].y_test.dtype == torch.int64
    assert len(population["2"].x_test) == 2


@pytest.mark.parametrize(
    ("x", "dtype", "expected"),
    [
        (np.zeros((2, 3)), None, torch.float32),
        (np.zeros((2, 3)), torch.float64, torch.float64),
        (np.zeros((2, 3), dtype=">f8"), None, torch.float32),
        (np.zeros((2, 3), dtype=np.float16), None, torch.float16),
        (torch.zeros(2, 3, requires_grad=True), torch.bfloat16, torch.bfloat16),
        (torch.zeros(2, 3, dtype=torch.bfloat16), None, torch.float32),
        ([[0.0, 1.0], [2.0, 3.0]], None, torch.float32),
        (np.zeros((2, 3), dtype=np.uint8), None, torch.int64),
        (np.zeros((2, 3), dtype=np.uint8), torch.float32, torch.float32),
        (np.zeros((2, 3), dtype=bool), None, torch.float32),
        (np.broadcast_to(np.float32(0), (2, 3)), None, torch.float32),
        (np.zeros((4, 3), dtype=np.float32)[::-2], None, torch.float32),
    ],
)
def test_features_and_labels_get_the_expected_dtypes(
    x: object, dtype: torch.dtype | None, expected: torch.dtype
) -> None:
    labeled = parties.from_arrays([(x, [0, 1])], dtype=dtype)["0"]
    assert (labeled.x.dtype, labeled.x_test.dtype) == (expected, expected)
    assert labeled.y.dtype == torch.int64
    regression = parties.from_arrays([(x, [0.5, 1.5])], dtype=dtype)["0"]
    assert regression.y.dtype == (expected if expected.is_floating_point else torch.float32)


def test_memory_is_shared_and_parties_are_built_on_demand() -> None:
    x = np.zeros((1000, 4), dtype=np.float32)
    y = np.zeros(1000, dtype=np.int64)
    whole = parties.from_arrays([(x, y)], test=0)["0"]
    assert whole.x.data_ptr() == x.ctypes.data and whole.y.data_ptr() == y.ctypes.data
    many = parties.from_arrays([(x, y)] * 5000)
    assert len({id(many["7"]) for _ in range(3)}) == 1
    assert sum(party.samples for party in many.values()) == sum(many.samples.values()) == 5000 * 800
    assert len(many._cache) < 5000, "old parties are dropped from the cache"


def test_a_population_is_a_mapping_in_the_given_order() -> None:
    population = parties.from_arrays([rows(4), rows(5), rows(6)], names=["c", "a", "b"])
    assert population.names == tuple(population) == ("c", "a", "b")
    assert len(population) == 3 and "a" in population and "x" not in population
    assert population.get("x") is None
    assert population == population and population != parties.from_arrays([rows(4)])
    assert [party.name for party in population.values()] == ["c", "a", "b"]
    with pytest.raises(PartyError, match=r"^There is no party 'x'\. There are 3: 'c', 'a', 'b'\.$"):
        population["x"]


def test_a_subset_keeps_order_data_and_splits() -> None:
    population = parties.from_arrays([rows(n) for n in range(4, 9)])
    some = population.subset(["3", "1"])
    assert some.names == ("3", "1") and population.subset("1").names == ("1",)
    assert torch.equal(some["3"].x_test, population["3"].x_test)
    for names, message in ((["9"], "no party '9'"), ([], "at least one party"), (["1", "1"], "twice or empty: '1'")):
        with pytest.raises(PartyError, match=message):
            population.subset(names)


def test_describe_shows_sizes_and_limits_its_length() -> None:
    text = parties.from_arrays([([[0.5]], [0.5])] * 30).describe()
    assert text.startswith("30 parties: 30 samples to train, 0 to test; features (1,) float32, targets () float32")
    assert text.endswith("and 10 more")


VALID = ([[0.0, 0.0], [1.0, 1.0]], [0, 1])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "at least one party. Got none"),
        ({}, "at least one party. Got none"),
        ([([], [])], "All 1 parties are empty: '0'"),
        ({"a": VALID, "b": ([[0.0]], [0])}, r"Party 'b' has features \(1,\) .*expected features \(2,\) .*party 'a'"),
        ({"a": VALID, "b": ([[0, 1]], [0])}, r"Party 'b' has features \(2,\) int64.*expected .*float32.*party 'a'"),
        ({"a": VALID, "b": ([[0.0, 1.0]], [0.5])}, r"Party 'b' has .*targets \(\) float32.*expected .*int64"),
        ({"a": VALID, "b": ([[0.0, 1.0]], [0, 1])}, "Party 'b' has 1 samples but 2 targets"),
        ({"b": ([[0.0], [np.nan]], [0, 1])}, "Row 1 of the features of party 'b' holds nan"),
        ({"b": ([[0.0, 0.0], [0.0, -np.inf]], [0, 1])}, "Row 1 of the features of party 'b' holds -inf"),
        ({"b": ([[1e300]], [0])}, r"Row 0 .* party 'b' holds 1e\+300.*fit in torch.float32"),
        ({"b": ([[0.0]], [np.inf])}, "Row 0 of the targets of party 'b' holds inf"),
        ({"b": ([[0.0], [0.0]], [1, -1])}, "Row 1 of the targets of party 'b' is -1. Labels must be 0 or more"),
        ({1: VALID, "1": VALID}, "a unique name .*'1'"),
        ({"": VALID}, "not empty"),
        ({"a": (*VALID, [[0.0]], [0])}, r"The test set of party 'a' has features \(1,\).*expected features \(2,\)"),
        ({"a": (*VALID, [[0.0, np.nan]], [0])}, "Row 0 of the test features of party 'a' holds nan"),
        ((np.zeros((5, 2)), np.zeros(5)), r"Party '0' must be \(x, y\) or .*Got a ndarray"),
        ([([["a"]], [0])], "The features of party '0' must be numbers"),
        ([([[1.0], [1.0, 2.0]], [0, 1])], "The features of party '0' must be numbers in rows of one length"),
        ([(1.0, [0])], "one row per sample"),
    ],
)
def test_invalid_data_are_rejected_with_the_party_and_the_row(data: object, message: str) -> None:
    with pytest.raises(PartyError, match=message):
        parties.from_arrays(data)  # type: ignore[arg-type]


def test_invalid_names_are_rejected() -> None:
    with pytest.raises(PartyError, match="1 parties and 2 names"):
        parties.from_arrays([VALID], names=["a", "b"])
    with pytest.raises(PartyError, match=r"a unique name .*'a'"):
        parties.from_arrays([VALID, VALID], names=["a", "a"])
    with pytest.raises(PartyError, match="keys of a mapping"):
        parties.from_arrays({"a": VALID}, names=["b"])


@pytest.mark.parametrize("test", [-0.1, 1.0, 1.5, float("nan")])
def test_the_test_share_has_bounds(test: float) -> None:
    with pytest.raises(SettingError, match=r"The 'test' of from_arrays must be >= 0 and < 1\. Got "):
        parties.from_arrays([VALID], test=test)


def test_the_dtype_must_be_floating() -> None:
    with pytest.raises(SettingError, match="'dtype' of from_arrays must be a floating dtype"):
        parties.from_arrays([VALID], dtype=torch.int64)


def test_an_empty_party_is_left_out_with_a_warning() -> None:
    with pytest.warns(DescantWarning, match="no samples: 'b'"):
        population = parties.from_arrays({"a": VALID, "b": (np.zeros((0, 2)), []), "c": VALID})
    assert population.names == ("a", "c")


labels = st.lists(st.integers(0, 5), min_size=1, max_size=120)
seeds = st.integers(0, 2**32)


def assert_partition(parts: list[np.ndarray], n: int, count: int) -> None:
    assert len(parts) == count
    assert sorted(np.concatenate(parts).tolist()) == list(range(n))
    assert all((np.diff(part) > 0).all() for part in parts)


@settings(deadline=None)
@given(labels, st.integers(1, 15), st.floats(1e-3, 1e3), st.integers(0, 4), seeds)
def test_dirichlet_is_a_partition_with_no_party_too_small(
    y: list[int], count: int, alpha: float, min_rows: int, seed: int
) -> None:
    def draw() -> list[np.ndarray]:
        return partition.by_dirichlet(y, count, alpha, np.random.default_rng(seed), min_rows=min_rows)

    if len(y) < count * min_rows:
        with pytest.raises(PartyError, match=f"need {count * min_rows} rows. Got {len(y)}. Ask for at most"):
            draw()
        return
    parts = draw()
    assert_partition(parts, len(y), count)
    assert min(len(part) for part in parts) >= min_rows
    assert all(np.array_equal(a, b) for a, b in zip(parts, draw(), strict=True))


def test_alpha_controls_the_similarity_of_parties() -> None:
    y = np.repeat(np.arange(5), 400)

    def majority(alpha: float) -> float:
        parts = partition.by_dirichlet(y, 10, alpha, np.random.default_rng(0))
        return float(np.mean([np.bincount(y[part]).max() / len(part) for part in parts]))

    assert majority(1000.0) < 0.25 < 0.6 < majority(0.05)


@settings(deadline=None)
@given(st.integers(1, 6), st.integers(1, 12), st.integers(1, 6), st.integers(12, 30), seeds)
def test_by_label_gives_exactly_the_requested_classes(
    available: int, count: int, classes: int, each: int, seed: int
) -> None:
    y = np.repeat(np.arange(available), each)

    def draw() -> list[np.ndarray]:
        return partition.by_label(y, count, classes, np.random.default_rng(seed))

    if classes > available or count * classes < available:
        with pytest.raises(PartyError, match=r"at most|cannot hold all"):
            draw()
        return
    parts = draw()
    assert_partition(parts, len(y), count)
    assert {len(np.unique(y[part])) for part in parts} == {classes}
    assert all(np.array_equal(a, b) for a, b in zip(parts, draw(), strict=True))


@settings(deadline=None)
@given(st.integers(0, 200), st.integers(1, 20), seeds)
def test_iid_sizes_differ_by_one_at_most(n: int, count: int, seed: int) -> None:
    if n < count:
        with pytest.raises(PartyError, match=f"Ask for at most {n} parties"):
            partition.iid(n, count, np.random.default_rng(seed))
        return
    parts = partition.iid(n, count, np.random.default_rng(seed))
    assert_partition(parts, n, count)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_invalid_arguments_of_splits_are_rejected_with_a_reason() -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(SettingError, match=r"The 'alpha' of by_dirichlet must be > 0\. Got -1.0"):
        partition.by_dirichlet([0, 1], 2, -1.0, rng)
    with pytest.raises(SettingError, match=r"The 'count' of iid must be >= 1\. Got 0"):
        partition.iid(3, 0, rng)
    with pytest.raises(PartyError, match="Class 1 has 1 rows for the 2 parties"):
        partition.by_label([0, 0, 0, 1], 2, 2, rng)
    with pytest.raises(PartyError, match="one whole number per row"):
        partition.by_label([0.5, 1.5], 2, 1, rng)


@pytest.mark.parametrize("split", ["dirichlet", "label", "iid"])
def test_digits_uses_every_digit_once(split: str) -> None:
    population = parties.digits(count=12, split=split, seed=1)
    features = [torch.cat([party.x, party.x_test]) for party in population.values()]
    assert len(population) == 12 and sum(map(len, features)) == 1797
    assert torch.cat(features).shape == (1797, 64)
    assert float(torch.cat(features).min()) == 0.0 and float(torch.cat(features).max()) == 1.0
    again = parties.digits(count=12, split=split, seed=1)
    assert all(torch.equal(population[name].x, again[name].x) for name in population)
    assert population.samples != parties.digits(count=12, split=split, seed=2).samples or split == "iid"


def test_digits_rejects_an_unknown_split() -> None:
    with pytest.raises(SettingError, match=r"There is no split 'labels'\. Did you mean 'label'\?"):
        parties.digits(split="labels")


def test_importing_parties_does_not_import_sklearn() -> None:
    code = "import sys, descant.parties; sys.exit('sklearn' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
