"""Buffers for stacks that are too large for memory, in unnamed temporary files.

A file lies in the folder for temporary files (TMPDIR) and disappears with its tensor or its process. Its mapped pages
stay in memory only while the memory is not needed elsewhere.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from ..errors import StateError


def spill_buffer(shape: tuple[int, ...], dtype: torch.dtype, budget: int) -> Tensor:
    """Return an uninitialized tensor: in memory within a budget of bytes, in a file beyond it.

    >>> spill_buffer((2, 3), torch.float32, budget=0).fill_(1).sum()
    tensor(6.)
    """
    size = math.prod(shape) * dtype.itemsize
    if size <= budget:
        return torch.empty(shape, dtype=dtype)
    with allocation_errors(size), tempfile.TemporaryFile(prefix="descant-") as file:
        reserve(file.fileno(), size)
        mapping = mmap.mmap(file.fileno(), size)
    return torch.frombuffer(mapping, dtype=dtype).view(shape)  # keeps the map alive


class SpillFile:
    """Bytes in an unnamed file, which disappears when neither this object nor a memory map uses it.

    >>> file = SpillFile()
    >>> file.append(b"ab"), file.append(b"c"), len(file), file[1:]
    (None, None, 3, b'bc')
    """

    def __init__(self) -> None:
        with allocation_errors(0), tempfile.TemporaryFile(prefix="descant-") as file:
            self._descriptor = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._descriptor)

    def append(self, data: bytes | memoryview) -> None:
        with allocation_errors(len(data)):
            remaining = memoryview(data)
            while remaining:
                remaining = remaining[os.write(self._descriptor, remaining) :]

    def __len__(self) -> int:
        return os.fstat(self._descriptor).st_size

    def __getitem__(self, part: slice) -> bytes:
        begin, end, _ = part.indices(len(self))
        return os.pread(self._descriptor, end - begin, begin)

    def memory_map(self) -> mmap.mmap:
        """Return a read-only map of the whole file; its pages leave memory when it is needed elsewhere."""
        return mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_READ)

    @property
    def path(self) -> Path | None:
        """The path by which this process can open the file; None on systems without /proc."""
        path = Path(f"/proc/self/fd/{self._descriptor}")
        return path if path.exists() else None


@contextmanager
def allocation_errors(size: int) -> Iterator[None]:
    """Turn errors of allocating file space into a StateError that names the folder."""
    try:
        yield
    except OSError as error:
        folder = tempfile.tempdir or os.environ.get("TMPDIR", "the folder for temporary files")
        raise StateError(
            f"{size / 1e6:.0f} MB for models cannot be allocated in {folder}: {error.strerror}. Free space there, or "
            "set TMPDIR to a folder with more."
        ) from error


def reserve(descriptor: int, size: int) -> None:
    """Allocate at least `size` bytes to a file: writing to a map on a full disk kills the process."""
    os.truncate(descriptor, max(size, os.fstat(descriptor).st_size))
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
