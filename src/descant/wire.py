"""Tasks and reports as bytes: safetensors for the arrays, JSON for the rest; nothing is unpickled or executed.

Every engine that leaves the process speaks these bytes. What travels alone carries a digest of itself: a bit that flips
in a memory or on a disk could make a number that is as good as any.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from .core import Report, Task
from .errors import EngineError

Parcel = TypeVar("Parcel", Task, Report)
_HEADER = "descant"
_LONGEST = 1e7  # seconds that a task may take
_WRONG = (SafetensorError, ValueError, KeyError, TypeError, RecursionError, AttributeError)


class Crate:
    """The arrays of many parcels, each once: what a hundred tasks share is carried a single time."""

    def __init__(self) -> None:
        self.arrays: dict[str, Tensor] = {}
        self._keys: dict[int, str] = {}
        self._seen: list[Tensor] = []  # alive, so that no other tensor takes its identity

    def put(self, tensors: Mapping[str, Tensor]) -> dict[str, str]:
        """Take tensors in; what they are called inside."""
        return {name: self._put(tensor) for name, tensor in tensors.items()}

    def _put(self, tensor: Tensor) -> str:
        if id(tensor) not in self._keys:
            self._seen.append(tensor)
            self._keys[id(tensor)] = str(len(self._keys))
            self.arrays[self._keys[id(tensor)]] = tensor.detach().contiguous()
        return self._keys[id(tensor)]


def sheet(parcel: Task | Report, crate: Crate) -> dict[str, Any]:
    """A task or a report as JSON values, its arrays put into a crate."""
    fields = {**vars(parcel), "arrays": crate.put(parcel.arrays)}
    if isinstance(parcel, Report):
        fields["sealed"] = base64.b64encode(parcel.sealed).decode()
    return fields


def parcel_of(fields: Any, arrays: Mapping[str, Tensor], kind: type[Parcel]) -> Parcel:
    """The task or the report of a sheet; anything else is an :class:`EngineError`."""
    try:
        fields = dict(fields)
        fields["arrays"] = {name: arrays[key] for name, key in fields["arrays"].items()}
        if kind is Report:
            fields["sealed"] = base64.b64decode(fields["sealed"], validate=True)
        _check_fields(fields)
        return kind(**fields)
    except _WRONG as error:
        raise EngineError(f"This is not a {kind.__name__} of this version: {error}") from error


def pack(parcel: Task | Report) -> bytes:
    """A task or a report as bytes, the same ones whenever it is packed.

    >>> import torch
    >>> unpack(pack(Report("a", 1, "train", arrays={"w": torch.ones(2)})), Report).arrays["w"]
    tensor([1., 1.])
    """
    crate = Crate()
    fields, arrays = json.dumps(sheet(parcel, crate)), apart(crate.arrays)
    return save(arrays, {_HEADER: f"{_digest(fields, arrays)} {fields}"})  # one text: of more the order would vary


def apart(arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors that have their memory to themselves: safetensors refuses what shares it, such as two rows of a stack."""
    found, taken = dict[str, Tensor](), set[int]()
    for key, tensor in arrays.items():
        storage = tensor.untyped_storage()
        own = storage.nbytes() == tensor.nbytes and storage.data_ptr() not in taken
        found[key] = tensor if own else tensor.clone()
        taken.add(storage.data_ptr())
    return found


def unpack(data: bytes, kind: type[Parcel]) -> Parcel:
    """The task or the report that was packed; anything else is an :class:`EngineError`."""
    try:
        (digest, _, fields), arrays = _header(data).partition(" "), load(data)
        if _digest(fields, arrays) != digest:
            raise ValueError("something in them has changed on the way")
        return parcel_of(json.loads(fields), arrays, kind)
    except _WRONG as error:
        raise EngineError(f"These {len(data)} bytes are not a {kind.__name__} of this version: {error}") from error


def _digest(fields: str, arrays: Mapping[str, Tensor]) -> str:
    """Of all that is said; anybody can make it: it is against faults, not against forgers."""
    found = hashlib.sha256(fields.encode())
    for name, tensor in sorted(arrays.items()):
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def _header(data: bytes) -> str:
    """The text beside the arrays, in the header that safetensors has; the first 8 bytes say how long it is."""
    length = int.from_bytes(data[:8], "little")
    if not 0 < length <= len(data) - 8:
        raise ValueError("the header is cut off")
    return str(json.loads(data[8 : 8 + length])["__metadata__"][_HEADER])


_TYPES: dict[str, type | tuple[type, ...]] = {
    "party": str,
    "round": int,
    "kind": str,
    "status": str,
    "reason": str,
    "sealed": bytes,
    "arrays": dict,
    "settings": dict,
    "metrics": dict,
    "deadline": (int, float),
}


def _check_fields(fields: dict[str, Any]) -> None:
    for name, value in fields.items():
        if name not in _TYPES or not isinstance(value, _TYPES[name]) or isinstance(value, bool):
            raise ValueError(f"its {name!r:.40} is {value!r:.40}")
    if not 0 < fields.get("deadline", 1) <= _LONGEST:
        raise ValueError(f"its deadline is {fields['deadline']!r:.40}")
