"""The papers' populations, from generated files: the data of each party, the effect of seeds, notes and errors."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Subset, TensorDataset

from dataset_files import (
    numbered_images,
    review_rows,
    write_csv,
    write_emnist_letters,
    write_mnist,
    write_review_dataset,
    write_tile_sheet,
    write_word_vectors,
)
from descant import Sgd, algorithms, compare, parties
from descant.errors import DescantWarning, PartyError, SettingError
from descant.parties import POPULATIONS, Population


def all_samples(population: Population, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    party = population[name]
    return torch.cat([party.x, party.x_test]), torch.cat([party.y, party.y_test])


def numbers_of(population: Population, scale: float = 255.0) -> dict[str, list[int]]:
    """Return the image numbers of each party, which `numbered_images` stores in the first two pixels."""
    numbers = {}
    for name in population:
        pixels = (all_samples(population, name)[0] * scale).round().long()
        numbers[name] = sorted((pixels[:, 0, 0, 0] + 256 * pixels[:, 0, 0, 1]).tolist())
    return numbers


def test_zeta_has_no_effect_unless_it_acts_by_class() -> None:
    def labels(**settings: object) -> torch.Tensor:
        population = parties.synthetic(count=6, **settings)  # type: ignore[arg-type]
        return torch.cat([all_samples(population, name)[1] for name in population])

    def agreement(a: torch.Tensor, b: torch.Tensor) -> float:
        return float((a == b).double().mean())

    assert agreement(labels(zeta=0), labels(zeta=1000)) > 0.999
    assert agreement(labels(zeta=0), labels(zeta=1000, class_shift=True)) < 0.5
    assert agreement(labels(beta=1), labels(beta=10)) < 0.9


def test_the_printed_synthetic_data_are_nearly_one_class_a_party() -> None:
    shares = []
    for seed in range(4):
        _, counts = parties.synthetic(seed=seed).label_counts()
        shares += (counts.max(1) / counts.sum(1)).tolist()
    assert 0.92 < np.mean(shares) < 0.98, "0.95 over 100 seeds, each within 0.02 of it"


@pytest.mark.parametrize("make", [parties.synthetic, parties.shared_structure])
def test_the_first_parties_do_not_depend_on_how_many_there_are(make: object) -> None:
    few = make(count=2, seed=5)
    many = make(count=4, seed=5)  # type: ignore[operator]
    for name in few:
        assert torch.equal(few[name].x, many[name].x) and torch.equal(few[name].y_test, many[name].y_test)
    assert few.samples != make(count=2, seed=6).samples  # type: ignore[operator]


def test_federation_helps_where_there_is_something_to_share() -> None:
    population = parties.shared_structure(count=12, seed=3)
    assert max(population.samples.values()) < 610, "a party alone has fewer rows than the model has numbers"
    methods = [algorithms.FedAvg(), algorithms.FedAvgPlus(alpha=0.3)]
    solver = Sgd(lr=0.05, steps=20, batch=10)
    study = compare(methods, lambda: nn.Linear(60, 10), population, rounds=20, points=1, progress=False, solver=solver)
    means = {row["method"]: row["mean"] for row in study.table().rows}
    assert means["FedAvgPlus"] > means["FedAvg"] + 0.02
    assert means["FedAvgPlus"] > means["Local"] + 0.05


def test_settings_of_synthetic_populations_have_bounds() -> None:
    with pytest.raises(SettingError, match=r"The 'count' of synthetic must be a whole number >= 1"):
        parties.synthetic(count=0)
    with pytest.raises(SettingError, match=r"The 'offset' of shared_structure must be >= 0"):
        parties.shared_structure(offset=-1.0)


@pytest.mark.parametrize("classes", [1, 2])
def test_mnist_deals_every_picture_to_one_party_by_turns(tmp_path: Path, classes: int) -> None:
    population = parties.mnist(count=20, classes=classes, data=write_mnist(tmp_path), seed=1)
    assert population["0"].x.shape[1:] == (1, 28, 28) and population.note == ""
    labels, counts = population.label_counts()
    assert labels.tolist() == list(range(10)) and (counts.sum(0) == 40).all()
    for u in range(20):
        assert np.flatnonzero(counts[u]).tolist() == sorted((u + j) % 10 for j in range(classes))
        assert counts[u].sum() >= 10
        assert len(population[str(u)].x_test) == max(1, round(0.2 * counts[u].sum()))
    pixels = torch.cat([all_samples(population, name)[0] for name in population])
    assert len(torch.unique(pixels.flatten(1), dim=0)) == 400, "every image once"
    assert pixels.mean().abs() < 1e-3 and abs(float(pixels[:, :, 5:].std(0, correction=0).mean()) - 1) < 1e-3


def test_parties_share_the_memory_of_one_data_set(tmp_path: Path) -> None:
    population = parties.mnist(count=20, data=write_mnist(tmp_path))
    sources = list(population._sources.values())
    assert all(source.x is sources[0].x for source in sources) and sources[0].x.dtype == np.uint8


def test_parties_are_rotated_by_their_own_angles(tmp_path: Path) -> None:
    upright = parties.femnist(count=6, data=write_emnist_letters(tmp_path))
    rotated = parties.femnist(count=6, angles=[0, 90, 45], data=tmp_path)
    for name in upright:
        same = torch.rot90(upright[name].x, [0, 1, 0][int(name) % 3], (2, 3))
        assert torch.equal(same, rotated[name].x) == (int(name) % 3 != 2)
        assert torch.equal(upright[name].y, rotated[name].y)


def test_no_letter_is_used_by_two_parties_unless_leaky(tmp_path: Path) -> None:
    data = write_emnist_letters(tmp_path, 2000)
    population = parties.femnist(count=30, data=data)
    used = [number for own in numbers_of(population).values() for number in own]
    assert len(used) == len(set(used))
    _, counts = population.label_counts()
    for u in range(30):
        assert np.flatnonzero(counts[u]).tolist() == sorted((u + j) % 10 for j in range(5))
        assert counts[u][counts[u] > 0].min() >= 2
    leaky = parties.femnist(count=30, leaky=True, data=data)
    again = [number for own in numbers_of(leaky).values() for number in own]
    assert len(set(again)) < 0.5 * len(again), "ERRATA 21: the same images in many parties"
    assert "shared between parties" in leaky.note and "shared between parties" in leaky.describe()
    assert all(len(set(own)) == len(own) for own in numbers_of(leaky).values()), "but not twice in one party"


def test_too_few_images_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(PartyError, match=r"Class 0 has 4 rows for the .* parties that should hold at least 2"):
        parties.femnist(count=30, data=write_emnist_letters(tmp_path, 40))
    with pytest.raises(PartyError, match="Class 0 has 40 rows for the 100 parties that should hold at least 10"):
        parties.mnist(data=write_mnist(tmp_path))
    with pytest.raises(SettingError, match=r"The 'classes' of mnist must be a whole number >= 1 and <= 10"):
        parties.mnist(classes=11, data=tmp_path)


@pytest.mark.parametrize("name", ["cifar10", "svhn"])
def test_color_images_are_standardized_by_channel(name: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tiles = rng.integers(0, 200, (100, 32, 32, 3), dtype=np.uint8)
    for number, split in enumerate(("train", "test")):
        write_tile_sheet(tmp_path / name / f"{split}_00.webp", tiles[50 * number : 50 * number + 50])
    np.savez(tmp_path / name / "labels.npz", y_train=np.arange(50) % 10, y_test=np.arange(50) % 10)
    population = POPULATIONS[name](count=5, split="iid", data=tmp_path)
    pixels = torch.cat([all_samples(population, party)[0] for party in population])
    assert pixels.shape == (100, 3, 32, 32) and pixels.dtype == torch.float32
    assert torch.allclose(pixels.mean((0, 2, 3)), torch.zeros(3), atol=1e-4)
    assert torch.allclose(pixels.std((0, 2, 3)), torch.ones(3), atol=1e-3)


def test_texts_become_word_numbers_by_account(tmp_path: Path) -> None:
    population = parties.sentiment(data=write_review_dataset(tmp_path), max_words=4)
    assert sorted(population.names) == list("012345") and population.samples["5"] == 14
    x, y = all_samples(population, "0")
    assert x.dtype == torch.int64 and {tuple(row) for row in x.tolist()} == {(5, 3, 4, 1), (5, 3, 4, 2)}
    assert (x[:, 3] == torch.where(y == 1, 1, 2)).all(), "good is positive, bad negative; case is ignored"
    assert "critics replace Sent140" in population.note
    assert population.subset(["1"]).note == population.note and population.describe().endswith(population.note)
    long = all_samples(parties.sentiment(data=tmp_path, count=1, min_texts=17), "5")[0]
    assert long.shape == (17, 25) and long[0, :6].tolist()[4:] == [0, 0] and not long[:, 6:].any()


def test_accounts_are_drawn_by_the_seed(tmp_path: Path) -> None:
    write_review_dataset(tmp_path)
    drawn = [parties.sentiment(data=tmp_path, count=3, seed=seed).names for seed in range(60)]
    for place in range(3):  # accounts are numbered by size, but every account occurs at every place
        assert {names[place] for names in drawn} == set("012345")
    whole_set = parties.sentiment(data=tmp_path)
    few = parties.sentiment(data=tmp_path, count=3)
    assert few.names == whole_set.names[:3] == drawn[0]
    assert all(torch.equal(few[name].x_test, whole_set[name].x_test) for name in few)
    with pytest.raises(PartyError, match=r"6 accounts of critics have 10 texts or more\. Got count=7"):
        parties.sentiment(data=tmp_path, count=7)
    with pytest.raises(PartyError, match="None of the 6 groups has 18 rows; the largest has 17"):
        parties.sentiment(data=tmp_path, min_texts=18)
    with pytest.raises(SettingError, match="The 'source' of sentiment must be one of 'critics', 'sent140'"):
        parties.sentiment(source="tweets", data=tmp_path)


def test_the_original_sentiment140_needs_no_note(tmp_path: Path) -> None:
    write_word_vectors(tmp_path)
    rows = [
        (4 * label, k, "Mon", "NO_QUERY", account, text + " é")
        for k, (account, label, text) in enumerate(review_rows())
    ]
    write_csv(tmp_path / "training.1600000.processed.noemoticon.csv", rows, "latin-1")
    population = parties.sentiment(source="sent140", data=tmp_path)
    x, y = all_samples(population, "0")
    assert population.note == "" and (x[:, 3] == torch.where(y == 1, 1, 2)).all()


def test_the_note_shows_a_partial_sentiment140_and_unknown_labels_are_rejected(tmp_path: Path) -> None:
    write_word_vectors(tmp_path)
    write_csv(tmp_path / "sent140_sample.csv.gz", [("account", "label", "text"), *review_rows()])
    assert "87 of its 1,600,000 tweets" in parties.sentiment(source="sent140", data=tmp_path).note
    write_csv(tmp_path / "sent140_sample.csv.gz", [("account", "label", "text"), *review_rows(), ("9", 2, "odd")])
    with pytest.raises(PartyError, match=r"the label of row 89 is '2'\. Expected one of 0, 1"):
        parties.sentiment(source="sent140", data=tmp_path)


def test_a_users_npz_file_becomes_parties(tmp_path: Path) -> None:
    x, y = numbered_images(100)
    np.savez(tmp_path / "own.npz", pictures=x, labels=y)
    population = parties.npz(tmp_path / "own.npz", "pictures", "labels", count=5, split="label", classes=4)
    assert (population.label_counts()[1] > 0).sum(1).tolist() == [4] * 5
    assert population["0"].x.dtype == torch.float32 and 0.9 < float(population["0"].x.max()) <= 1
    with pytest.raises(PartyError, match=r"'labels' has shape \(100,\) of uint8.*Expected numbers"):
        parties.npz(tmp_path / "own.npz", "labels", "pictures")


def test_a_users_csv_file_becomes_parties(tmp_path: Path) -> None:
    rows = [(k, k / 2, k % 3, "north" if k % 4 else "south") for k in range(40)]
    file = write_csv(tmp_path / "own.csv.gz", [("a", "b", "kind", "bank"), *rows])
    population = parties.csv(file, label_column="kind", party_column="bank")
    assert population.names == ("north", "south") and sorted(
        all_samples(population, "south")[0][:, 0].tolist()
    ) == list(range(0, 40, 4))
    with pytest.raises(PartyError, match="row 2 of column 'bank' holds 'south'"):
        parties.csv(file, label_column="kind", count=3)
    with pytest.raises(PartyError, match=r"row 3 of column 'b' holds 0\.5\. Expected labels that are whole numbers"):
        parties.csv(file, label_column="b", party_column="bank")


def test_arrays_of_reads_torch_data_sets() -> None:
    x = torch.arange(12.0).reshape(6, 2)
    y = torch.tensor([0, 1, 0, 1, 0, 1])
    arrays = parties.arrays_of(Subset(TensorDataset(x, y), [1, 3]))
    assert arrays[0].tolist() == [[2, 3], [6, 7]] and arrays[1].tolist() == [1, 1]
    shared_x, _ = parties.arrays_of(TensorDataset(x, y))
    assert shared_x.ctypes.data == x.data_ptr()
    for dataset, message in (
        ([(x[0], 0), (x[:2], 1)], r"Row 1 of the features has shape \(2, 2\).*like row 0"),
        ([(x[0], 0), 3], r"Item 1 of the data set must be a pair"),
        (iter([1]), "not a stream. Got a list_iterator"),
        ([], "no rows"),
    ):
        with pytest.raises(PartyError, match=message):
            parties.arrays_of(dataset)


class Columns(dict[str, list[object]]):
    """The interface of a Hugging Face data set that is used: columns by name."""

    @property
    def column_names(self) -> list[str]:
        return list(self)


class Parts(Columns):
    @property
    def column_names(self) -> dict[str, list[str]]:  # type: ignore[override]
        return {"train": ["image"], "test": ["image"]}


def test_arrays_of_reads_data_sets_with_columns() -> None:
    from PIL import Image

    pictures = [Image.fromarray(pixels) for pixels in numbered_images(3)[0]]
    x, y = parties.arrays_of(Columns(image=pictures, label=[0, 2, 1]), x="image")
    assert np.array_equal(x, numbered_images(3)[0]) and y.tolist() == [0, 2, 1]
    with pytest.raises(SettingError, match=r"There is no column 'img'\. Did you mean 'image'"):
        parties.arrays_of(Columns(image=[], label=[]), x="img")
    with pytest.raises(PartyError, match=r"has parts: 'train', 'test'\. Give one"):
        parties.arrays_of(Parts(), x="image")
    with pytest.raises(PartyError, match="Row 0 of the column 'text' has shape"):
        parties.arrays_of(Columns(text=["a"], label=[0]), x="text")


def test_from_rows_equals_from_arrays_of_the_same_rows() -> None:
    x = np.random.default_rng(0).normal(size=(30, 2))
    y = np.arange(30) % 3
    rows = [np.arange(0, 30, 2), np.arange(1, 11, 2)]
    shared = parties.from_rows(x, y, rows, test=0.3, seed=4)
    copied = parties.from_arrays([(x[own], y[own]) for own in rows], test=0.3, seed=4)
    assert shared.samples == copied.samples and shared.describe() == copied.describe()
    for name in shared:
        for part in ("x", "y", "x_test", "y_test"):
            assert torch.equal(getattr(shared[name], part), getattr(copied[name], part))
    scaled = parties.from_rows(x, y, rows, test=0.3, seed=4, prepare=lambda k, part: part * (k + 1))
    assert torch.equal(scaled["1"].x_test, 2 * shared["1"].x_test) and torch.equal(scaled["0"].x, shared["0"].x)


def test_from_rows_rejects_invalid_data_and_rows() -> None:
    with pytest.raises(PartyError, match="Row 1 of the features of the data holds nan"):
        parties.from_rows([[0.0], [np.nan]], [0, 1], [[0]])
    with pytest.raises(PartyError, match="The data has 2 samples but 1 targets"):
        parties.from_rows([[0.0], [1.0]], [0], [[0]])
    for rows in ([2], [-1], [0.5], [[0]]):
        with pytest.raises(PartyError, match="The rows of party 'a' must be whole numbers from 0 to 1"):
            parties.from_rows([[0.0], [1.0]], [0, 1], {"a": rows})
    with pytest.warns(DescantWarning, match="no samples: 'b'"):
        assert parties.from_rows([[0.0]], [0], {"a": [0], "b": np.zeros(0, int)}).names == ("a",)


@pytest.mark.parametrize("name", list(POPULATIONS))
def test_every_population_has_a_short_docstring_and_takes_json_values(name: str) -> None:
    function = POPULATIONS[name]
    first = (function.__doc__ or "").splitlines()[0]
    assert first.endswith(".") and 30 < len(first) < 120
    signature = inspect.signature(function).parameters.values()
    json.dumps([p.default for p in signature if p.default is not inspect.Parameter.empty])
    assert all(p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for p in signature), "unknown keywords are rejected"
    assert "seed" in inspect.signature(function).parameters


def test_label_counts_are_those_of_the_parties() -> None:
    population = parties.from_arrays({"a": ([[0.0]] * 3, [5, 2, 5]), "b": ([[0.0]] * 2, [9, 9])})
    labels, counts = population.label_counts()
    assert labels.tolist() == [2, 5, 9] and counts.tolist() == [[1, 2, 0], [0, 0, 2]]
    with pytest.raises(PartyError, match="one whole number per row"):
        parties.from_arrays([([[0.0]], [0.5])]).label_counts()


@pytest.mark.parametrize("count", [1, 10, 400])
def test_the_map_is_drawn_for_few_and_for_many_parties(count: int, tmp_path: Path) -> None:
    y = np.arange(1200) % 7
    rows = np.array_split(np.arange(1200), count)
    population = parties.from_rows(
        np.zeros((1200, 1)), y, {f"$party {k}": own for k, own in enumerate(rows)}, note="a_$note"
    )
    file = population.plot(tmp_path / "maps" / "map.png")
    assert file == tmp_path / "maps" / "map.png" and file.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert parties.plot_population(population, tmp_path / "again.png").read_bytes() == file.read_bytes()
