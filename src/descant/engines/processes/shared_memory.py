"""Arrays in shared memory: a safetensors file that is written in place again and again, so that no page is new.

A new file would be as safe and as short to write, but most of its cost is in pages that the system must find and clear:
8 MB take 6 ms so, and less than 1 ms in place.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ...errors import EngineError
from ...storage.spill import reserve

_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}
_CACHE_LINE = 64  # arrays begin at a cache line


class SharedTensorFile:
    """One such file, as one process sees it: one writes, others read what was written last."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def write(self, arrays: Mapping[str, Tensor]) -> None:
        """Put arrays in place of those that were there."""
        ranges = list[tuple[int, int]]()
        end = 0
        for array in arrays.values():
            ranges.append((end, end + array.numel() * array.element_size()))
            end = -(-ranges[-1][1] // _CACHE_LINE) * _CACHE_LINE
        entries = {
            name: {"dtype": _CODES[array.dtype], "shape": list(array.shape), "data_offsets": place}
            for (name, array), place in zip(arrays.items(), ranges, strict=True)
        }
        header = json.dumps(entries).encode()
        begin = -(-(8 + len(header)) // _CACHE_LINE) * _CACHE_LINE
        self._ensure_size(begin + end)
        header = header.ljust(begin - 8)
        self._bytes[:8] = torch.frombuffer(bytearray(len(header).to_bytes(8, "little")), dtype=torch.uint8)
        self._bytes[8:begin] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        for array, (first, last) in zip(arrays.values(), ranges, strict=True):
            if last > first:
                flat = array.detach().contiguous().reshape(-1)
                self._bytes[begin + first : begin + last].view(array.dtype).copy_(flat)

    def _ensure_size(self, size: int) -> None:
        if len(self._bytes) >= size:
            return
        try:
            with self.file.open("a+b") as file:
                reserve(file.fileno(), size)
                self._map(file.fileno())
        except OSError as error:
            raise EngineError(
                f"{size / 1e6:.0f} MB for {self.file.parent} cannot be had: {error.strerror}. Make room there, or use "
                "fewer parties a round or the engine that runs in one process."
            ) from error

    def _map(self, descriptor: int) -> None:
        self._bytes = torch.frombuffer(mmap.mmap(descriptor, 0), dtype=torch.uint8)  # keeps the map alive

    def read(self) -> dict[str, Tensor]:
        """What was written last; the tensors are views of it, until it is written anew."""
        try:
            if self.file.stat().st_size != len(self._bytes):
                with self.file.open("r+b") as file:
                    self._map(file.fileno())
            begin = 8 + int.from_bytes(self._bytes[:8].numpy().tobytes(), "little")
            entries = json.loads(self._bytes[8:begin].numpy().tobytes())
            return {name: self._array(begin, **entry) for name, entry in entries.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
            raise EngineError(f"{self.file.name} does not hold arrays as a worker writes them: {error}") from error

    def _array(self, begin: int, dtype: str, shape: list[int], data_offsets: list[int]) -> Tensor:
        first, last = data_offsets
        kind = _DTYPES[dtype]
        if last - first != math.prod(shape) * kind.itemsize or not 0 <= first <= last <= len(self._bytes) - begin:
            raise ValueError(f"an array of shape {shape} does not lie at {data_offsets}")
        return self._bytes[begin + first : begin + last].view(kind).view(shape)
