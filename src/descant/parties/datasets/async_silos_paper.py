"""The silos of "Asynchronous Collaborative Learning Across Data Silos" (Tuor, Lockhart and Magazzeni, 2021), §7.1.

Two parties each, with large data sets that differ. The paper gives the sizes of the training sets but no details of
data preparation; each function states which choices are ours. Its networks are :func:`descant.models.cnn` with
``channels=[32, 32], dense=256``, and :func:`descant.models.mlp` with ``hidden=[200]`` and ``hidden=[1500]``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

from ...core.seeds import ALL_PARTIES, stream
from ...core.settings import check_settings, setting
from ...errors import SettingError
from ..dataset_catalog import locate_files
from ..images import ImageScaling, rotate, train_and_test_images
from ..partition import RowIndices
from ..party import Array
from ..population import Population, from_arrays
from ..readers import parse_labels, read_table

_GRAY_WEIGHTS = np.array([0.299, 0.587, 0.114], dtype=np.float32)  # of red, green and blue (ITU-R BT.601)
_SVHN_SIZES = (73257, 26032)  # training and test images in the full data set
_GROUP_COUNT = 20
_NEWSGROUP_SILOS = ("20ng1", "20ng2")


@dataclass(frozen=True)
class _SiloSettings:
    train: int | None = setting(None, "number of training rows per silo; None: all", least=1, whole=True)
    test: int | None = setting(None, "number of test rows per silo; None: all", least=1, whole=True)
    count: int = setting(2, "number of silos", least=1, whole=True)
    vocabulary_size: int = setting(
        5000, "number of words in the vocabulary: the features of a text", least=1, whole=True
    )
    test_share: float = setting(0.15, "share of all texts held out for testing", above=0, below=1)


def mnist_svhn(
    train: int | None = None, test: int | None = None, seed: int = 0, data: str | Path | None = None
) -> Population:
    """Two silos: handwritten digits (MNIST) and house numbers (SVHN), both as gray images of 28 x 28.

    The paper's network takes 28 x 28 pixels and one channel (1568 = 7·7·32 units after its convolutions). The paper
    does not say how SVHN is converted. Here colors are weighted 0.299, 0.587, 0.114, and images are resized by bilinear
    interpolation. Each silo standardizes its images by the mean and deviation of its own training pixels, without the
    other silo. Both use the test set of their data set. For a short run, `train` and `test` limit the numbers of
    images, drawn by the seed.
    """
    check_settings(_SiloSettings(train, test), "mnist_svhn")
    silos = {}
    sizes = (0, 0)
    for name in ("mnist", "svhn"):
        x, y, x_test, y_test = train_and_test_images(name, data)
        sizes = len(x), len(x_test)  # after the loop: those of SVHN
        rows = _random_rows(len(x), train, seed, purpose=f"{name} train")
        test_rows = _random_rows(len(x_test), test, seed, purpose=f"{name} test")
        images, test_images = (to_gray(part) if name == "svhn" else part for part in (x[rows], x_test[test_rows]))
        scale = ImageScaling(float(images.mean()), float(images.std()) or 1.0)
        silos[name] = scale(0, images), y[rows], scale(0, test_images), y_test[test_rows]
    parts = zip(sizes, _SVHN_SIZES, ("training", "test"), strict=True)
    part = " and ".join(f"{some:,} of its {whole:,} {kind} images" for some, whole, kind in parts if some != whole)
    return from_arrays(silos, seed=seed, note=f"a part of SVHN: {part}" if part else "")


def to_gray(x: Array) -> Array:
    """Return color images ``[n, 3, height, width]`` as gray images of 28 x 28, ``[n, 1, 28, 28]``, in bytes."""
    parts = [np.zeros((0, 1, 28, 28), dtype=np.uint8)]
    for begin in range(0, len(x), 1000):  # all of them as floats would take too much memory
        part = x[begin : begin + 1000].astype(np.float32)
        levels = torch.from_numpy(np.tensordot(part, _GRAY_WEIGHTS, (1, 0)))[:, None]
        small = functional.interpolate(levels, (28, 28), mode="bilinear", align_corners=False)
        parts.append(small.round().to(torch.uint8).numpy())
    return np.concatenate(parts)


def rotated_mnist(
    count: int = 2,
    angle_step: float = 90,
    train: int | None = None,
    test: int | None = None,
    seed: int = 0,
    data: str | Path | None = None,
) -> Population:
    """MNIST in silos with rotated digits: by 0 and 90 degrees as in the paper, or by k·`angle_step` in silo k.

    The paper's two silos have all 60,000 images each, so every image is in both, rotated in one. They share MNIST's
    test set in the same way. With `train`, silo k has the k-th block of `train` images in a random order drawn by the
    seed, which repeats at its end: 20 silos (`count=20, angle_step=18, train=3000`) have no image in common. `test`
    limits the test images in the same way. Rotation is exact by 90, 180 and 270 degrees, else bilinear. Pixels are in
    [0, 1].
    """
    check_settings(_SiloSettings(train, test, count), "rotated_mnist")
    x, y, x_test, y_test = train_and_test_images("mnist", data)
    scale = ImageScaling()
    silos = {}
    for k in range(count):
        angle = k * angle_step
        rows = _cyclic_rows(len(x), train, k, seed=seed)
        test_rows = _cyclic_rows(len(x_test), test, k, seed=seed)
        images, test_images = (scale(0, rotate(part, angle)) for part in (x[rows], x_test[test_rows]))
        silos[f"mnist{angle:g}" if angle else "mnist"] = (images, y[rows], test_images, y_test[test_rows])
    if len(silos) < count:
        raise SettingError(
            f"The 'angle_step' of rotated_mnist must give {count} silos different angles. Got {angle_step!r}."
        )
    return from_arrays(silos, seed=seed)


def newsgroups(
    vocabulary_size: int = 5000,
    test_share: float = 0.15,
    train: int | None = None,
    test: int | None = None,
    seed: int = 0,
    data: str | Path | None = None,
) -> Population:
    """20 Newsgroups in two silos, groups 0 to 9 and groups 10 to 19; a text is a row of TF-IDF numbers.

    The paper's "approximately 8,000" training texts per silo are about 85 % of all 18,846, not the usual split by date.
    So each silo holds out the share `test_share` of its texts, drawn by the seed, for testing. Texts keep their headers
    and quotes. The paper does not say how words are counted. Here it is scikit-learn's TF-IDF, without English stop
    words, over the `vocabulary_size` most frequent terms in the training texts of both silos. Real silos would have to
    agree on these terms. One model outputs all 20 groups. A row takes `vocabulary_size` x 4 bytes: 377 MB in all at
    5,000.
    """
    check_settings(_SiloSettings(train, test, vocabulary_size=vocabulary_size, test_share=test_share), "newsgroups")
    (file,) = locate_files("newsgroups", data)
    table = read_table(file, ("label", "text"))
    y = parse_labels(file, table["label"], {str(group): group for group in range(_GROUP_COUNT)})
    rows = list[tuple[RowIndices, RowIndices]]()
    for k, silo_rows in enumerate((np.flatnonzero(y < _GROUP_COUNT // 2), np.flatnonzero(y >= _GROUP_COUNT // 2))):
        order = silo_rows[stream(seed, 0, _NEWSGROUP_SILOS[k], purpose="newsgroups").permutation(len(silo_rows))]
        test_size = round(len(silo_rows) * test_share)
        rows.append((np.sort(order[test_size:][:train]), np.sort(order[:test_size][:test])))
    from sklearn.feature_extraction.text import TfidfVectorizer  # slow to import

    vectorizer = TfidfVectorizer(max_features=vocabulary_size, stop_words="english", dtype=np.float32)
    features = vectorizer.fit_transform(table["text"][row] for train_rows, _ in rows for row in train_rows)
    first = len(rows[0][0])
    silos = {}
    for name, (silo_rows, test_rows), x in zip(
        _NEWSGROUP_SILOS, rows, (features[:first], features[first:]), strict=True
    ):
        x_test = vectorizer.transform(table["text"][row] for row in test_rows)
        silos[name] = x.toarray(), y[silo_rows], x_test.toarray(), y[test_rows]
    return from_arrays(silos, seed=seed)


def _random_rows(n: int, row_count: int | None, seed: int, purpose: str) -> RowIndices:
    """Return `row_count` random rows of n in rising order, or all n rows for None."""
    return (
        np.arange(n)
        if row_count is None
        else np.sort(stream(seed, 0, ALL_PARTIES, purpose=purpose).permutation(n)[:row_count])
    )


def _cyclic_rows(n: int, row_count: int | None, k: int, seed: int) -> RowIndices:
    """Return the k-th block of `row_count` rows of a cyclic random order of n rows, in rising order."""
    size = n if row_count is None else min(row_count, n)
    order = stream(seed, 0, ALL_PARTIES, purpose="rotated_mnist").permutation(n)
    return np.sort(order[np.arange(k * size, (k + 1) * size) % n])
