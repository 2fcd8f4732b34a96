"""Writers of small generated files in every format that the readers support."""

from __future__ import annotations

import csv
import gzip
import io
import lzma
import struct
import wave
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

_IDX_TYPE_CODES = {"u1": 0x08, "i1": 0x09, "i2": 0x0B, "i4": 0x0C, "f4": 0x0D, "f8": 0x0E}


def write_compressed(data: bytes, file: Path) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes({".gz": gzip.compress, ".xz": lzma.compress}.get(file.suffix, bytes)(data))
    return file


def write_idx(file: Path, array: np.ndarray) -> Path:
    code = _IDX_TYPE_CODES[array.dtype.str[1:]]
    head = bytes([0, 0, code, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return write_compressed(head + array.astype(array.dtype.newbyteorder(">")).tobytes(), file)


def write_csv(file: Path, rows: Iterable[Sequence[object]], encoding: str = "utf-8") -> Path:
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    return write_compressed(text.getvalue().encode(encoding), file)


def numbered_images(n: int = 400, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return 28 x 28 images whose first two pixels hold their index, and labels 0..9 in turn."""
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 256, (n, 28, 28), dtype=np.uint8)
    x[:, 0, 0], x[:, 0, 1] = np.arange(n) % 256, np.arange(n) // 256
    return x, (np.arange(n) % 10).astype(np.uint8)


def write_mnist(folder: Path, n: int = 400) -> Path:
    x, y = numbered_images(n)
    cut = n * 3 // 4
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / "mnist.npz", x_train=x[:cut], y_train=y[:cut], x_test=x[cut:], y_test=y[cut:])
    return folder


def write_emnist_letters(folder: Path, n: int = 400) -> Path:
    x, y = numbered_images(n)
    np.savez(folder / "emnist_lower_aj.npz", x=x, y=y)
    return folder


def write_image_dataset(
    folder: Path, source: str, train: int, test: int, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Write MNIST, CIFAR-10 or Speech Commands as npz and return its distinct images and their labels 0..9."""
    rng = np.random.default_rng(seed)
    shape = {"mnist": (28, 28), "cifar10": (32, 32, 3), "speech": (32, 32)}[source]
    n = train + test
    x = rng.integers(0, 64, (n, *shape), dtype=np.uint8)
    x.reshape(n, -1)[:, :3] = np.stack([np.arange(n) % 64, np.arange(n) // 64, np.zeros(n)], 1)
    y = (np.arange(n) % 10).astype(np.uint8)
    folder.mkdir(parents=True, exist_ok=True)
    if source == "speech":  # every other row belongs to the validation set, which no reader returns
        split = np.repeat([0, 2], [train, test])
        mixed = {
            "x": np.repeat(x, 2, 0),
            "y": np.repeat(y, 2),
            "split": np.stack([split, np.ones_like(split)], 1).ravel(),
        }
        np.savez(folder / "speech_commands_32x32.npz", **mixed)
    else:
        parts = {"x_train": x[:train], "y_train": y[:train], "x_test": x[train:], "y_test": y[train:]}
        np.savez(folder / f"{source}.npz", **parts)
    return x, y


def write_wave(file: Path, samples: np.ndarray, rate: int = 16_000, channels: int = 1, width: int = 2) -> Path:
    """Write numbers in [-1, 1] as a WAV file; with two channels the samples alternate."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(file), "wb") as out:
        out.setnchannels(channels)
        out.setsampwidth(width)
        out.setframerate(rate)
        out.writeframes((samples * (2 ** (8 * width - 1) - 1)).astype(f"<i{width}").tobytes())
    return file


VOCABULARY = ("good", "bad", "film", ",", "the", "it's")


def write_word_vectors(folder: Path, size: int = 100, name: str = "glove6b_100d_subset.npz") -> Path:
    vectors = np.random.default_rng(0).normal(size=(len(VOCABULARY), size)).astype(np.float16)
    np.savez(folder / name, words=np.array("\n".join(VOCABULARY)), vectors=vectors)
    return folder


def review_rows(accounts: int = 6, texts_per_account: int = 12) -> list[tuple[str, int, str]]:
    """Return (account, label, text) rows: account k has ``texts_per_account`` + k texts that name their label."""
    rows = []
    for account in range(accounts):
        for k in range(texts_per_account + account):
            rows.append((str(account), k % 2, f"The film, {'GOOD' if k % 2 else 'bad'}! {account}"))
    return rows


def write_review_dataset(folder: Path) -> Path:
    write_csv(folder / "rt_critics.csv.xz", [("account", "label", "text"), *review_rows()])
    return write_word_vectors(folder)


def write_tile_sheet(file: Path, tiles: np.ndarray) -> Path:
    """Write tiles ``[50·lines, 32, 32, 3]`` as a lossless image with 50 tiles a line."""
    from PIL import Image

    lines = len(tiles) // 50
    pixels = tiles.reshape(lines, 50, 32, 32, 3).swapaxes(1, 2).reshape(lines * 32, 1600, 3)
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(file, lossless=True)
    return file
