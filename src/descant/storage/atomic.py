"""The one place that writes what must survive: files, renames, syncs and commits, each on the disk when it returns.

Every change passes through :func:`_do`, one at a time, so that a test that dies there has died at each of them.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator
from mmap import mmap
from pathlib import Path
from typing import Any

from ..errors import StateError


def _do(change: Callable[..., Any], *arguments: Any) -> Any:
    return change(*arguments)


_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)  # Windows has no such flag
PRIVATE_MODE = 0o600  # the mode of a file that only its owner may read


def make_folder(folder: Path, mode: int = 0o777) -> None:
    """A folder, with its parents as far as they are missing."""
    if not folder.is_dir():
        make_folder(folder.parent)
        _do(os.mkdir, folder, mode)
        sync_folder(folder.parent)


def write(file: Path, data: bytes | mmap | Iterator[bytes], mode: int = 0o666) -> None:
    """A new file with these bytes, which may come in parts."""
    _append(file, data, os.O_CREAT | os.O_TRUNC, mode=mode)


def write_once(file: Path, data: bytes, mode: int = 0o666) -> None:
    """A new file with these bytes; FileExistsError if there is one already, and that one is not touched."""
    _append(file, data, os.O_CREAT | os.O_EXCL, mode=mode)
    sync_folder(file.parent)


def append(file: Path, data: bytes, size: int) -> None:
    """These bytes behind a file's first ones, in place of what a write that broke off has left there."""
    found = file.stat().st_size
    if found < size:
        raise StateError(f"{file} has lost {size - found} of its {size} bytes since it was written. Restore it.")
    if found > size:
        truncate(file, size)
    _append(file, data, 0)


def write_with(file: Path, writer: Callable[[Path], None]) -> None:
    """A new file that another library writes."""
    _do(writer, file)
    _sync(file, os.O_RDWR)


def replace(file: Path, data: bytes | mmap | Iterator[bytes], temporary_name: str, mode: int = 0o666) -> None:
    """A file's new content, whole or not at all: under another name first, then one rename makes it count."""
    write(file.with_name(temporary_name), data, mode)
    sync_folder(file.parent)  # what the file speaks of is there before it
    rename(file.with_name(temporary_name), file)


def rename(file: Path, to: Path) -> None:
    """The file under another name of the same folder, in place of what had it."""
    _do(os.replace, file, to)
    sync_folder(to.parent)


def overwrite_with_zeros(file: Path) -> None:
    """Zeros in place of a file's bytes, if the file system writes in place; copies that it keeps are out of reach."""
    descriptor = open_no_follow(file, os.O_WRONLY)
    try:
        for begin in range(0, size := os.fstat(descriptor).st_size, 2**20):
            _write_all(descriptor, bytes(min(2**20, size - begin)))
        _do(os.fsync, descriptor)
    finally:
        os.close(descriptor)


def truncate(file: Path, size: int) -> None:
    """Only the first bytes of a file."""
    _do(os.truncate, file, size)
    _sync(file, os.O_RDWR)


def remove(file: Path) -> None:
    """No such file or empty folder any more."""
    if file.is_dir():
        _do(os.rmdir, file)
    elif file.exists():
        _do(os.unlink, file)


def commit(connection: sqlite3.Connection) -> None:
    """What was done in an open transaction counts; SQLite syncs by itself."""
    _do(connection.execute, "COMMIT")


def sync_folder(folder: Path) -> None:
    """The names in a folder are on the disk."""
    if os.name != "nt":  # which has no such thing
        _sync(folder, os.O_RDONLY)


def open_no_follow(file: Path, flags: int, mode: int = 0o666) -> int:
    """A descriptor of a file that is to be overwritten: never of what a link points to, which may be anybody's."""
    try:
        return os.open(file, flags | _NO_FOLLOW, mode)
    except OSError as error:
        if file.is_symlink():
            raise StateError(
                f"{file} is a link, which Descant has not made. Look where it leads, and remove it."
            ) from error
        raise


def _append(file: Path, data: bytes | mmap | Iterator[bytes], flags: int, mode: int = 0o666) -> None:
    descriptor = open_no_follow(file, os.O_WRONLY | os.O_APPEND | flags, mode)
    try:
        for part in data if isinstance(data, Iterator) else (data,):
            _write_all(descriptor, part)
        _do(os.fsync, descriptor)
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, data: bytes | mmap) -> None:
    remaining = memoryview(data)
    while remaining:
        remaining = remaining[_do(os.write, descriptor, remaining) :]


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        _do(os.fsync, descriptor)
    finally:
        os.close(descriptor)
