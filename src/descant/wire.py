"""Tasks and reports as bytes: safetensors for the arrays, JSON for the rest; nothing is unpickled or executed.

Every engine that leaves the process speaks these bytes.
"""

from __future__ import annotations

import base64
import json
from typing import Any, TypeVar

from safetensors import SafetensorError
from safetensors.torch import load, save

from .core import Report, Task
from .errors import EngineError

Parcel = TypeVar("Parcel", Task, Report)
_HEADER = "descant"


def pack(parcel: Task | Report) -> bytes:
    """A task or a report as bytes.

    >>> import torch
    >>> unpack(pack(Report("a", 1, "train", arrays={"w": torch.ones(2)})), Report).arrays["w"]
    tensor([1., 1.])
    """
    fields = {name: value for name, value in vars(parcel).items() if name != "arrays"}
    if isinstance(parcel, Report):
        fields["sealed"] = base64.b64encode(parcel.sealed).decode()
    arrays = {name: tensor.detach().contiguous().clone() for name, tensor in parcel.arrays.items()}
    return save(arrays, {_HEADER: json.dumps(fields)})


def unpack(data: bytes, kind: type[Parcel]) -> Parcel:
    """The task or the report that was packed; anything else is an :class:`EngineError`."""
    try:
        fields = _fields(data)
        arrays = load(data)
        if kind is Report:
            fields["sealed"] = base64.b64decode(fields["sealed"], validate=True)
        _check_fields(fields, kind)
        return kind(arrays=arrays, **fields)
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError, AttributeError) as error:
        raise EngineError(f"These {len(data)} bytes are not a {kind.__name__} of this version: {error}") from error


def _fields(data: bytes) -> dict[str, Any]:
    """The JSON beside the arrays: safetensors keeps it in its own header, whose length stands in the first 8 bytes."""
    length = int.from_bytes(data[:8], "little")
    if not 0 < length <= len(data) - 8:
        raise ValueError("the header is cut off")
    fields = json.loads(json.loads(data[8 : 8 + length])["__metadata__"][_HEADER])
    if not isinstance(fields, dict):
        raise ValueError("the header is not a JSON object")
    return fields


_TYPES: dict[str, type | tuple[type, ...]] = {
    "party": str,
    "round": int,
    "kind": str,
    "status": str,
    "reason": str,
    "sealed": bytes,
    "settings": dict,
    "metrics": dict,
    "deadline": (int, float),
}


def _check_fields(fields: dict[str, Any], kind: type[Task] | type[Report]) -> None:
    for name, value in fields.items():
        if name not in _TYPES or not isinstance(value, _TYPES[name]) or isinstance(value, bool):
            raise ValueError(f"its {name!r:.40} is {value!r:.40}")
