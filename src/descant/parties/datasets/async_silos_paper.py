"""The silos of "Asynchronous Collaborative Learning Across Data Silos" (Tuor, Lockhart and Magazzeni, 2021), §7.1.

Two parties each, with large data of their own that differ. The paper prints the sizes of the training sets and nothing
of how data are prepared: what is ours is said at each. Its networks are :func:`descant.models.cnn` with
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
from ..data_files import locate_files
from ..images import ImageScaling, rotate, train_and_test_images
from ..partition import RowIndices
from ..party import Array
from ..population import Population, from_arrays
from ..readers import parse_labels, read_table

_GRAY_WEIGHTS = np.array([0.299, 0.587, 0.114], dtype=np.float32)  # of red, green and blue (ITU-R BT.601)
_SVHN_SIZES = (73257, 26032)  # pictures to train and to test that it has in all
_GROUP_COUNT = 20
_NEWSGROUP_SILOS = ("20ng1", "20ng2")


@dataclass(frozen=True)
class _SiloSettings:
    train: int | None = setting(None, "how many rows a silo trains on; None: all that there are", least=1, whole=True)
    test: int | None = setting(None, "how many rows a silo is tested on; None: all that there are", least=1, whole=True)
    count: int = setting(2, "how many silos", least=1, whole=True)
    vocabulary_size: int = setting(5000, "how many words have a number in a text's row", least=1, whole=True)
    test_share: float = setting(0.15, "the share of all texts that silos are tested on", above=0, below=1)


def mnist_svhn(
    train: int | None = None, test: int | None = None, seed: int = 0, data: str | Path | None = None
) -> Population:
    """Two silos: handwritten digits (MNIST) and house numbers (SVHN), both as grey pictures of 28 x 28.

    28 x 28 and one channel are what the paper's network takes (1568 = 7·7·32 units behind its convolutions); it does
    not say how SVHN is brought to it. Here colours are weighed 0.299, 0.587, 0.114, and the picture is resized by
    bilinear interpolation. Each silo takes its own mean and deviation over all its training pixels out of its pictures,
    which needs nobody else. Both have the test set that their data come with. `train` and `test` take so many of them,
    drawn by the seed, for a short run.
    """
    check_settings(_SiloSettings(train, test), "mnist_svhn")
    silos = {}
    sizes = (0, 0)
    for name in ("mnist", "svhn"):
        x, y, x_test, y_test = train_and_test_images(name, data)
        sizes = len(x), len(x_test)  # in the end those of SVHN
        rows = _random_rows(len(x), train, seed, purpose=f"{name} train")
        test_rows = _random_rows(len(x_test), test, seed, purpose=f"{name} test")
        pictures, test_pictures = (to_gray(part) if name == "svhn" else part for part in (x[rows], x_test[test_rows]))
        scale = ImageScaling(float(pictures.mean()), float(pictures.std()) or 1.0)
        silos[name] = scale(0, pictures), y[rows], scale(0, test_pictures), y_test[test_rows]
    parts = zip(sizes, _SVHN_SIZES, ("training", "test"), strict=True)
    part = " and ".join(f"{some:,} of its {whole:,} {kind} pictures" for some, whole, kind in parts if some != whole)
    return from_arrays(silos, seed=seed, note=f"a part of SVHN: {part}" if part else "")


def to_gray(x: Array) -> Array:
    """Pictures in colour ``[n, 3, height, width]`` as grey ones of 28 x 28, ``[n, 1, 28, 28]``, in bytes."""
    parts = [np.zeros((0, 1, 28, 28), dtype=np.uint8)]
    for begin in range(0, len(x), 1000):  # all of them in floating point would be large
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
    """MNIST in silos whose digits are turned: upright and by 90 degrees as in the paper, or by k·`step` in silo k.

    The paper's two silos have all 60,000 pictures each, so every picture is in both, turned; they share MNIST's test
    set likewise. With `train`, silo k has the k-th so many of the pictures in an order drawn by the seed, which begins
    again at its end: 20 silos (`count=20, step=18, train=3000`) have no picture in common. `test` takes so many test
    pictures in the same way. Turning is exact by 90, 180 and 270, else bilinear. Pixels are in [0, 1].
    """
    check_settings(_SiloSettings(train, test, count), "rotated_mnist")
    x, y, x_test, y_test = train_and_test_images("mnist", data)
    scale = ImageScaling()
    silos = {}
    for k in range(count):
        angle = k * angle_step
        rows, test_rows = (
            _cyclic_rows(len(part), wanted, k, seed=seed) for part, wanted in ((x, train), (x_test, test))
        )
        pictures = (scale(0, rotate(part, angle)) for part in (x[rows], x_test[test_rows]))
        silos[f"mnist{angle:g}" if angle else "mnist"] = (next(pictures), y[rows], next(pictures), y_test[test_rows])
    if len(silos) < count:
        raise SettingError(f"The 'step' of rotated_mnist must tell {count} silos apart. Got {angle_step!r}.")
    return from_arrays(silos, seed=seed)


def newsgroups(
    vocabulary_size: int = 5000,
    test_share: float = 0.15,
    train: int | None = None,
    test: int | None = None,
    seed: int = 0,
    data: str | Path | None = None,
) -> Population:
    """20 Newsgroups in two silos: one has groups 0 to 9 and the other 10 to 19; a text is a row of TF-IDF numbers.

    The paper's "approximately 8,000" training texts a silo are about 85 % of all 18,846, not the usual cut by date: so
    each silo keeps a share of its texts, `held_out`, drawn by the seed, to be tested on. Texts are as they are, with
    their headers and quotes. The paper does not say how words are counted: here scikit-learn's TF-IDF, without English
    stop words, over the `words` terms that are most frequent in the training texts of both silos, who would have to
    agree on them. All 20 groups are outputs of one model. A row takes `words` x 4 bytes: 377 MB in all at 5,000.
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
    from sklearn.feature_extraction.text import TfidfVectorizer  # here, because it takes a second

    vectorizer = TfidfVectorizer(max_features=vocabulary_size, stop_words="english", dtype=np.float32)
    features = vectorizer.fit_transform(table["text"][row] for own, _ in rows for row in own)  # the rows of both silos
    first = len(rows[0][0])
    silos = {}
    for name, (silo_rows, test_rows), x in zip(
        _NEWSGROUP_SILOS, rows, (features[:first], features[first:]), strict=True
    ):
        x_test = vectorizer.transform(table["text"][row] for row in test_rows)
        silos[name] = x.toarray(), y[silo_rows], x_test.toarray(), y[test_rows]
    return from_arrays(silos, seed=seed)


def _random_rows(n: int, row_count: int | None, seed: int, purpose: str) -> RowIndices:
    """So many of n rows, in rising order."""
    return (
        np.arange(n)
        if row_count is None
        else np.sort(stream(seed, 0, ALL_PARTIES, purpose=purpose).permutation(n)[:row_count])
    )


def _cyclic_rows(n: int, row_count: int | None, k: int, seed: int) -> RowIndices:
    """The k-th so many of n rows in a drawn order that begins again at its end, in rising order."""
    size = n if row_count is None else min(row_count, n)
    order = stream(seed, 0, ALL_PARTIES, purpose="rotated_mnist").permutation(n)
    return np.sort(order[np.arange(k * size, (k + 1) * size) % n])
