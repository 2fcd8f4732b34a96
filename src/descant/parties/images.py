"""Images as byte arrays ``[n, channels, height, width]``, scaled and rotated when a party is built."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.nn import functional

from ..errors import PartyError
from .dataset_catalog import locate_files
from .party import Array
from .readers import damaged_file_error, read_cifar, read_errors, read_idx, read_npz, read_svhn, validate_labels

_TILE = 32
_COLUMNS = 50  # of a WebP sheet
_LOWER_A = 36  # the label of "a" in EMNIST's by-class split: ten digits and 26 capitals come before
_LETTER_COUNT = 10  # "a" to "j"


LabeledImages: TypeAlias = list[tuple[Array, Array]]
"""Images and labels in parts: the training set, in one part or more, then the test set if there is one."""


_SHAPES = {"mnist": (1, 28, 28), "emnist": (1, 28, 28), "speech": (1, 32, 32)}


def all_images(name: str, data: str | Path | None = None) -> tuple[Array, Array]:
    """Return all images and labels (0..9) of mnist, emnist (a to j), cifar10, svhn or speech."""
    return images_with_test_start(name, data)[:2]


def train_and_test_images(name: str, data: str | Path | None = None) -> tuple[Array, Array, Array, Array]:
    """Return the training set and the data set's own test set: x, y, x_test, y_test."""
    x, y, test_start = images_with_test_start(name, data)
    return x[:test_start], y[:test_start], x[test_start:], y[test_start:]


def images_with_test_start(name: str, data: str | Path | None = None) -> tuple[Array, Array, int]:
    """Return training and test set concatenated, and the row at which the test set begins."""
    xs, ys = zip(*_load_images(name, data), strict=True)
    test_count = len(xs[-1]) if len(xs) > 1 else 0
    return np.concatenate(xs), np.concatenate(ys), sum(map(len, xs)) - test_count


def _load_images(name: str, data: str | Path | None) -> LabeledImages:
    """Return the checked parts of a data set, with images as ``[n, channels, height, width]``."""
    files = locate_files(name, data)
    expected = _SHAPES.get(name, (3, 32, 32))
    pairs = []
    for x, y in _READERS.get(files[0].name, _read_npz_images)(files):
        if x.ndim == 3:
            x = x[:, None]
        elif x.shape[-1] == 3:
            x = x.transpose(0, 3, 1, 2)
        if x.dtype != np.uint8 or x.shape[1:] != expected:
            raise damaged_file_error(
                files[0], f"its images have shape {x.shape[1:]} of {x.dtype}", f"bytes of shape {expected}"
            )
        if len(x) != len(y):
            raise damaged_file_error(files[0], f"it has {len(x)} images and {len(y)} labels", "the same number of both")
        pairs.append((x, y))
    return pairs


def _read_npz_images(files: Sequence[Path]) -> LabeledImages:
    x, x_test, y, y_test = read_npz(files[0], ("x_train", "x_test", "y_train", "y_test"))
    return [(x, validate_labels(files[0], y, 10)), (x_test, validate_labels(files[0], y_test, 10))]


def _read_emnist_letters(files: Sequence[Path]) -> LabeledImages:
    x, y = read_npz(files[0], ("x", "y"))
    return [(x, validate_labels(files[0], y, _LETTER_COUNT))]


def _read_speech_commands(files: Sequence[Path]) -> LabeledImages:
    """Read Speech Commands with its authors' split: training (0), validation (1, left out) and test (2)."""
    x, y, split = read_npz(files[0], ("x", "y", "split"))
    split_labels = validate_labels(files[0], split, 3, label_name="split")
    if not len(x) == len(y) == len(split_labels):
        problem = f"it has {len(x)} images, {len(y)} labels and {len(split_labels)} splits"
        raise damaged_file_error(files[0], problem, "the same number of each")
    y = validate_labels(files[0], y, 10)
    return [(x[split_labels == split_index], y[split_labels == split_index]) for split_index in (0, 2)]


def _read_mnist_idx(files: Sequence[Path]) -> LabeledImages:
    return _read_idx_pairs(files, 10)


def _read_emnist_by_class(files: Sequence[Path]) -> LabeledImages:
    pairs = []
    for x, y in _read_idx_pairs(files, 62):
        chosen = (y >= _LOWER_A) & (y < _LOWER_A + _LETTER_COUNT)
        pairs.append((x[chosen].transpose(0, 2, 1), y[chosen] - _LOWER_A))  # the original images are transposed
    return pairs


def _read_idx_pairs(files: Sequence[Path], classes: int) -> LabeledImages:
    pairs = []
    for file, label_file in zip(files[::2], files[1::2], strict=True):
        x = read_idx(file)
        y = validate_labels(label_file, read_idx(label_file), classes)
        if len(x) != len(y):
            raise damaged_file_error(
                label_file, f"it has {len(y)} labels", f"one for each of the {len(x)} images in {file.name}"
            )
        pairs.append((x, y))
    return pairs


def _read_cifar_batches(files: Sequence[Path]) -> LabeledImages:
    return list(map(read_cifar, files))


def _read_svhn_matlab(files: Sequence[Path]) -> LabeledImages:
    return list(map(read_svhn, files))


def _read_webp_sheets(files: Sequence[Path]) -> LabeledImages:
    """Read a folder of tile sheets, 50 tiles per row, named train_00.webp and so on, with labels.npz."""
    labels = [validate_labels(files[0], y, 10) for y in read_npz(files[0], ("y_train", "y_test"))]
    return [
        (read_sheets(files[0].parent, split, len(y)), y) for split, y in zip(("train", "test"), labels, strict=True)
    ]


def read_sheets(folder: str | Path, split: str, count: int) -> Array:
    """Return the first `count` images of the sheets of a split, ``[count, 32, 32, 3]``."""
    try:
        from PIL import Image
    except ImportError as error:
        raise PartyError("WebP sheets need Pillow: pip install 'descant[images]'.") from error
    folder = Path(folder)
    loaded = 0
    sheets = list[Array]()
    while loaded < count:
        file = folder / f"{split}_{len(sheets):02}.webp"
        with read_errors(file, f"a sheet of tiles of 32 x 32, {_COLUMNS} per row"), Image.open(file) as sheet:
            pixels = np.asarray(sheet.convert("RGB"))
        lines = pixels.shape[0] // _TILE
        if pixels.shape != (lines * _TILE, _COLUMNS * _TILE, 3) or not lines:
            raise damaged_file_error(
                file, f"it has {pixels.shape[1]} x {pixels.shape[0]} pixels", f"{_COLUMNS * _TILE} x n·{_TILE}"
            )
        tiles = pixels.reshape(lines, _TILE, _COLUMNS, _TILE, 3).swapaxes(1, 2).reshape(-1, _TILE, _TILE, 3)
        sheets.append(tiles[: count - loaded])
        loaded += len(sheets[-1])
    return np.concatenate(sheets)


_READERS: dict[str, Callable[[Sequence[Path]], LabeledImages]] = {
    "speech_commands_32x32.npz": _read_speech_commands,
    "train_32x32.mat": _read_svhn_matlab,
    "emnist_lower_aj.npz": _read_emnist_letters,
    "labels.npz": _read_webp_sheets,
    "data_batch_1.bin": _read_cifar_batches,
    **dict.fromkeys(("train-images-idx3-ubyte", "train-images-idx3-ubyte.gz"), _read_mnist_idx),
    **dict.fromkeys(
        ("emnist-byclass-train-images-idx3-ubyte", "emnist-byclass-train-images-idx3-ubyte.gz"), _read_emnist_by_class
    ),
}


def rotate(images: Array, degrees: float) -> Array:
    """Rotate images ``[..., height, width]`` counterclockwise: exact for multiples of 90 degrees, else bilinear.

    Pixels outside are 0.

    >>> rotate(np.array([[[1, 2], [3, 4]]]), 90).tolist()
    [[[2, 4], [1, 3]]]
    """
    quarters, rest = divmod(degrees % 360, 90)
    if rest == 0:
        return np.rot90(images, int(quarters), axes=(-2, -1))
    height, width = images.shape[-2:]
    angle = np.deg2rad(degrees)
    cos = float(np.cos(angle))
    sin = float(np.sin(angle))
    transform = torch.tensor([[[cos, -sin * height / width, 0], [sin * width / height, cos, 0]]], dtype=torch.float32)
    pixels = torch.from_numpy(np.ascontiguousarray(images.reshape(1, -1, height, width), dtype=np.float32))
    grid = functional.affine_grid(transform, [1, 1, height, width], align_corners=False)
    rotated = functional.grid_sample(pixels, grid, align_corners=False).numpy().reshape(images.shape)
    return rotated if images.dtype.kind == "f" else np.rint(rotated).astype(images.dtype)


@dataclass(frozen=True, eq=False)
class ImageScaling:
    """Preprocessing of party k's images: rotation by its angle (`angles` repeat), then (x - mean) / scale."""

    mean: Any = 0.0
    scale: Any = 255.0
    angles: tuple[float, ...] = ()

    def __call__(self, party_index: int, x: Array) -> Array:
        rotated = rotate(x, self.angles[party_index % len(self.angles)]) if self.angles else x
        scaled: Array = np.subtract(rotated, self.mean, dtype=np.float32)
        scaled /= self.scale
        return scaled


def pixel_moments(x: Array) -> tuple[Array, Array]:
    """Return the mean and the standard deviation of every pixel over all images, ``[channels, height, width]``."""
    total = squares = np.zeros(x.shape[1:])
    for part in np.array_split(x, max(1, len(x) // 1000)):  # a whole data set as floats would take too much memory
        numbers = part.astype(np.float32)
        total = total + numbers.sum(0, dtype=np.float64)
        squares = squares + np.square(numbers).sum(0, dtype=np.float64)
    mean = total / len(x)
    deviation = np.sqrt(np.maximum(squares / len(x) - mean**2, 0))
    return mean.astype(np.float32), deviation.astype(np.float32)


def scaling_by_color(x: Array, angles: Sequence[float] = ()) -> ImageScaling:
    """Return the scaling that standardizes each color channel over all pixels of these images."""
    mean, deviation = pixel_moments(x)
    channel_mean = mean.mean((1, 2), keepdims=True)  # [channels, 1, 1]
    scale = np.sqrt((deviation**2 + (mean - channel_mean) ** 2).mean((1, 2), keepdims=True))
    return ImageScaling(channel_mean, scale, tuple(angles))
