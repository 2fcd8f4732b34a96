"""The tensors in a file of safetensors, where they are: what is mapped is in memory only as long as it is used.

Its own ways to read a file (`get_tensor` and `load_file` of 0.8.0) lose 56 bytes for every tensor, for good: a server
or a simulation that reads in every round would grow with its rounds. What is in the file is still checked by it.
"""

from __future__ import annotations

import json
import mmap
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}


def map_tensors(file: Path) -> dict[str, Tensor]:
    """All of them, by name. Whoever writes into one changes no file; `SafetensorError` if it is not one of these."""
    with safe_open(file, "pt"):  # every place in it is within it, and has as many bytes as its shape
        pass
    with file.open("rb") as opened:
        mapping = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
    data_start = 8 + int.from_bytes(mapping[:8], "little")
    found = {}
    for name, entry in json.loads(mapping[8:data_start]).items():
        if name != "__metadata__":
            dtype = _DTYPES[entry["dtype"]]
            offsets = entry["data_offsets"]
            found[name] = _tensor_at(mapping, dtype, data_start + offsets[0], end=data_start + offsets[1]).view(
                entry["shape"]
            )
    return found


def _tensor_at(mapping: mmap.mmap, dtype: torch.dtype, begin: int, end: int) -> Tensor:
    """Numbers of a map, which they keep; torch makes none of no bytes."""
    if begin == end:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(mapping, dtype=dtype, count=(end - begin) // dtype.itemsize, offset=begin)
