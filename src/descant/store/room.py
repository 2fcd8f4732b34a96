"""Room for stacks that are too large for memory: in a file without a name, which goes with its tensor or its process.

The file lies where temporary files do (TMPDIR). What is mapped from it is in memory only as long as nobody else needs
the memory.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile

import torch
from torch import Tensor

from ..errors import StateError


def room(shape: tuple[int, ...], dtype: torch.dtype, budget: int) -> Tensor:
    """A tensor to be filled: in memory while it is within a budget of bytes, in a file beyond.

    >>> room((2, 3), torch.float32, budget=0).fill_(1).sum()
    tensor(6.)
    """
    size = math.prod(shape) * dtype.itemsize
    if size <= budget:
        return torch.empty(shape, dtype=dtype)
    try:
        with tempfile.TemporaryFile(prefix="descant-") as file:
            reserve(file.fileno(), size)
            held = mmap.mmap(file.fileno(), size)
    except OSError as error:
        raise StateError(
            f"{size / 1e6:.0f} MB for models cannot be had in {tempfile.gettempdir()}: {error.strerror}. Make room "
            "there, or set TMPDIR to a folder that has it."
        ) from error
    return torch.frombuffer(held, dtype=dtype).view(shape)  # keeps the map alive


def reserve(descriptor: int, size: int) -> None:
    """Let a file have so many bytes at least, which are its own: a full disk would end a process that writes a map."""
    os.truncate(descriptor, max(size, os.fstat(descriptor).st_size))
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
