"""Room for stacks that are too large for memory: in a file without a name, which goes with its tensor or its process.

The file lies where temporary files do (TMPDIR). What is mapped from it is in memory only as long as nobody else needs
the memory.
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
    """A tensor to be filled: in memory while it is within a budget of bytes, in a file beyond.

    >>> room((2, 3), torch.float32, budget=0).fill_(1).sum()
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
    """Bytes in a file without a name, which goes when nobody holds it and nothing is mapped from it any more.

    >>> filed = Filed()
    >>> filed.add(b"ab"), filed.add(b"c"), len(filed), filed[1:]
    (None, None, 3, b'bc')
    """

    def __init__(self) -> None:
        with allocation_errors(0), tempfile.TemporaryFile(prefix="descant-") as file:
            self._descriptor = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._descriptor)

    def append(self, data: bytes | memoryview) -> None:
        """Put more behind what is there."""
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
        """All of it, to be read: in memory only as long as nobody else needs the memory."""
        return mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_READ)

    @property
    def path(self) -> Path | None:
        """By which others in this process can open it; None where the system gives it none."""
        place = Path(f"/proc/self/fd/{self._descriptor}")
        return place if place.exists() else None


@contextmanager
def allocation_errors(size: int) -> Iterator[None]:
    """Room for so many bytes is asked for inside: an error says where it could not be had."""
    try:
        yield
    except OSError as error:
        folder = tempfile.tempdir or os.environ.get("TMPDIR", "the folder for temporary files")
        raise StateError(
            f"{size / 1e6:.0f} MB for models cannot be had in {folder}: {error.strerror}. Make room there, or set "
            "TMPDIR to a folder that has it."
        ) from error


def reserve(descriptor: int, size: int) -> None:
    """Let a file have so many bytes at least, which are its own: a full disk would end a process that writes a map."""
    os.truncate(descriptor, max(size, os.fstat(descriptor).st_size))
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
