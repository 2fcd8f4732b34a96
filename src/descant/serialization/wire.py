"""Tasks and reports as bytes: safetensors for the arrays, JSON for the rest; nothing is unpickled or executed.

Every engine that leaves the process speaks these bytes. What travels alone carries a digest of itself: a bit that flips
in a memory or on a disk could make a number that is as good as any.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar, get_args

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from ..core.messages import Report, Status, Task
from ..errors import EngineError
from ..storage.mapped_tensors import tensors_in
from ..storage.spill import Filed

Parcel = TypeVar("Parcel", Task, Report)
Letter: TypeAlias = bytes | Filed
"""A task or a report as bytes, here or in a file."""
_HEADER, _OTHERS = "descant", "__metadata__"
_SEALED = "sealed"
_LONGEST = 1e7  # seconds that a task may take
_TEXT = 2**20  # bytes of all that is said beside the arrays
_ENTRY = 512  # bytes that say where one array lies, of which kind it is, and how it is called twice, beside its name
_WRONG = (SafetensorError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, OverflowError)


@dataclass(frozen=True)
class Most:
    """What a letter may have, as far as it must be known before anything is made of it."""

    arrays: int
    header: int  # bytes before the arrays

    @classmethod
    def of(cls, names: Collection[str]) -> Most:
        """For a report with arrays of these names; and what is sealed is one more.

        >>> Most.of(["weight", "bias"]).arrays
        3
        """
        names = [*names, _SEALED]
        return cls(len(names), _TEXT + sum(_ENTRY + len(json.dumps(name)) for name in names))


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
        fields[_SEALED] = crate.put({_SEALED: _tensor(parcel.sealed)})[_SEALED] if parcel.sealed else ""
    return fields


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _bytes(tensor: Tensor) -> bytes:
    if tensor.dtype != torch.uint8:
        raise ValueError(f"its {_SEALED!r} is of {tensor.dtype}")
    return bytes(tensor.numpy().tobytes())


def parcel_of(fields: Any, arrays: Mapping[str, Tensor], kind: type[Parcel]) -> Parcel:
    """The task or the report of a sheet; anything else is an :class:`EngineError`."""
    try:
        fields = dict(fields)
        fields["arrays"] = {name: arrays[key] for name, key in fields["arrays"].items()}
        if kind is Report:
            fields[_SEALED] = _bytes(arrays[fields[_SEALED]]) if fields[_SEALED] else b""
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
    arrays, said = _opened(parcel)
    return save(apart(arrays), said)


def pack_beyond(budget: int, parcel: Task | Report) -> Letter:
    """The same bytes, in a file where its arrays have more than a budget: safetensors would have them twice in memory.

    >>> import torch
    >>> report = Report("a", 1, "train", arrays={"w": torch.ones(2)})
    >>> pack_beyond(0, report)[:] == pack(report)
    True
    """
    arrays, said = _opened(parcel)
    if sum(tensor.nbytes for tensor in arrays.values()) <= budget:
        return save(apart(arrays), said)
    return filed(arrays, said)


def filed(arrays: Mapping[str, Tensor], said: Mapping[str, str]) -> Filed:
    """What safetensors makes of arrays and of what is said beside them, in a file: nothing of it is held in memory.

    >>> import torch
    >>> filed({"w": torch.ones(2)}, {"round": "1"})[:] == save({"w": torch.ones(2)}, {"round": "1"})
    True
    """
    head, order = _head(arrays, said)
    file = Filed()
    file.add(head)
    for name in order:
        file.add(_raw(arrays[name]))
    return file


def _opened(parcel: Task | Report) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The arrays of a parcel, and all that is said beside them: one text, for of more the order would vary."""
    crate = Crate()
    fields = json.dumps(sheet(parcel, crate))
    return crate.arrays, {_HEADER: f"{_digest(fields, crate.arrays)} {fields}"}


def _head(arrays: Mapping[str, Tensor], said: Mapping[str, str]) -> tuple[bytes, list[str]]:
    """What safetensors puts before arrays, and their order in it: it is asked with empty ones of their kind."""
    header = json.loads(save({name: tensor.new_empty(0) for name, tensor in arrays.items()}, dict(said))[8:])
    order, end = [name for name in header if name != _OTHERS], 0
    for name in order:
        begin, end = end, end + arrays[name].nbytes
        header[name] |= {"shape": list(arrays[name].shape), "data_offsets": [begin, end]}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, order


def _raw(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, where they are."""
    found: memoryview = tensor.reshape(-1).view(torch.uint8).numpy().data
    return found


def apart(arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors that have their memory to themselves: safetensors refuses what shares it, such as two rows of a stack."""
    found, taken = dict[str, Tensor](), set[int]()
    for key, tensor in arrays.items():
        storage = tensor.untyped_storage()
        own = storage.nbytes() == tensor.nbytes and storage.data_ptr() not in taken
        found[key] = tensor if own else tensor.clone()
        taken.add(storage.data_ptr())
    return found


def unpack(data: Letter, kind: type[Parcel], most: Most | None = None) -> Parcel:
    """The task or the report that was packed; anything else is an :class:`EngineError`, as is what has too much.

    The arrays of what lies in a file stay there, and keep it as long as they are used. Without `most` whoever wrote it
    is trusted with our memory.
    """
    try:
        (digest, _, text), names = _header(data, most)
        fields = json.loads(text)
        _check_named(fields, names)
        arrays = _arrays(data)
        if _digest(text, arrays) != digest:
            raise ValueError("something in them has changed on the way")
        return parcel_of(fields, arrays, kind)
    except _WRONG as error:
        raise EngineError(f"These {len(data)} bytes are not a {kind.__name__} of this version: {error}") from error


def _arrays(data: Letter) -> dict[str, Tensor]:
    if isinstance(data, bytes) or data.place is None:
        return load(data[:])
    return tensors_in(data.place)


def _digest(fields: str, arrays: Mapping[str, Tensor]) -> str:
    """Of all that is said; anybody can make it: it is against faults, not against forgers."""
    found = hashlib.sha256(fields.encode())
    for name, tensor in sorted(arrays.items()):
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        found.update(_raw(tensor))
    return found.hexdigest()


def _header(data: Letter, most: Most | None) -> tuple[tuple[str, str, str], set[str]]:
    """Digest and text, and the names of the arrays, of the header that safetensors has; 8 bytes say how long it is."""
    length = int.from_bytes(data[:8], "little")
    if not 0 < length <= len(data) - 8:
        raise ValueError("the header is cut off")
    if most is not None and length > most.header:
        raise ValueError(f"the header has {length} bytes, and may have {most.header}")
    header = json.loads(data[8 : 8 + length])
    names = set(header) - {_OTHERS}
    if most is not None and len(names) > most.arrays:
        raise ValueError(f"it has {len(names)} arrays, and may have {most.arrays}")
    return str(header[_OTHERS][_HEADER]).partition(" "), names


def _check_named(fields: Any, names: set[str]) -> None:
    """What nobody refers to is not carried along."""
    named = {*fields["arrays"].values(), fields.get(_SEALED, "")} - {""}
    if named != names:
        raise ValueError(f"it has {len(names - named)} arrays that it does not name, and not {len(named - names)}")


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
    if fields.get("status", "ok") not in get_args(Status):
        raise ValueError(f"its status is {fields['status']!r:.40}")
    if not 0 < fields.get("deadline", 1) <= _LONGEST:
        raise ValueError(f"its deadline is {fields['deadline']!r:.40}")
