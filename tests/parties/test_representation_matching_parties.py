"""The ten clients of representation matching: their classes, their test sets, and errors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dataset_files import write_image_dataset
from descant import algorithms, compare, models, parties
from descant.errors import PartyError, SettingError
from descant.parties.images import images_with_test_start


def standardized(x: np.ndarray, train: int) -> torch.Tensor:
    """Return images standardized by channel over the training set, as parties have them."""
    images = torch.from_numpy(x if x.ndim == 4 else x[..., None]).double().permute(0, 3, 1, 2)
    mean, scale = (
        getattr(images[:train], name)((0, 2, 3), keepdim=True, **more)
        for name, more in (("mean", {}), ("std", {"correction": 0}))
    )
    return (images - mean) / scale


def rows_of(images: torch.Tensor, all_images: torch.Tensor) -> list[int]:
    """Return the row numbers of these images."""
    if not len(images):
        return []
    distances = torch.cdist(images.flatten(1).double(), all_images.flatten(1))
    assert float(distances.min(1).values.max()) < 1e-3
    return distances.argmin(1).tolist()


@settings(deadline=None, max_examples=20)
@given(
    st.sampled_from(["mnist", "cifar10", "speech"]),
    st.sampled_from(["label", "iid"]),
    st.integers(10, 13),
    st.integers(150, 200),  # enough rows that no class is missing
    st.integers(20, 45),
    st.integers(0, 30),
    st.integers(0, 2**31),
)
def test_training_rows_are_disjoint_and_the_test_set_is_split_equally(
    tmp_path_factory: pytest.TempPathFactory,
    source: str,
    split: str,
    count: int,
    train: int,
    test: int,
    fewer: int,
    seed: int,
) -> None:
    folder = tmp_path_factory.mktemp("clients")
    x, y = write_image_dataset(folder, source, train, test)
    samples = None if not fewer else max(count * 4, train - fewer)
    kept = 8 if fewer > 20 else 0
    samples = samples if not kept else (samples or train) - kept
    population = parties.representation_matching_clients(source, split, count, samples, kept, seed, folder)
    all_images = standardized(x, train)
    train_rows = {name: rows_of(population[name].x, all_images) for name in population}
    test_rows = {name: rows_of(population[name].x_test, all_images) for name in population}
    used = sorted(row for rows in train_rows.values() for row in rows)
    assert len(set(used)) == len(used) == (samples or train) and used[-1] < train
    if kept:
        assert population.validation is not None
        validated = rows_of(population.validation[0], all_images)
        assert len(set(validated)) == kept and not set(validated) & set(used) and max(validated) < train
        assert population.validation[1].tolist() == y[validated].tolist()
    else:
        assert population.validation is None
    assert sorted(row for rows in test_rows.values() for row in rows) == list(range(train, train + test))
    sizes = [len(rows) for rows in test_rows.values()]
    assert max(sizes) - min(sizes) <= 1
    fewer_tests = parties.representation_matching_clients(
        source, split, count, samples, kept, seed, folder, test_samples=count
    )
    for name, rows in test_rows.items():
        assert rows_of(fewer_tests[name].x_test, all_images) == rows[:1]
        assert torch.equal(fewer_tests[name].x, population[name].x)
    for name, rows in train_rows.items():
        assert (
            population[name].y.tolist() == y[rows].tolist()
            and population[name].y_test.tolist() == y[test_rows[name]].tolist()
        )
        if split == "label":
            assert set(population[name].y.tolist()) == {int(name) % 10}
    if split == "iid":
        assert max(map(len, train_rows.values())) - min(map(len, train_rows.values())) <= 1


def test_a_model_of_one_class_has_accuracy_one_tenth(tmp_path: Path) -> None:
    """With test sets of the own class, local training would look perfect."""
    write_image_dataset(tmp_path, "mnist", 200, 200)
    population = parties.representation_matching_clients(data=tmp_path)
    study = compare(
        [algorithms.FedAvg()],
        lambda: models.mlp(784, 10, [8]),
        population,
        rounds=2,
        points=1,
        progress=False,
        lr=0.1,
        steps=20,
    )
    rows = {row["method"]: row["mean"] for row in study.table().rows}
    assert rows["Local"] == rows["majority class"] == pytest.approx(0.1, abs=0.04)
    assert "part of the common test set" in study.settings["note"]


def test_the_note_shows_a_partial_data_set(tmp_path: Path) -> None:
    write_image_dataset(tmp_path, "cifar10", 40, 20)
    assert parties.representation_matching_clients("cifar10", data=tmp_path).note.startswith(
        "60 of the 60,000 samples of CIFAR-10; each party"
    )


def test_the_seed_determines_the_clients(tmp_path: Path) -> None:
    write_image_dataset(tmp_path, "speech", 60, 20)
    one, same, other = (
        parties.representation_matching_clients("speech", "iid", samples=50, seed=seed, data=tmp_path)
        for seed in (1, 1, 2)
    )
    assert torch.equal(one["3"].x, same["3"].x) and torch.equal(one["3"].x_test, same["3"].x_test)
    assert not torch.equal(one["3"].x, other["3"].x) and one["3"].x.shape[1:] == (1, 32, 32)


def test_impossible_sizes_and_settings_are_rejected(tmp_path: Path) -> None:
    write_image_dataset(tmp_path, "mnist", 40, 5)
    with pytest.raises(PartyError, match=r"mnist has 40 samples, of which the server keeps 0\. Got samples=41: ask"):
        parties.representation_matching_clients(samples=41, data=tmp_path)
    with pytest.raises(PartyError, match=r"of which the server keeps 40\. Got samples=None"):
        parties.representation_matching_clients(validation=40, data=tmp_path)
    with pytest.raises(PartyError, match=r"10 parties of at least 1 rows need 10 rows. Got 5"):
        parties.representation_matching_clients(data=tmp_path)
    with pytest.raises(
        SettingError,
        match="The 'source' of representation_matching_clients must be one of 'mnist', 'cifar10', 'speech'",
    ):
        parties.representation_matching_clients("svhn", data=tmp_path)
    with pytest.raises(
        SettingError, match="The 'split' of representation_matching_clients must be one of 'label', 'iid'"
    ):
        parties.representation_matching_clients(split="dirichlet", data=tmp_path)
    with pytest.raises(
        PartyError, match=r"Every party needs its test rows. There are 1 parties and 2 sets of test rows"
    ):
        parties.from_rows([[0.0]], [0], [np.array([0])], test_rows=[np.array([0])] * 2)


def test_speech_commands_has_its_authors_split(tmp_path: Path) -> None:
    x, y = write_image_dataset(tmp_path, "speech", 30, 12)
    images, labels, test_start = images_with_test_start("speech", tmp_path)
    assert np.array_equal(images[:, 0], x) and np.array_equal(labels, y) and test_start == 30


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"x": np.zeros((4, 40, 98), np.uint8)},
            r"images have shape \(1, 40, 98\) of uint8.*bytes of shape \(1, 32, 32\)",
        ),
        ({"x": np.zeros((4, 32, 32))}, "of float64"),
        ({"x": np.zeros((3, 32, 32), np.uint8)}, "it has 3 images, 4 labels and 4 splits"),
        ({"y": np.array([0, 1, 10, 0])}, "the label of row 2 is 10. Expected labels .* from 0 to 9"),
        ({"split": np.array([0, 0, 3, 2])}, "the split of row 2 is 3. Expected splits .* from 0 to 2"),
        ({"split": None}, "it has no 'split', only x, y"),
    ],
)
def test_invalid_speech_commands_files_are_rejected(change: dict[str, object], message: str, tmp_path: Path) -> None:
    arrays = {
        "x": np.zeros((4, 32, 32), np.uint8),
        "y": np.zeros(4, np.uint8),
        "split": np.array([0, 0, 1, 2]),
    } | change
    np.savez(tmp_path / "speech_commands_32x32.npz", **{name: v for name, v in arrays.items() if v is not None})
    with pytest.raises(PartyError, match=message) as error:
        parties.representation_matching_clients("speech", data=tmp_path)
    assert "speech_commands_32x32.npz cannot be used" in str(error.value)
