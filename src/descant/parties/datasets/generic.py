"""Other data sets over parties, by any split: images of the data folder, and your own files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ...core.seeds import ALL_PARTIES, stream
from .. import partition
from ..images import ImageScaling, all_images, scaling_by_color
from ..population import Population, from_rows
from ..readers import FIRST_ROW, damaged_file_error, parse_numbers, read_header, read_npz, read_table, validate_labels


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
) -> Population:
    """CIFAR-10 over `count` parties: color images [3, 32, 32] of ten classes, standardized by channel.

    `split` and its settings are those of :func:`.partition.split_rows`. Images of party k are rotated by `angles[k]`
    (cyclic), in degrees.
    """
    x, y = all_images("cifar10", data)
    rows = partition.split_rows(
        y, split, count, stream(seed, 0, ALL_PARTIES, purpose="cifar10"), alpha, classes, sigma, exponent
    )
    return from_rows(x, y, rows, test=test, seed=seed, prepare=scaling_by_color(x, angles))


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
) -> Population:
    """SVHN over `count` parties: house numbers [3, 32, 32], standardized by channel; settings as for CIFAR-10."""
    x, y = all_images("svhn", data)
    rows = partition.split_rows(
        y, split, count, stream(seed, 0, ALL_PARTIES, purpose="svhn"), alpha, classes, sigma, exponent
    )
    return from_rows(x, y, rows, test=test, seed=seed, prepare=scaling_by_color(x, angles))


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
) -> Population:
    """Your npz file over `count` parties; `x` and `y` name its arrays. Bytes become numbers in [0, 1]."""
    features, labels = read_npz(file, (x, y))
    shapes = f"{x!r} has shape {features.shape} of {features.dtype}, and {y!r} {labels.shape} of {labels.dtype}"
    if features.ndim < 2 or features.dtype.kind not in "fiub" or features.shape[:1] != labels.shape:
        raise damaged_file_error(Path(file), shapes, "numbers, one row per sample, and one label per row")
    labels = validate_labels(file, labels, int(labels.max(initial=0)) + 1)
    rows = partition.split_rows(
        labels, split, count, stream(seed, 0, ALL_PARTIES, purpose="npz"), alpha, classes, sigma, exponent
    )
    return from_rows(
        features, labels, rows, test=test, seed=seed, prepare=ImageScaling() if features.dtype == np.uint8 else None
    )


def csv(
    file: str | Path,
    label_column: str = "label",
    party_column: str | None = None,
    min_rows: int = 2,
    count: int = 10,
    split: str = "dirichlet",
    alpha: float = 0.1,
    classes: int = 2,
    sigma: float = 2.0,
    exponent: float = 2.0,
    test: float = 0.2,
    seed: int = 0,
) -> Population:
    """Your CSV file: a party for each value of `party_column` with at least `min_rows` rows, or a split.

    Without `party_column` the rows are split over `count` parties by `split`. `label_column` names the column of
    labels. All other columns are features and must be numbers.
    """
    non_features = {label_column, party_column}
    columns = [name for name in read_header(file) if name not in non_features]
    if not columns:
        raise damaged_file_error(
            Path(file), f"it has no column besides {label_column!r}", "columns of numbers, named in the first row"
        )
    features = parse_numbers(file, read_table(file, columns)).astype(np.float32)
    key_columns = read_table(file, [label_column] if party_column is None else [label_column, party_column])
    labels = parse_numbers(file, {label_column: key_columns[label_column]})[:, 0]
    invalid = np.flatnonzero((labels != np.floor(labels)) | (labels < 0))
    if len(invalid):
        problem = f"row {FIRST_ROW + invalid[0]} of column {label_column!r} holds {labels[invalid[0]]:g}"
        raise damaged_file_error(Path(file), problem, "labels that are whole numbers >= 0")
    y = labels.astype(np.int64)
    if party_column is not None:
        return from_rows(features, y, partition.by_group(key_columns[party_column], min_rows), test=test, seed=seed)
    rows = partition.split_rows(
        y, split, count, stream(seed, 0, ALL_PARTIES, purpose="csv"), alpha, classes, sigma, exponent
    )
    return from_rows(features, y, rows, test=test, seed=seed)
