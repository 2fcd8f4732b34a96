"""The ten clients of representation matching: one class each or all at random, tested on the common test set."""

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


def standardised(x: np.ndarray, train: int) -> torch.Tensor:
    """As parties have them: by colour, over the training set."""
    pictures = torch.from_numpy(x if x.ndim == 4 else x[..., None]).double().permute(0, 3, 1, 2)
    mean, scale = (
        getattr(pictures[:train], name)((0, 2, 3), keepdim=True, **more)
        for name, more in (("mean", {}), ("std", {"correction": 0}))
    )
    return (pictures - mean) / scale


def rows_of(found: torch.Tensor, every: torch.Tensor) -> list[int]:
    """Which pictures these are."""
    if not len(found):
        return []
    apart = torch.cdist(found.flatten(1).double(), every.flatten(1))
    assert float(apart.min(1).values.max()) < 1e-3
    return apart.argmin(1).tolist()


@settings(deadline=None, max_examples=20)
@given(
    st.sampled_from(["mnist", "cifar10", "speech"]),
    st.sampled_from(["label", "iid"]),
    st.integers(10, 13),
    st.integers(150, 200),  # so many that no class is ever missing
    st.integers(20, 45),
    st.integers(0, 30),
    st.integers(0, 2**31),
)
def test_training_rows_go_to_one_client_each_and_the_test_set_to_all_in_equal_parts(
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
    people = parties.representation_matching_clients(source, split, count, samples, kept, seed, folder)
    every = standardised(x, train)
    trained = {name: rows_of(people[name].x, every) for name in people}
    tested = {name: rows_of(people[name].x_test, every) for name in people}
    used = sorted(row for rows in trained.values() for row in rows)
    assert len(set(used)) == len(used) == (samples or train) and used[-1] < train
    if kept:
        assert people.validation is not None
        validated = rows_of(people.validation[0], every)
        assert len(set(validated)) == kept and not set(validated) & set(used) and max(validated) < train
        assert people.validation[1].tolist() == y[validated].tolist()
    else:
        assert people.validation is None
    assert sorted(row for rows in tested.values() for row in rows) == list(range(train, train + test))
    sizes = [len(rows) for rows in tested.values()]
    assert max(sizes) - min(sizes) <= 1
    fewer_tests = parties.representation_matching_clients(
        source, split, count, samples, kept, seed, folder, test_samples=count
    )
    for name, rows in tested.items():
        assert rows_of(fewer_tests[name].x_test, every) == rows[:1]
        assert torch.equal(fewer_tests[name].x, people[name].x)
    for name, rows in trained.items():
        assert people[name].y.tolist() == y[rows].tolist() and people[name].y_test.tolist() == y[tested[name]].tolist()
        if split == "label":
            assert set(people[name].y.tolist()) == {int(name) % 10}
    if split == "iid":
        assert max(map(len, trained.values())) - min(map(len, trained.values())) <= 1


def test_who_knows_one_class_alone_is_right_once_in_ten(tmp_path: Path) -> None:
    """Where a client's own test set were of its class, training alone would be perfect, and the table a lie."""
    write_image_dataset(tmp_path, "mnist", 200, 200)
    people = parties.representation_matching_clients(data=tmp_path)
    study = compare(
        [algorithms.FedAvg()],
        lambda: models.mlp(784, 10, [8]),
        people,
        rounds=2,
        points=1,
        progress=False,
        lr=0.1,
        steps=20,
    )
    rows = {row["method"]: row["mean"] for row in study.table().rows}
    assert rows["Local"] == rows["majority class"] == pytest.approx(0.1, abs=0.04)
    assert "part of the common test set" in study.settings["note"]


def test_a_part_of_a_data_set_says_so(tmp_path: Path) -> None:
    write_image_dataset(tmp_path, "cifar10", 40, 20)
    assert parties.representation_matching_clients("cifar10", data=tmp_path).note.startswith(
        "60 of the 60,000 samples of CIFAR-10; each party"
    )


def test_the_seed_decides_who_has_what(tmp_path: Path) -> None:
    write_image_dataset(tmp_path, "speech", 60, 20)
    one, same, other = (
        parties.representation_matching_clients("speech", "iid", samples=50, seed=seed, data=tmp_path)
        for seed in (1, 1, 2)
    )
    assert torch.equal(one["3"].x, same["3"].x) and torch.equal(one["3"].x_test, same["3"].x_test)
    assert not torch.equal(one["3"].x, other["3"].x) and one["3"].x.shape[1:] == (1, 32, 32)


def test_what_cannot_be_dealt_out_is_refused(tmp_path: Path) -> None:
    write_image_dataset(tmp_path, "mnist", 40, 5)
    with pytest.raises(PartyError, match=r"mnist has 40 samples, of which the server keeps 0\. Got samples=41: ask"):
        parties.representation_matching_clients(samples=41, data=tmp_path)
    with pytest.raises(PartyError, match=r"of which the server keeps 40\. Got samples=None"):
        parties.representation_matching_clients(validation=40, data=tmp_path)
    with pytest.raises(PartyError, match=r"10 parties of at least 1 rows need 10 rows. Got 5"):
        parties.representation_matching_clients(data=tmp_path)
    with pytest.raises(SettingError, match="The 'source' of clients must be one of 'mnist', 'cifar10', 'speech'"):
        parties.representation_matching_clients("svhn", data=tmp_path)
    with pytest.raises(SettingError, match="The 'split' of clients must be one of 'label', 'iid'"):
        parties.representation_matching_clients(split="dirichlet", data=tmp_path)
    with pytest.raises(PartyError, match=r"Every party needs its test rows. There are 1 parties and 2 of these"):
        parties.from_rows([[0.0]], [0], [np.array([0])], test_rows=[np.array([0])] * 2)


# -- Speech Commands --------------------------------------------------------------------------------------------------


def test_speech_commands_has_the_parts_of_its_authors(tmp_path: Path) -> None:
    x, y = write_image_dataset(tmp_path, "speech", 30, 12)
    found, labels, begin = images_with_test_start("speech", tmp_path)
    assert np.array_equal(found[:, 0], x) and np.array_equal(labels, y) and begin == 30


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"x": np.zeros((4, 40, 98), np.uint8)},
            r"images have shape \(1, 40, 98\) of uint8.*bytes of shape \(1, 32, 32\)",
        ),
        ({"x": np.zeros((4, 32, 32))}, "of float64"),
        ({"x": np.zeros((3, 32, 32), np.uint8)}, "it has 3 pictures, 4 labels and 4 splits"),
        ({"y": np.array([0, 1, 10, 0])}, "the label of row 2 is 10. Expected labels .* from 0 to 9"),
        ({"split": np.array([0, 0, 3, 2])}, "the split of row 2 is 3. Expected splits .* from 0 to 2"),
        ({"split": None}, "it has no 'split', only x, y"),
    ],
)
def test_what_is_wrong_with_speech_commands_is_named(change: dict[str, object], message: str, tmp_path: Path) -> None:
    sound = {"x": np.zeros((4, 32, 32), np.uint8), "y": np.zeros(4, np.uint8), "split": np.array([0, 0, 1, 2])} | change
    np.savez(tmp_path / "speech_commands_32x32.npz", **{name: v for name, v in sound.items() if v is not None})
    with pytest.raises(PartyError, match=message) as error:
        parties.representation_matching_clients("speech", data=tmp_path)
    assert "speech_commands_32x32.npz cannot be used" in str(error.value)
