"""Durable writes: files, renames, syncs and commits, each on disk when its function returns.

Every change passes through :func:`_do`, one at a time, so that a test can simulate a kill at each of them.
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
    """Create a folder and its missing parents."""
    if not folder.is_dir():
        make_folder(folder.parent)
        _do(os.mkdir, folder, mode)
        sync_folder(folder.parent)


def write(file: Path, data: bytes | mmap | Iterator[bytes], mode: int = 0o666) -> None:
    """Write a new file with these bytes, which may come in parts."""
    _append(file, data, os.O_CREAT | os.O_TRUNC, mode=mode)


def write_once(file: Path, data: bytes, mode: int = 0o666) -> None:
    """Write a new file; raise FileExistsError, and change nothing, if it exists."""
    _append(file, data, os.O_CREAT | os.O_EXCL, mode=mode)
    sync_folder(file.parent)


def append(file: Path, data: bytes, size: int) -> None:
    """Append bytes after the first `size` bytes of a file, in place of what an interrupted write left there."""
    found = file.stat().st_size
    if found < size:
        raise StateError(f"{file} has lost {size - found} of its {size} bytes since it was written. Restore it.")
    if found > size:
        truncate(file, size)
    _append(file, data, 0)


def write_with(file: Path, writer: Callable[[Path], None]) -> None:
    """Let another library write a new file, and sync it."""
    _do(writer, file)
    _sync(file, os.O_RDWR)


def replace(file: Path, data: bytes | mmap | Iterator[bytes], temporary_name: str, mode: int = 0o666) -> None:
    """Replace a file's content atomically: write under a temporary name, then rename."""
    write(file.with_name(temporary_name), data, mode)
    sync_folder(file.parent)  # what the file refers to is on disk before it
    rename(file.with_name(temporary_name), file)


def rename(file: Path, to: Path) -> None:
    """Rename a file within its folder, replacing what had that name."""
    _do(os.replace, file, to)
    sync_folder(to.parent)


def overwrite_with_zeros(file: Path) -> None:
    """Overwrite a file's bytes with zeros; a file system that copies on write keeps the old ones out of reach."""
    descriptor = open_no_follow(file, os.O_WRONLY)
    try:
        for begin in range(0, size := os.fstat(descriptor).st_size, 2**20):
            _write_all(descriptor, bytes(min(2**20, size - begin)))
        _do(os.fsync, descriptor)
    finally:
        os.close(descriptor)


def truncate(file: Path, size: int) -> None:
    """Keep only the first `size` bytes of a file."""
    _do(os.truncate, file, size)
    _sync(file, os.O_RDWR)


def remove(file: Path) -> None:
    """Remove a file or an empty folder, if it exists."""
    if file.is_dir():
        _do(os.rmdir, file)
    elif file.exists():
        _do(os.unlink, file)


def commit(connection: sqlite3.Connection) -> None:
    """Commit the open transaction; SQLite syncs by itself."""
    _do(connection.execute, "COMMIT")


def sync_folder(folder: Path) -> None:
    """Sync the names in a folder to disk."""
    if os.name != "nt":  # Windows cannot sync a folder
        _sync(folder, os.O_RDONLY)


def open_no_follow(file: Path, flags: int, mode: int = 0o666) -> int:
    """Open a file for writing; never follow a link, which may lead to another user's file."""
    try:
        return os.open(file, flags | _NO_FOLLOW, mode)
    except OSError as error:
        if file.is_symlink():
            raise StateError(
                f"{file} is a link that Descant did not make. Check where it leads, and remove it."
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
