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

_KINDS = {
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


def tensors_in(file: Path) -> dict[str, Tensor]:
    """All of them, by name. Whoever writes into one changes no file; `SafetensorError` if it is not one of these."""
    with safe_open(file, "pt"):  # every place in it is within it, and has as many bytes as its shape
        pass
    with file.open("rb") as opened:
        held = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
    begin = 8 + int.from_bytes(held[:8], "little")
    found = {}
    for name, said in json.loads(held[8:begin]).items():
        if name != "__metadata__":
            kind, at = _KINDS[said["dtype"]], said["data_offsets"]
            found[name] = _between(held, kind, begin + at[0], begin + at[1]).view(said["shape"])
    return found


def _between(held: mmap.mmap, kind: torch.dtype, begin: int, end: int) -> Tensor:
    """Numbers of a map, which they keep; torch makes none of no bytes."""
    if begin == end:
        return torch.empty(0, dtype=kind)
    return torch.frombuffer(held, dtype=kind, count=(end - begin) // kind.itemsize, offset=begin)
