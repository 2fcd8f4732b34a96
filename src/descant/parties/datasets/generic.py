"""Other data sets over parties, by any split: pictures of the data folder, and files of your own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ...core.seeds import EVERYBODY, stream
from .. import partition
from ..images import Scaling, by_color, image_set
from ..population import People, from_rows
from ..readers import FIRST_ROW, checked_labels, damaged, numbers, read_header, read_npz, read_table


def cifar10(
    count: int = 100,
    split: str = "dirichlet",
    alpha: float = 0.1,
    classes: int = 2,
    sigma: float = 2.0,
    exponent: float = 2.0,
    angles: Sequence[float] = (),
    test: float = 0.2,
    seed: int = 0,
    data: str | Path | None = None,
) -> People:
    """CIFAR-10 over `count` parties: pictures [3, 32, 32] of ten kinds of things, standardised by colour.

    `split` and the numbers behind it are those of :func:`.splits.cut`; `angles` turn the images of party k by the k-th.
    """
    x, y = image_set("cifar10", data)
    rows = partition.cut(y, split, count, stream(seed, 0, EVERYBODY, "cifar10"), alpha, classes, sigma, exponent)
    return from_rows(x, y, rows, test, seed, prepare=by_color(x, angles))


def svhn(
    count: int = 100,
    split: str = "dirichlet",
    alpha: float = 0.1,
    classes: int = 2,
    sigma: float = 2.0,
    exponent: float = 2.0,
    angles: Sequence[float] = (),
    test: float = 0.2,
    seed: int = 0,
    data: str | Path | None = None,
) -> People:
    """SVHN over `count` parties: house numbers [3, 32, 32], standardised by colour; settings as for CIFAR-10."""
    x, y = image_set("svhn", data)
    rows = partition.cut(y, split, count, stream(seed, 0, EVERYBODY, "svhn"), alpha, classes, sigma, exponent)
    return from_rows(x, y, rows, test, seed, prepare=by_color(x, angles))


def npz(
    file: str | Path,
    x: str = "x",
    y: str = "y",
    count: int = 10,
    split: str = "dirichlet",
    alpha: float = 0.1,
    classes: int = 2,
    sigma: float = 2.0,
    exponent: float = 2.0,
    test: float = 0.2,
    seed: int = 0,
) -> People:
    """An npz file of yours over `count` parties; `x` and `y` name its arrays. Bytes become numbers in [0, 1]."""
    features, labels = read_npz(file, (x, y))
    found = f"{x!r} has shape {features.shape} of {features.dtype}, and {y!r} {labels.shape} of {labels.dtype}"
    if features.ndim < 2 or features.dtype.kind not in "fiub" or features.shape[:1] != labels.shape:
        raise damaged(Path(file), found, "numbers, one row a sample, and one label a row")
    labels = checked_labels(file, labels, int(labels.max(initial=0)) + 1)
    rows = partition.cut(labels, split, count, stream(seed, 0, EVERYBODY, "npz"), alpha, classes, sigma, exponent)
    return from_rows(features, labels, rows, test, seed, prepare=Scaling() if features.dtype == np.uint8 else None)


def csv(
    file: str | Path,
    label: str = "label",
    account: str | None = None,
    least: int = 2,
    count: int = 10,
    split: str = "dirichlet",
    alpha: float = 0.1,
    classes: int = 2,
    sigma: float = 2.0,
    exponent: float = 2.0,
    test: float = 0.2,
    seed: int = 0,
) -> People:
    """A CSV file of yours: a party for each value of the column `account` with `least` rows, else `count` by a split.

    `label` names the column of labels; all other columns are features, and must be numbers.
    """
    beside = {label, account}
    columns = [name for name in read_header(file) if name not in beside]
    if not columns:
        raise damaged(Path(file), f"it has no column beside {label!r}", "columns of numbers, named in the first row")
    features = numbers(file, read_table(file, columns)).astype(np.float32)
    named = read_table(file, [label] if account is None else [label, account])
    labels = numbers(file, {label: named[label]})[:, 0]
    odd = np.flatnonzero((labels != np.floor(labels)) | (labels < 0))
    if len(odd):
        found = f"row {FIRST_ROW + odd[0]} of column {label!r} holds {labels[odd[0]]:g}"
        raise damaged(Path(file), found, "labels that are whole numbers >= 0")
    y = labels.astype(np.int64)
    if account is not None:
        return from_rows(features, y, partition.by_account(named[account], least), test, seed)
    rows = partition.cut(y, split, count, stream(seed, 0, EVERYBODY, "csv"), alpha, classes, sigma, exponent)
    return from_rows(features, y, rows, test, seed)
