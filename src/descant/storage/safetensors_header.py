"""The header of a safetensors file: its length in 8 bytes, then JSON with each tensor's type, shape and byte range.

Byte ranges count from the end of the header. A reader checks them itself, or lets safetensors check the file first.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

METADATA_KEY = "__metadata__"
"""The entry of a header that is not a tensor but a mapping from strings to strings."""

LENGTH_BYTES = 8
"""Bytes of the header's length, which is a little-endian number."""

DTYPES = {
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
"""The element types by their names in a header."""

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class ByteSource(Protocol):
    """Bytes that can be sliced: `bytes`, a memory view or map, or a spill file."""

    def __getitem__(self, part: slice, /) -> bytes | memoryview: ...


def tensor_entry(tensor: Tensor, begin: int) -> dict[str, Any]:
    """Return the header's entry of a tensor whose bytes begin here.

    >>> tensor_entry(torch.ones(2, 3), 24)
    {'dtype': 'F32', 'shape': [2, 3], 'data_offsets': [24, 48]}
    """
    return {
        "dtype": DTYPE_NAMES[tensor.dtype],
        "shape": list(tensor.shape),
        "data_offsets": [begin, begin + tensor.nbytes],
    }


def encode_header(header: Mapping[str, Any], alignment: int = 8, compact: bool = True) -> bytes:
    """Return a header as bytes, padded with spaces so that the tensors begin at a multiple of the alignment.

    >>> encode_header({"w": 1})
    b'\\x08\\x00\\x00\\x00\\x00\\x00\\x00\\x00{"w":1} '
    """
    text = json.dumps(header, ensure_ascii=not compact, separators=(",", ":") if compact else None).encode()
    text += b" " * (-(LENGTH_BYTES + len(text)) % alignment)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def header_length(data: ByteSource) -> int:
    """Return the length of the header as the data claim it; check it before a large read.

    >>> header_length(encode_header({"w": 1}))
    8
    """
    return int.from_bytes(data[:LENGTH_BYTES], "little")


def decode_header(data: ByteSource) -> tuple[dict[str, Any], int]:
    """Return the entries of a header, unchecked, and the offset at which the tensors begin.

    >>> decode_header(encode_header({"w": 1}))
    ({'w': 1}, 16)
    """
    data_start = LENGTH_BYTES + header_length(data)
    return json.loads(bytes(data[LENGTH_BYTES:data_start])), data_start
