"""Arrays in shared memory: a safetensors file that is rewritten in place, so that its pages are reused.

A new file would be as safe, but the system must find and clear its pages: 8 MB take 6 ms in a new file and less than
1 ms in place.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ...errors import EngineError
from ...storage.safetensors_header import DTYPES, decode_header, encode_header, tensor_entry
from ...storage.spill import reserve

_CACHE_LINE = 64  # bytes; every array begins at a cache line


class SharedTensorFile:
    """A shared-memory file as one process sees it: one process writes, others read what was written last."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def write(self, arrays: Mapping[str, Tensor]) -> None:
        """Replace the arrays in the file."""
        entries = {}
        end = 0
        for name, array in arrays.items():
            entries[name] = tensor_entry(array, end)
            end = -(-entries[name]["data_offsets"][1] // _CACHE_LINE) * _CACHE_LINE
        header = encode_header(entries, _CACHE_LINE, compact=False)
        data_start = len(header)
        self._ensure_size(data_start + end)
        self._bytes[:data_start] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        for name, array in arrays.items():
            first, last = entries[name]["data_offsets"]
            if last > first:
                flat = array.detach().contiguous().reshape(-1)
                self._bytes[data_start + first : data_start + last].view(array.dtype).copy_(flat)

    def _ensure_size(self, size: int) -> None:
        if len(self._bytes) >= size:
            return
        try:
            with self.file.open("a+b") as file:
                reserve(file.fileno(), size)
                self._map(file.fileno())
        except OSError as error:
            raise EngineError(
                f"Cannot reserve {size / 1e6:.0f} MB in {self.file.parent}: {error.strerror}. Make room there, use "
                "fewer parties a round, or use the engine that runs in one process."
            ) from error

    def _map(self, descriptor: int) -> None:
        self._bytes = torch.frombuffer(mmap.mmap(descriptor, 0), dtype=torch.uint8)  # keeps the map alive

    def read(self) -> dict[str, Tensor]:
        """Return the arrays written last, as views that hold until the next write."""
        try:
            if self.file.stat().st_size != len(self._bytes):
                with self.file.open("r+b") as file:
                    self._map(file.fileno())
            entries, data_start = decode_header(self._bytes.numpy().data)
            return {name: self._array(data_start, **entry) for name, entry in entries.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
            raise EngineError(
                f"{self.file.name} does not hold arrays in the form that a worker writes: {error}"
            ) from error

    def _array(self, data_start: int, dtype: str, shape: list[int], data_offsets: list[int]) -> Tensor:
        first, last = data_offsets
        kind = DTYPES[dtype]
        if last - first != math.prod(shape) * kind.itemsize or not 0 <= first <= last <= len(self._bytes) - data_start:
            raise ValueError(f"an array of shape {shape} does not lie at {data_offsets}")
        return self._bytes[data_start + first : data_start + last].view(kind).view(shape)
