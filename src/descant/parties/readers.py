"""Files as arrays. What is damaged is refused with the file, the row and what was expected; nothing is ever unpickled.

Each reader takes one file as people have it: npz, IDX (MNIST), CIFAR's binary batches, CSV with named columns, WAV.
"""

from __future__ import annotations

import csv
import gzip
import io
import lzma
import math
import struct
import tokenize
import warnings
import wave
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TextIO, cast

import numpy as np
import torch

from ..core.settings import unknown
from ..errors import PartyError
from .partition import Rows
from .party import Array, check_finite

_DAMAGED: tuple[type[Exception], ...] = (OSError, EOFError, ValueError, KeyError, MemoryError)
_DAMAGED += (zlib.error, lzma.LZMAError, zipfile.BadZipFile, struct.error, wave.Error)
_DAMAGED += (NotImplementedError, RuntimeError)  # a zip that asks for another method or a password
_DAMAGED += (tokenize.TokenError, SyntaxError, TypeError, OverflowError)  # the head of an array that is no longer one
_KINDS = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}  # of IDX, big-endian

_LONGEST = 2**24  # characters of a field: Python's own limit of 131,072 is less than some letters have

FIRST_ROW = 2  # of a CSV file's data: as in a spreadsheet, the names of the columns are row 1


@contextmanager
def reading(file: Path, expected: str) -> Iterator[None]:
    """What goes wrong inside becomes an error that names the file."""
    try:
        yield
    except _DAMAGED as error:
        if isinstance(error, FileNotFoundError):
            raise PartyError(f"There is no file {file}. Expected {expected}.") from error
        reason = (str(error).strip().splitlines() or ["it is damaged"])[0]
        if "pickle" in reason:  # numpy would advise to trust it
            reason = "it holds objects, or no arrays at all"
        raise damaged(file, f"{reason} ({type(error).__name__})", expected) from error


def damaged(file: Path, found: str, expected: str) -> PartyError:
    """The error for a file that is not what it should be."""
    return PartyError(f"{file} cannot be used: {found}. Expected {expected}. Get the file anew, or mend it.")


def read_npz(file: str | Path, names: Sequence[str]) -> tuple[Array, ...]:
    """Named arrays of an npz file."""
    file, expected = Path(file), f"an npz file with {', '.join(names)}, plain arrays of numbers or text"
    with reading(file, expected), file.open("rb") as opened, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Reading", category=UserWarning)  # a file of Python 2 is fine, too
        archive = np.load(opened, allow_pickle=False)  # noqa: TID251
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise damaged(file, "it holds one array without a name", expected)
        with archive:
            missing = [name for name in names if name not in archive.files]
            if missing:
                raise damaged(file, f"it has no {missing[0]!r}, only {', '.join(archive.files) or 'nothing'}", expected)
            arrays = tuple(archive[name] for name in names)
    for name, array in zip(names, arrays, strict=True):
        if not isinstance(array, np.ndarray):
            raise damaged(file, f"its {name!r} is no array", expected)
        if array.dtype.kind == "f":
            check_finite(array, torch.float64, f"{name!r} in {file}")
    return arrays


def read_idx(file: str | Path) -> Array:
    """The array of an IDX file, the form of the original MNIST; packed by gzip or not."""
    file, expected = (
        Path(file),
        "an IDX file (two zero bytes, a type, the number of dimensions, their sizes, the values)",
    )
    with reading(file, expected):
        data = _bytes(file)
    if len(data) < 4 or data[:2] != b"\0\0" or data[2] not in _KINDS or len(data) < 4 + 4 * data[3] or not data[3]:
        raise damaged(file, f"it begins with {data[:4].hex(' ') or 'nothing'}", expected)
    begin = 4 + 4 * data[3]
    shape, kind = struct.unpack(f">{data[3]}I", data[4:begin]), np.dtype(_KINDS[data[2]])
    row = kind.itemsize * math.prod(shape[1:])
    if len(data) - begin != row * shape[0]:
        whole = (len(data) - begin) // row if row else 0
        found = f"it ends in row {whole}" if whole < shape[0] else f"it goes on behind row {shape[0] - 1}"
        raise damaged(file, found, f"{shape[0]} rows of {row} bytes, {begin + row * shape[0]} bytes in all")
    return np.frombuffer(data, kind, offset=begin).reshape(shape).astype(kind.newbyteorder("="), copy=False)


def read_cifar(file: str | Path, classes: int = 10) -> tuple[Array, Array]:
    """Images ``[n, 3, 32, 32]`` and labels of one binary batch of CIFAR-10, or of CIFAR-100 (the fine ones)."""
    file, before = Path(file), {10: 1, 100: 2}[classes]  # bytes of labels before each image
    size = before + 3 * 32 * 32
    expected = f"rows of {size} bytes: {before} of labels and 3072 of an image"
    with reading(file, expected):
        data = np.frombuffer(_bytes(file), np.uint8)
    if not len(data) or len(data) % size:
        raise damaged(file, f"it ends in row {len(data) // size} after {len(data) % size} bytes of it", expected)
    rows = data.reshape(-1, size)
    y = checked_labels(file, rows[:, before - 1], classes)
    return rows[:, before:].reshape(-1, 3, 32, 32), y


def read_wave(file: str | Path, rate: int = 16_000) -> Array:
    """The sound in a WAV file, as numbers in [-1, 1): 16-bit PCM of one channel."""
    file, expected = Path(file), f"a WAV file of 16-bit PCM, one channel, {rate} samples a second"
    with reading(file, expected), file.open("rb") as opened, wave.open(opened) as sound:
        form = sound.getparams()
        data = sound.readframes(form.nframes)
    if (form.nchannels, form.sampwidth, form.framerate) != (1, 2, rate):
        found = f"{form.nchannels} channels of {8 * form.sampwidth} bits, {form.framerate} samples a second"
        raise damaged(file, f"it has {found}", expected)
    if not data or len(data) != 2 * form.nframes:
        raise damaged(file, f"it ends after {len(data) // 2} of {form.nframes} samples", expected)
    return np.frombuffer(data, "<i2").astype(np.float32) / 2**15


def read_svhn(file: str | Path) -> tuple[Array, Array]:
    """Images ``[n, 32, 32, 3]`` and labels of one of SVHN's MATLAB files, in which a 0 has the label 10."""
    file, expected = Path(file), "a MATLAB file with X [32, 32, 3, n] and y [n, 1], labels from 1 to 10"
    from scipy.io import loadmat  # here, because it takes half a second that few need

    with reading(file, expected), file.open("rb") as opened:
        try:
            found = loadmat(opened, variable_names=("X", "y"))  # numbers only: nothing in such a file is ever run
        except Exception as error:  # whatever a damaged file leads scipy into
            raise damaged(file, f"{error} ({type(error).__name__})", expected) from error
        x, y = found["X"], found["y"]
    if x.ndim != 4 or y.shape != (x.shape[-1], 1) or y.dtype.kind not in "iu" or y.min(initial=1) < 1:
        raise damaged(file, f"X has shape {x.shape} and y {y.shape} of {y.dtype}", expected)
    return x.transpose(3, 0, 1, 2), checked_labels(file, y[:, 0] - 10 * (y[:, 0] == 10), 10)


def read_table(
    file: str | Path, columns: Sequence[str], header: Sequence[str] | None = None, encoding: str = "utf-8-sig"
) -> dict[str, list[str]]:
    """Named columns of a CSV file, packed by gzip or xz or not; `header` names them where the file does not.

    UTF-8 may begin with the mark that Excel puts there.
    """
    told = f"a CSV file in {encoding.removesuffix('-sig')}"
    file, expected = Path(file), f"{told} with {'the columns ' if columns else ''}{', '.join(columns) or 'columns'}"
    with reading(file, expected), _text(file, encoding) as text, _long_fields():
        lines, names, row = csv.reader(text, strict=True), list(header or []), 0
        try:
            row, names = (0, names) if names else (1, next(lines, []))
            twice = [name for name in columns if names.count(name) > 1]
            if twice:
                raise damaged(file, f"two columns are called {twice[0]!r}", "a name of its own for every column")
            for name in columns:
                if name not in names:
                    raise damaged(file, unknown("column", name, names).args[0].rstrip("."), expected)
            places = [names.index(name) for name in columns]
            found: list[list[str]] = [[] for _ in columns]
            for line in lines:
                row += 1
                if len(line) != len(names):
                    raise damaged(file, f"row {row} has {len(line)} fields", f"{len(names)} fields a row")
                for column, place in zip(found, places, strict=True):
                    column.append(line[place])
        except csv.Error as error:
            raise damaged(file, f"row {row + 1}: {error}", expected) from error
        except UnicodeDecodeError as error:
            reason = f"behind row {row} there is a byte {error.object[error.start]:#04x}: {error.reason}"
            raise damaged(file, reason, expected) from error
    if row < FIRST_ROW - bool(header):
        raise damaged(file, "it has no rows", expected)
    return dict(zip(columns, found, strict=True))


def read_header(file: str | Path, encoding: str = "utf-8-sig") -> list[str]:
    """The names of the columns of a CSV file."""
    return next(csv.reader(read_text(file, "a CSV file whose first line names its columns", encoding)), [])


def read_text(file: str | Path, expected: str, encoding: str = "utf-8") -> Iterator[str]:
    """The lines of a text file, packed or not."""
    with reading(Path(file), expected), _text(Path(file), encoding) as text:
        yield from text


def numbers(file: str | Path, table: dict[str, list[str]]) -> Array:
    """Columns of text as numbers ``[rows, columns]``; the first that is none, or is not finite, is named by its row."""
    for name, values in table.items():
        for row, value in enumerate(values, FIRST_ROW):
            try:
                fine = np.isfinite(float(value))
            except ValueError:
                fine = False
            if not fine:
                raise damaged(Path(file), f"row {row} of column {name!r} holds {value!r}", "a finite number")
    return np.array([list(map(float, values)) for values in table.values()]).T


def read_labels(file: Path, values: list[str], meaning: dict[str, int], first: int = FIRST_ROW) -> Rows:
    """The labels that texts stand for, as int64; ``first`` is the number of their first row in the file."""
    for row, value in enumerate(values, first):
        if value not in meaning:
            raise damaged(file, f"the label of row {row} is {value!r}", f"one of {', '.join(meaning)}")
    return np.array([meaning[value] for value in values], dtype=np.int64)


def checked_labels(file: str | Path, y: Array, classes: int, kind: str = "label") -> Array:
    """Labels (or what else ``kind`` says) as int64, all of them from 0 to classes-1."""
    expected = f"{kind}s that are whole numbers from 0 to {classes - 1}, one a row"
    if y.ndim != 1 or y.dtype.kind not in "iub":
        raise damaged(Path(file), f"its {kind}s have shape {y.shape} of {y.dtype}", expected)
    bad: Rows = np.flatnonzero((y < 0) | (y >= classes))
    if len(bad):
        raise damaged(Path(file), f"the {kind} of row {bad[0]} is {y[bad[0]]}", expected)
    return y.astype(np.int64)


@contextmanager
def _long_fields() -> Iterator[None]:
    """A text in a CSV file may be long, though not endless."""
    before = csv.field_size_limit(_LONGEST)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _opened(file: Path) -> BinaryIO:
    if file.suffix == ".gz":
        return cast(BinaryIO, gzip.open(file))
    return cast(BinaryIO, lzma.open(file)) if file.suffix == ".xz" else file.open("rb")


def _bytes(file: Path) -> bytes:
    with _opened(file) as data:
        return data.read()


@contextmanager
def _text(file: Path, encoding: str) -> Iterator[TextIO]:
    with _opened(file) as data, io.TextIOWrapper(data, encoding, newline="") as text:
        yield text
