"""The silos of the paper on coresets, from generated files: their data, notes and errors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.io import savemat

from dataset_files import numbered_images, write_csv, write_mnist
from descant import models, parties
from descant.errors import PartyError, SettingError
from descant.parties import images, readers
from descant.parties.datasets import async_silos_paper


def write_svhn(folder: Path, n: int = 40, n_test: int = 20) -> np.ndarray:
    """SVHN's two MATLAB files, with labels 1 to 10 in turn; return the images ``[n + n_test, 32, 32, 3]``."""
    pictures = np.random.default_rng(1).integers(0, 256, (n + n_test, 32, 32, 3), dtype=np.uint8)
    for split, part in (("train", pictures[:n]), ("test", pictures[n:])):
        labels = (np.arange(len(part)) % 10 + 1).astype(np.uint8)[:, None]
        folder.mkdir(exist_ok=True)
        savemat(folder / f"{split}_32x32.mat", {"X": part.transpose(1, 2, 3, 0), "y": labels}, do_compression=True)
    return pictures


def write_news(folder: Path, each: int = 20) -> Path:
    """Write `each` texts per group: the group's word, a common word, a word of the text, and a stop word."""
    texts = [(g, f"The common group{g}x text{g}n{k}") for k in range(each) for g in range(20)]
    write_csv(folder / "20newsgroups.csv.xz", [("label", "text"), *texts])
    return folder


def test_both_silos_have_gray_images_and_their_own_test_sets(tmp_path: Path) -> None:
    color = write_svhn(write_mnist(tmp_path))
    population = parties.mnist_svhn(data=tmp_path)
    assert population.names == ("mnist", "svhn") and population.samples == {"mnist": 300, "svhn": 40}
    assert len(population["mnist"].x_test) == 100 and len(population["svhn"].x_test) == 20
    assert population["svhn"].y.tolist() == [(k + 1) % 10 for k in range(40)], "10 is a 0"
    assert population.note == "a part of SVHN: 40 of its 73,257 training images and 20 of its 26,032 test images"
    for name in population:
        party = population[name]
        assert party.x.shape[1:] == (1, 28, 28) and party.x.dtype == torch.float32
        assert abs(float(party.x.mean())) < 1e-4 and abs(float(party.x.std(correction=0)) - 1) < 1e-4
    small = images.train_and_test_images("mnist", tmp_path)
    x, x_test = (part.astype(np.float64) for part in (small[0], small[2]))
    assert np.allclose(population["mnist"].x_test.numpy(), (x_test - x.mean()) / x.std(), atol=1e-4), (
        "by training pixels"
    )
    gray = async_silos_paper.to_gray(color[:40].transpose(0, 3, 1, 2)).astype(np.float64)
    assert np.allclose(population["svhn"].x.numpy(), (gray - gray.mean()) / gray.std(), atol=1e-4)


def test_to_gray_weighs_colors_and_keeps_constant_areas() -> None:
    x = np.zeros((1500, 3, 32, 32), dtype=np.uint8)
    x[:, 0], x[:, 1], x[:, 2] = 200, 100, 50
    x[1200:, :, :16] = 0  # the upper half is black
    gray = async_silos_paper.to_gray(x)
    level = round(0.299 * 200 + 0.587 * 100 + 0.114 * 50)
    assert gray.shape == (1500, 1, 28, 28) and gray.dtype == np.uint8 and (gray[:1200] == level).all()
    assert not gray[1200:, :, :13].any() and (gray[1200:, :, 15:] == level).all()
    assert async_silos_paper.to_gray(x[:0]).shape == (0, 1, 28, 28)


def test_fewer_rows_are_drawn_by_the_seed(tmp_path: Path) -> None:
    write_svhn(write_mnist(tmp_path))
    few, other = (parties.mnist_svhn(train=20, test=7, seed=seed, data=tmp_path) for seed in (0, 1))
    assert few.samples == {"mnist": 20, "svhn": 20} and len(few["svhn"].x_test) == 7
    assert not torch.equal(few["mnist"].y, other["mnist"].y)
    assert torch.equal(few["mnist"].x, parties.mnist_svhn(train=20, seed=0, data=tmp_path)["mnist"].x)
    assert parties.mnist_svhn(train=10**6, data=tmp_path).samples == {"mnist": 300, "svhn": 40}, (
        "or all available images"
    )
    with pytest.raises(SettingError, match="The 'train' of mnist_svhn must be a whole number >= 1"):
        parties.mnist_svhn(train=0, data=tmp_path)


def test_the_papers_networks_have_the_printed_sizes() -> None:
    net = models.cnn(channels=[32, 32], dense=256)
    shapes = [tuple(p.shape) for p in net.parameters() if p.dim() > 1]
    assert shapes == [(32, 1, 5, 5), (32, 32, 5, 5), (256, 1568), (10, 256)]
    assert net(torch.zeros(2, 1, 28, 28)).shape == (2, 10)
    assert sum(p.numel() for p in models.mlp(hidden=[200]).parameters()) == 159_010
    assert sum(p.numel() for p in models.mlp(5000, 20, [1500]).parameters()) == 7_531_520


def test_damaged_matlab_files_are_named(tmp_path: Path) -> None:
    pictures = write_svhn(tmp_path)
    x, y = readers.read_svhn(tmp_path / "train_32x32.mat")
    assert np.array_equal(x, pictures[:40]) and y[:12].tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 2]
    file = tmp_path / "odd.mat"
    labels = np.ones((3, 1), dtype=np.uint8)
    for content, message in (
        ({"X": np.zeros((32, 32, 3, 3), dtype=np.uint8)}, r"'y' \(KeyError\)"),
        ({"X": np.zeros((32, 32, 3, 3), dtype=np.uint8), "y": labels[:2]}, r"y \(2, 1\) of uint8"),
        ({"X": np.zeros((32, 32, 3, 3), dtype=np.uint8), "y": labels * 0}, r"y \(3, 1\) of uint8"),
        ({"X": np.zeros((32, 32, 3, 3), dtype=np.uint8), "y": labels * 11}, "the label of row 0 is 11"),
        ({"X": np.zeros((32, 32, 3, 3), dtype=np.uint8), "y": labels * 1.0}, r"y \(3, 1\) of float64"),
        ({"X": labels, "y": labels}, r"X has shape \(3, 1\)"),
    ):
        savemat(file, content)
        with pytest.raises(PartyError, match=f"odd.mat cannot be used: .*{message}"):
            readers.read_svhn(file)
    whole = (tmp_path / "train_32x32.mat").read_bytes()
    for damage in (b"", whole[:100], whole[:3000], whole[:200] + b"\xff" * 64 + whole[264:], b"no such file" * 50):
        file.write_bytes(damage)
        with pytest.raises(PartyError, match=r"odd\.mat cannot be used"):
            readers.read_svhn(file)
    with pytest.raises(PartyError, match="There is no file"):
        readers.read_svhn(tmp_path / "none.mat")


def test_two_silos_have_every_image_upright_and_rotated(tmp_path: Path) -> None:
    population = parties.rotated_mnist(data=write_mnist(tmp_path))
    upright = population["mnist"]
    rotated = population["mnist90"]
    assert population.names == ("mnist", "mnist90") and population.samples == {"mnist": 300, "mnist90": 300}
    assert torch.equal(rotated.x, torch.rot90(upright.x, 1, (2, 3))) and torch.equal(rotated.y, upright.y)
    assert torch.equal(rotated.x_test, torch.rot90(upright.x_test, 1, (2, 3))) and len(rotated.x_test) == 100
    assert torch.equal(upright.x, torch.from_numpy(numbered_images()[0][:300, None] / np.float32(255)))


def test_many_silos_have_different_images_and_angles(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    population = parties.rotated_mnist(count=4, angle_step=90, train=75, test=25, data=tmp_path)
    assert population.names == ("mnist", "mnist90", "mnist180", "mnist270")
    back = [torch.rot90(population[name].x, -k, (2, 3)) for k, name in enumerate(population)]
    pixels = (torch.cat(back) * 255).round().long()[:, 0]
    assert sorted((pixels[:, 0, 0] + 256 * pixels[:, 0, 1]).tolist()) == list(range(300)), "every image once"
    again = parties.rotated_mnist(count=5, angle_step=18.5, train=100, data=tmp_path)
    assert again.names[1:] == ("mnist18.5", "mnist37", "mnist55.5", "mnist74")
    assert torch.equal(again["mnist55.5"].y, again["mnist"].y), "after 300 images the order repeats"
    assert not torch.equal(again["mnist18.5"].y, again["mnist"].y)
    with pytest.raises(SettingError, match="The 'angle_step' of rotated_mnist must give 2 silos different angles"):
        parties.rotated_mnist(angle_step=0, data=tmp_path)
    with pytest.raises(SettingError, match="The 'count' of rotated_mnist must be a whole number >= 1"):
        parties.rotated_mnist(count=0, data=tmp_path)


def test_each_silo_has_ten_groups_and_common_tfidf_features(tmp_path: Path) -> None:
    population = parties.newsgroups(vocabulary_size=21, data=write_news(tmp_path))
    labels, counts = population.label_counts()
    assert population.names == ("20ng1", "20ng2") and labels.tolist() == list(range(20))
    assert (counts[0, :10] > 0).all() and not counts[0, 10:].any() and (counts[1, 10:] > 0).all()
    assert population.samples == {"20ng1": 170, "20ng2": 170} and len(population["20ng1"].x_test) == 30, "85 % and 15 %"
    x = torch.cat([population[name].x for name in population])
    assert x.shape == (340, 21) and x.dtype == torch.float32
    assert ((x > 0).sum(1) == 2).all(), "of the 21 words a text has the common word and its group's word"
    assert torch.allclose(x.norm(dim=1), torch.ones(340))
    own = {
        label: x[torch.cat([population[name].y for name in population]) == label].argmax(1).unique()
        for label in range(20)
    }
    assert all(len(column) == 1 for column in own.values()) and len(torch.cat(list(own.values())).unique()) == 20


def test_the_split_is_drawn_by_the_seed_and_sizes_may_be_limited(tmp_path: Path) -> None:
    write_news(tmp_path)
    whole, other = (parties.newsgroups(vocabulary_size=400, seed=seed, data=tmp_path) for seed in (0, 1))
    assert not torch.equal(whole["20ng1"].y_test, other["20ng1"].y_test)
    short = parties.newsgroups(vocabulary_size=400, train=40, test=10, data=tmp_path)
    assert short.samples == {"20ng1": 40, "20ng2": 40} and len(short["20ng2"].x_test) == 10
    assert parties.newsgroups(test_share=0.5, data=tmp_path).samples["20ng1"] == 100
    with pytest.raises(SettingError, match="The 'test_share' of newsgroups must be > 0 and < 1"):
        parties.newsgroups(test_share=1.0, data=tmp_path)


def test_long_texts_are_read_and_unknown_labels_rejected(tmp_path: Path) -> None:
    write_news(tmp_path, each=3)
    rows = [(g, f"word{g} " * (40_000 if g == 3 else 2)) for g in range(20) for _ in range(3)]
    write_csv(tmp_path / "20newsgroups.csv.xz", [("label", "text"), *rows])
    assert parties.newsgroups(data=tmp_path).samples["20ng1"] == 26, "including texts of 280,000 characters"
    write_csv(tmp_path / "20newsgroups.csv.xz", [("label", "text"), *rows, (20, "none")])
    with pytest.raises(PartyError, match="the label of row 62 is '20'"):
        parties.newsgroups(data=tmp_path)
