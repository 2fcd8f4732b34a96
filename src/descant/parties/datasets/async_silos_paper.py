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

from ...core.seeds import EVERYBODY, stream
from ...core.settings import check, setting
from ...errors import SettingError
from ..data_files import locate
from ..images import Scaling, image_sets, rotate
from ..partition import Rows
from ..party import Array
from ..population import People, from_arrays
from ..readers import read_labels, read_table

_GREY = np.array([0.299, 0.587, 0.114], dtype=np.float32)  # of red, green and blue (ITU-R BT.601)
_SVHN = (73257, 26032)  # pictures to train and to test that it has in all
_GROUPS = 20
_NEWS = ("20ng1", "20ng2")


@dataclass(frozen=True)
class _Silos:
    train: int | None = setting(None, "how many rows a silo trains on; None: all that there are", least=1, whole=True)
    test: int | None = setting(None, "how many rows a silo is tested on; None: all that there are", least=1, whole=True)
    count: int = setting(2, "how many silos", least=1, whole=True)
    words: int = setting(5000, "how many words have a number in a text's row", least=1, whole=True)
    held_out: float = setting(0.15, "the share of all texts that silos are tested on", above=0, below=1)


def mnist_svhn(
    train: int | None = None, test: int | None = None, seed: int = 0, data: str | Path | None = None
) -> People:
    """Two silos: handwritten digits (MNIST) and house numbers (SVHN), both as grey pictures of 28 x 28.

    28 x 28 and one channel are what the paper's network takes (1568 = 7·7·32 units behind its convolutions); it does
    not say how SVHN is brought to it. Here colours are weighed 0.299, 0.587, 0.114, and the picture is resized by
    bilinear interpolation. Each silo takes its own mean and deviation over all its training pixels out of its pictures,
    which needs nobody else. Both have the test set that their data come with. `train` and `test` take so many of them,
    drawn by the seed, for a short run.
    """
    check(_Silos(train, test), "mnist_svhn")
    silos, found = {}, (0, 0)
    for name in ("mnist", "svhn"):
        x, y, x_test, y_test = image_sets(name, data)
        found = len(x), len(x_test)  # in the end those of SVHN
        rows = _drawn(len(x), train, seed, f"{name} train")
        tests = _drawn(len(x_test), test, seed, f"{name} test")
        pictures, tested = (grey(part) if name == "svhn" else part for part in (x[rows], x_test[tests]))
        scale = Scaling(float(pictures.mean()), float(pictures.std()) or 1.0)
        silos[name] = scale(0, pictures), y[rows], scale(0, tested), y_test[tests]
    parts = zip(found, _SVHN, ("training", "test"), strict=True)
    part = " and ".join(f"{some:,} of its {whole:,} {kind} pictures" for some, whole, kind in parts if some != whole)
    return from_arrays(silos, seed=seed, note=f"a part of SVHN: {part}" if part else "")


def grey(x: Array) -> Array:
    """Pictures in colour ``[n, 3, height, width]`` as grey ones of 28 x 28, ``[n, 1, 28, 28]``, in bytes."""
    parts = [np.zeros((0, 1, 28, 28), dtype=np.uint8)]
    for begin in range(0, len(x), 1000):  # all of them in floating point would be large
        part = x[begin : begin + 1000].astype(np.float32)
        levels = torch.from_numpy(np.tensordot(part, _GREY, (1, 0)))[:, None]
        small = functional.interpolate(levels, (28, 28), mode="bilinear", align_corners=False)
        parts.append(small.round().to(torch.uint8).numpy())
    return np.concatenate(parts)


def rotated_mnist(
    count: int = 2,
    step: float = 90,
    train: int | None = None,
    test: int | None = None,
    seed: int = 0,
    data: str | Path | None = None,
) -> People:
    """MNIST in silos whose digits are turned: upright and by 90 degrees as in the paper, or by k·`step` in silo k.

    The paper's two silos have all 60,000 pictures each, so every picture is in both, turned; they share MNIST's test
    set likewise. With `train`, silo k has the k-th so many of the pictures in an order drawn by the seed, which begins
    again at its end: 20 silos (`count=20, step=18, train=3000`) have no picture in common. `test` takes so many test
    pictures in the same way. Turning is exact by 90, 180 and 270, else bilinear. Pixels are in [0, 1].
    """
    check(_Silos(train, test, count), "rotated_mnist")
    x, y, x_test, y_test = image_sets("mnist", data)
    scale, silos = Scaling(), {}
    for k in range(count):
        angle = k * step
        rows, tests = (_turn(len(part), wanted, k, seed) for part, wanted in ((x, train), (x_test, test)))
        pictures = (scale(0, rotate(part, angle)) for part in (x[rows], x_test[tests]))
        silos[f"mnist{angle:g}" if angle else "mnist"] = (next(pictures), y[rows], next(pictures), y_test[tests])
    if len(silos) < count:
        raise SettingError(f"The 'step' of rotated_mnist must tell {count} silos apart. Got {step!r}.")
    return from_arrays(silos, seed=seed)


def newsgroups(
    words: int = 5000,
    held_out: float = 0.15,
    train: int | None = None,
    test: int | None = None,
    seed: int = 0,
    data: str | Path | None = None,
) -> People:
    """20 Newsgroups in two silos: one has groups 0 to 9 and the other 10 to 19; a text is a row of TF-IDF numbers.

    The paper's "approximately 8,000" training texts a silo are about 85 % of all 18,846, not the usual cut by date: so
    each silo keeps a share of its texts, `held_out`, drawn by the seed, to be tested on. Texts are as they are, with
    their headers and quotes. The paper does not say how words are counted: here scikit-learn's TF-IDF, without English
    stop words, over the `words` terms that are most frequent in the training texts of both silos, who would have to
    agree on them. All 20 groups are outputs of one model. A row takes `words` x 4 bytes: 377 MB in all at 5,000.
    """
    check(_Silos(train, test, words=words, held_out=held_out), "newsgroups")
    (file,) = locate("newsgroups", data)
    table = read_table(file, ("label", "text"))
    y = read_labels(file, table["label"], {str(group): group for group in range(_GROUPS)})
    rows = list[tuple[Rows, Rows]]()
    for k, own in enumerate((np.flatnonzero(y < _GROUPS // 2), np.flatnonzero(y >= _GROUPS // 2))):
        order = own[stream(seed, 0, _NEWS[k], "newsgroups").permutation(len(own))]
        cut = round(len(own) * held_out)
        rows.append((np.sort(order[cut:][:train]), np.sort(order[:cut][:test])))
    from sklearn.feature_extraction.text import TfidfVectorizer  # here, because it takes a second

    counter = TfidfVectorizer(max_features=words, stop_words="english", dtype=np.float32)
    counted = counter.fit_transform(table["text"][row] for own, _ in rows for row in own)  # the rows of both silos
    first = len(rows[0][0])
    silos = {}
    for name, (own, tests), x in zip(_NEWS, rows, (counted[:first], counted[first:]), strict=True):
        x_test = counter.transform(table["text"][row] for row in tests)
        silos[name] = x.toarray(), y[own], x_test.toarray(), y[tests]
    return from_arrays(silos, seed=seed)


def _drawn(n: int, wanted: int | None, seed: int, purpose: str) -> Rows:
    """So many of n rows, in rising order."""
    return np.arange(n) if wanted is None else np.sort(stream(seed, 0, EVERYBODY, purpose).permutation(n)[:wanted])


def _turn(n: int, wanted: int | None, k: int, seed: int) -> Rows:
    """The k-th so many of n rows in a drawn order that begins again at its end, in rising order."""
    size = n if wanted is None else min(wanted, n)
    order = stream(seed, 0, EVERYBODY, "rotated_mnist").permutation(n)
    return np.sort(order[np.arange(k * size, (k + 1) * size) % n])
