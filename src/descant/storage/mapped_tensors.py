"""Tensors of a safetensors file, mapped into memory: a page is in memory only while it is used.

The library's own readers (`get_tensor` and `load_file` of 0.8.0) leak 56 bytes per tensor: a server or a simulation
that reads in every round would grow with its rounds. The library still checks the file before it is mapped.
"""

from __future__ import annotations

import mmap
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from .safetensors_header import DTYPES, METADATA_KEY, decode_header


def map_tensors(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a file by name, or raise `SafetensorError`; writing into one does not change the file."""
    with safe_open(file, "pt"):  # checks that every byte range is inside the file and fits its shape
        pass
    with file.open("rb") as opened:
        mapping = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
    header, data_start = decode_header(mapping)
    tensors = {}
    for name, entry in header.items():
        if name != METADATA_KEY:
            begin, end = entry["data_offsets"]
            flat = _tensor_at(mapping, DTYPES[entry["dtype"]], data_start + begin, end=data_start + end)
            tensors[name] = flat.view(entry["shape"])
    return tensors


def _tensor_at(mapping: mmap.mmap, dtype: torch.dtype, begin: int, end: int) -> Tensor:
    """Return the flat tensor of a range of bytes, which keeps the map open; torch needs another call for no bytes."""
    if begin == end:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(mapping, dtype=dtype, count=(end - begin) // dtype.itemsize, offset=begin)
