"""Readers of files as arrays; an error names the file, the row and the expected content. Nothing is unpickled.

Each reader takes one file in its original format: npz, IDX (MNIST), CIFAR's binary batches, CSV with named columns,
WAV.
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

from ..core.settings import unknown_name_error
from ..errors import PartyError
from .partition import RowIndices
from .party import Array, check_finite

_READ_ERRORS: tuple[type[Exception], ...] = (OSError, EOFError, ValueError, KeyError, MemoryError)
_READ_ERRORS += (zlib.error, lzma.LZMAError, zipfile.BadZipFile, struct.error, wave.Error)
_READ_ERRORS += (NotImplementedError, RuntimeError)  # a zip with an unknown compression or a password
_READ_ERRORS += (tokenize.TokenError, SyntaxError, TypeError, OverflowError)  # from a damaged npy header
_IDX_DTYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}  # big-endian

_MAX_FIELD_CHARACTERS = 2**24  # per field: Python's default of 131,072 is too small for some newsgroup texts

FIRST_ROW = 2  # of the data in a CSV file: as in a spreadsheet, the column names are row 1


@contextmanager
def read_errors(file: Path, expected: str) -> Iterator[None]:
    """Convert any read error inside into one that names the file."""
    try:
        yield
    except _READ_ERRORS as error:
        if isinstance(error, FileNotFoundError):
            raise PartyError(f"There is no file {file}. Expected {expected}.") from error
        reason = (str(error).strip().splitlines() or ["it is damaged"])[0]
        if "pickle" in reason:  # numpy's message would suggest allow_pickle
            reason = "it holds objects, or no arrays at all"
        raise damaged_file_error(file, f"{reason} ({type(error).__name__})", expected) from error


def damaged_file_error(file: Path, problem: str, expected: str) -> PartyError:
    """Return the error for a damaged or unexpected file."""
    return PartyError(f"{file} cannot be used: {problem}. Expected {expected}. Download the file again, or correct it.")


def read_npz(file: str | Path, names: Sequence[str]) -> tuple[Array, ...]:
    """Return named arrays of an npz file."""
    file = Path(file)
    expected = f"an npz file with {', '.join(names)}, plain arrays of numbers or text"
    with read_errors(file, expected), file.open("rb") as stream, warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="Reading", category=UserWarning
        )  # files written by Python 2 are accepted
        archive = np.load(stream, allow_pickle=False)  # noqa: TID251
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise damaged_file_error(file, "it holds one array without a name", expected)
        with archive:
            missing = [name for name in names if name not in archive.files]
            if missing:
                raise damaged_file_error(
                    file, f"it has no {missing[0]!r}, only {', '.join(archive.files) or 'nothing'}", expected
                )
            arrays = tuple(archive[name] for name in names)
    for name, array in zip(names, arrays, strict=True):
        if not isinstance(array, np.ndarray):
            raise damaged_file_error(file, f"its {name!r} is no array", expected)
        if array.dtype.kind == "f":
            check_finite(array, torch.float64, f"{name!r} in {file}")
    return arrays


def read_idx(file: str | Path) -> Array:
    """Return the array of an IDX file, the format of the original MNIST; it may be compressed."""
    file = Path(file)
    expected = "an IDX file (two zero bytes, a type, the number of dimensions, their sizes, the values)"
    with read_errors(file, expected):
        data = _read_bytes(file)
    if len(data) < 4 or data[:2] != b"\0\0" or data[2] not in _IDX_DTYPES or len(data) < 4 + 4 * data[3] or not data[3]:
        raise damaged_file_error(file, f"it begins with {data[:4].hex(' ') or 'nothing'}", expected)
    data_start = 4 + 4 * data[3]
    shape = struct.unpack(f">{data[3]}I", data[4:data_start])
    dtype = np.dtype(_IDX_DTYPES[data[2]])
    row = dtype.itemsize * math.prod(shape[1:])
    if len(data) - data_start != row * shape[0]:
        complete_rows = (len(data) - data_start) // row if row else 0
        problem = (
            f"it ends in row {complete_rows}" if complete_rows < shape[0] else f"it continues after row {shape[0] - 1}"
        )
        raise damaged_file_error(
            file, problem, f"{shape[0]} rows of {row} bytes, {data_start + row * shape[0]} bytes in all"
        )
    return np.frombuffer(data, dtype, offset=data_start).reshape(shape).astype(dtype.newbyteorder("="), copy=False)


def read_cifar(file: str | Path, classes: int = 10) -> tuple[Array, Array]:
    """Return images ``[n, 3, 32, 32]`` and labels of one binary batch of CIFAR-10 or CIFAR-100 (fine labels)."""
    file = Path(file)
    label_bytes = {10: 1, 100: 2}[classes]  # bytes of labels before each image
    size = label_bytes + 3 * 32 * 32
    expected = f"rows of {size} bytes: {label_bytes} of labels and 3072 of an image"
    with read_errors(file, expected):
        data = np.frombuffer(_read_bytes(file), np.uint8)
    if not len(data) or len(data) % size:
        raise damaged_file_error(
            file, f"it ends in row {len(data) // size} after {len(data) % size} of its bytes", expected
        )
    rows = data.reshape(-1, size)
    y = validate_labels(file, rows[:, label_bytes - 1], classes)
    return rows[:, label_bytes:].reshape(-1, 3, 32, 32), y


def read_wave(file: str | Path, rate: int = 16_000) -> Array:
    """Return the samples of a WAV file (16-bit PCM, one channel) as numbers in [-1, 1)."""
    file = Path(file)
    expected = f"a WAV file of 16-bit PCM, one channel, {rate} samples per second"
    with read_errors(file, expected), file.open("rb") as opened, wave.open(opened) as sound:
        parameters = sound.getparams()
        data = sound.readframes(parameters.nframes)
    if (parameters.nchannels, parameters.sampwidth, parameters.framerate) != (1, 2, rate):
        channels = f"{parameters.nchannels} channels of {8 * parameters.sampwidth} bits"
        raise damaged_file_error(file, f"it has {channels}, {parameters.framerate} samples per second", expected)
    if not data or len(data) != 2 * parameters.nframes:
        raise damaged_file_error(file, f"it ends after {len(data) // 2} of {parameters.nframes} samples", expected)
    return np.frombuffer(data, "<i2").astype(np.float32) / 2**15


def read_svhn(file: str | Path) -> tuple[Array, Array]:
    """Return images ``[n, 32, 32, 3]`` and labels of one of SVHN's MATLAB files, where label 10 means 0."""
    file = Path(file)
    expected = "a MATLAB file with X [32, 32, 3, n] and y [n, 1], labels from 1 to 10"
    from scipy.io import loadmat  # slow to import, and rarely needed

    with read_errors(file, expected), file.open("rb") as opened:
        try:
            variables = loadmat(opened, variable_names=("X", "y"))  # reads numbers only and executes nothing
        except Exception as error:  # a damaged file may raise anything in scipy
            raise damaged_file_error(file, f"{error} ({type(error).__name__})", expected) from error
        x = variables["X"]
        y = variables["y"]
    if x.ndim != 4 or y.shape != (x.shape[-1], 1) or y.dtype.kind not in "iu" or y.min(initial=1) < 1:
        raise damaged_file_error(file, f"X has shape {x.shape} and y {y.shape} of {y.dtype}", expected)
    return x.transpose(3, 0, 1, 2), validate_labels(file, y[:, 0] - 10 * (y[:, 0] == 10), 10)


def read_table(
    file: str | Path, columns: Sequence[str], header: Sequence[str] | None = None, encoding: str = "utf-8-sig"
) -> dict[str, list[str]]:
    """Return named columns of a CSV file, which may be compressed; `header` gives the names if the file has none.

    UTF-8 may begin with the byte order mark that Excel writes.
    """
    format_name = f"a CSV file in {encoding.removesuffix('-sig')}"
    file = Path(file)
    expected = f"{format_name} with {'the columns ' if columns else ''}{', '.join(columns) or 'columns'}"
    with read_errors(file, expected), _open_text(file, encoding) as text, _long_fields():
        lines = csv.reader(text, strict=True)
        names = list(header or [])
        row = 0
        try:
            row, names = (0, names) if names else (1, next(lines, []))
            duplicates = [name for name in columns if names.count(name) > 1]
            if duplicates:
                raise damaged_file_error(
                    file, f"two columns are named {duplicates[0]!r}", "a unique name for every column"
                )
            for name in columns:
                if name not in names:
                    raise damaged_file_error(
                        file, unknown_name_error("column", name, names).args[0].rstrip("."), expected
                    )
            indices = [names.index(name) for name in columns]
            values: list[list[str]] = [[] for _ in columns]
            for line in lines:
                row += 1
                if len(line) != len(names):
                    raise damaged_file_error(file, f"row {row} has {len(line)} fields", f"{len(names)} fields per row")
                for column, index in zip(values, indices, strict=True):
                    column.append(line[index])
        except csv.Error as error:
            raise damaged_file_error(file, f"row {row + 1}: {error}", expected) from error
        except UnicodeDecodeError as error:
            reason = f"after row {row} there is a byte {error.object[error.start]:#04x}: {error.reason}"
            raise damaged_file_error(file, reason, expected) from error
    if row < FIRST_ROW - bool(header):
        raise damaged_file_error(file, "it has no rows", expected)
    return dict(zip(columns, values, strict=True))


def read_header(file: str | Path, encoding: str = "utf-8-sig") -> list[str]:
    """Return the column names of a CSV file."""
    return next(csv.reader(read_text(file, "a CSV file whose first line names its columns", encoding)), [])


def read_text(file: str | Path, expected: str, encoding: str = "utf-8") -> Iterator[str]:
    """Yield the lines of a text file, which may be compressed."""
    with read_errors(Path(file), expected), _open_text(Path(file), encoding) as text:
        yield from text


def parse_numbers(file: str | Path, table: dict[str, list[str]]) -> Array:
    """Return columns of text as numbers ``[rows, columns]``; raise with the row of the first one that is not finite."""
    for name, values in table.items():
        for row, value in enumerate(values, FIRST_ROW):
            try:
                valid = np.isfinite(float(value))
            except ValueError:
                valid = False
            if not valid:
                raise damaged_file_error(Path(file), f"row {row} of column {name!r} holds {value!r}", "a finite number")
    return np.array([list(map(float, values)) for values in table.values()]).T


def parse_labels(file: Path, values: list[str], label_of: dict[str, int], first_row: int = FIRST_ROW) -> RowIndices:
    """Return the labels of texts as int64; `first_row` is the file's row number of the first text."""
    for row, value in enumerate(values, first_row):
        if value not in label_of:
            raise damaged_file_error(file, f"the label of row {row} is {value!r}", f"one of {', '.join(label_of)}")
    return np.array([label_of[value] for value in values], dtype=np.int64)


def validate_labels(file: str | Path, y: Array, classes: int, label_name: str = "label") -> Array:
    """Return labels as int64; raise unless all are from 0 to `classes` - 1. `label_name` is used in messages."""
    expected = f"{label_name}s that are whole numbers from 0 to {classes - 1}, one per row"
    if y.ndim != 1 or y.dtype.kind not in "iub":
        raise damaged_file_error(Path(file), f"its {label_name}s have shape {y.shape} of {y.dtype}", expected)
    invalid: RowIndices = np.flatnonzero((y < 0) | (y >= classes))
    if len(invalid):
        raise damaged_file_error(Path(file), f"the {label_name} of row {invalid[0]} is {y[invalid[0]]}", expected)
    return y.astype(np.int64)


@contextmanager
def _long_fields() -> Iterator[None]:
    """Allow long fields in CSV files, up to a limit."""
    before = csv.field_size_limit(_MAX_FIELD_CHARACTERS)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _open_file(file: Path) -> BinaryIO:
    if file.suffix == ".gz":
        return cast(BinaryIO, gzip.open(file))
    return cast(BinaryIO, lzma.open(file)) if file.suffix == ".xz" else file.open("rb")


def _read_bytes(file: Path) -> bytes:
    with _open_file(file) as data:
        return data.read()


@contextmanager
def _open_text(file: Path, encoding: str) -> Iterator[TextIO]:
    with _open_file(file) as data, io.TextIOWrapper(data, encoding, newline="") as text:
        yield text
