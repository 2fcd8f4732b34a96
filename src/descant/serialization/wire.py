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

from ..core.messages import Reply, Status, Task
from ..errors import EngineError
from ..storage.mapped_tensors import map_tensors
from ..storage.spill import SpillFile

MessageT = TypeVar("MessageT", Task, Reply)
MessageBytes: TypeAlias = bytes | SpillFile
"""A task or a report as bytes, here or in a file."""
_HEADER_KEY = "descant"
_METADATA_KEY = "__metadata__"
_CORESET_KEY = "encrypted_coreset"
_MAX_DEADLINE = 1e7  # seconds that a task may take
_MAX_TEXT_BYTES = 2**20  # bytes of all that is said beside the arrays
_MAX_ENTRY_BYTES = (
    512  # bytes that say where one array lies, of which kind it is, and how it is called twice, beside its name
)
_DECODE_ERRORS = (SafetensorError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, OverflowError)


@dataclass(frozen=True)
class MessageLimits:
    """What a letter may have, as far as it must be known before anything is made of it."""

    max_arrays: int
    max_header_bytes: int  # bytes before the arrays

    @classmethod
    def for_tensors(cls, names: Collection[str]) -> MessageLimits:
        """For a report with arrays of these names; and what is sealed is one more.

        >>> Most.of(["weight", "bias"]).arrays
        3
        """
        names = [*names, _CORESET_KEY]
        return cls(len(names), _MAX_TEXT_BYTES + sum(_MAX_ENTRY_BYTES + len(json.dumps(name)) for name in names))


class TensorPool:
    """The arrays of many parcels, each once: what a hundred tasks share is carried a single time."""

    def __init__(self) -> None:
        self.arrays: dict[str, Tensor] = {}
        self._keys: dict[int, str] = {}
        self._kept_alive: list[Tensor] = []  # alive, so that no other tensor takes its identity

    def add(self, tensors: Mapping[str, Tensor]) -> dict[str, str]:
        """Take tensors in; what they are called inside."""
        return {name: self._add(tensor) for name, tensor in tensors.items()}

    def _add(self, tensor: Tensor) -> str:
        if id(tensor) not in self._keys:
            self._kept_alive.append(tensor)
            self._keys[id(tensor)] = str(len(self._keys))
            self.arrays[self._keys[id(tensor)]] = tensor.detach().contiguous()
        return self._keys[id(tensor)]


def to_fields(message: Task | Reply, pool: TensorPool) -> dict[str, Any]:
    """A task or a report as JSON values, its arrays put into a crate."""
    fields = {**vars(message), "arrays": pool.add(message.arrays)}
    if isinstance(message, Reply):
        fields[_CORESET_KEY] = (
            pool.add({_CORESET_KEY: _bytes_to_tensor(message.encrypted_coreset)})[_CORESET_KEY]
            if message.encrypted_coreset
            else ""
        )
    return fields


def _bytes_to_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _tensor_to_bytes(tensor: Tensor) -> bytes:
    if tensor.dtype != torch.uint8:
        raise ValueError(f"its {_CORESET_KEY!r} is of {tensor.dtype}")
    return bytes(tensor.numpy().tobytes())


def from_fields(fields: Any, arrays: Mapping[str, Tensor], kind: type[MessageT]) -> MessageT:
    """The task or the report of a sheet; anything else is an :class:`EngineError`."""
    try:
        fields = dict(fields)
        fields["arrays"] = {name: arrays[key] for name, key in fields["arrays"].items()}
        if kind is Reply:
            fields[_CORESET_KEY] = _tensor_to_bytes(arrays[fields[_CORESET_KEY]]) if fields[_CORESET_KEY] else b""
        _check_fields(fields)
        return kind(**fields)
    except _DECODE_ERRORS as error:
        raise EngineError(f"This is not a {kind.__name__} of this version: {error}") from error


def pack(message: Task | Reply) -> bytes:
    """A task or a report as bytes, the same ones whenever it is packed.

    >>> import torch
    >>> unpack(pack(Report("a", 1, "train", arrays={"w": torch.ones(2)})), Report).arrays["w"]
    tensor([1., 1.])
    """
    arrays, metadata = _split_message(message)
    return save(unshare_storage(arrays), metadata)


def pack_or_spill(budget: int, message: Task | Reply) -> MessageBytes:
    """The same bytes, in a file where its arrays have more than a budget: safetensors would have them twice in memory.

    >>> import torch
    >>> report = Report("a", 1, "train", arrays={"w": torch.ones(2)})
    >>> pack_beyond(0, report)[:] == pack(report)
    True
    """
    arrays, metadata = _split_message(message)
    if sum(tensor.nbytes for tensor in arrays.values()) <= budget:
        return save(unshare_storage(arrays), metadata)
    return write_to_file(arrays, metadata)


def write_to_file(arrays: Mapping[str, Tensor], metadata: Mapping[str, str]) -> SpillFile:
    """What safetensors makes of arrays and of what is said beside them, in a file: nothing of it is held in memory.

    >>> import torch
    >>> filed({"w": torch.ones(2)}, {"round": "1"})[:] == save({"w": torch.ones(2)}, {"round": "1"})
    True
    """
    head, order = _file_header(arrays, metadata)
    file = SpillFile()
    file.append(head)
    for name in order:
        file.append(_tensor_bytes(arrays[name]))
    return file


def _split_message(message: Task | Reply) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The arrays of a parcel, and all that is said beside them: one text, for of more the order would vary."""
    pool = TensorPool()
    fields = json.dumps(to_fields(message, pool))
    return pool.arrays, {_HEADER_KEY: f"{_message_digest(fields, pool.arrays)} {fields}"}


def _file_header(arrays: Mapping[str, Tensor], metadata: Mapping[str, str]) -> tuple[bytes, list[str]]:
    """What safetensors puts before arrays, and their order in it: it is asked with empty ones of their kind."""
    header = json.loads(save({name: tensor.new_empty(0) for name, tensor in arrays.items()}, dict(metadata))[8:])
    order = [name for name in header if name != _METADATA_KEY]
    end = 0
    for name in order:
        begin = end
        end = end + arrays[name].nbytes
        header[name] |= {"shape": list(arrays[name].shape), "data_offsets": [begin, end]}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, order


def _tensor_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, where they are."""
    found: memoryview = tensor.reshape(-1).view(torch.uint8).numpy().data
    return found


def unshare_storage(arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors that have their memory to themselves: safetensors refuses what shares it, such as two rows of a stack."""
    found = dict[str, Tensor]()
    seen_storages = set[int]()
    for key, tensor in arrays.items():
        storage = tensor.untyped_storage()
        is_sole_owner = storage.nbytes() == tensor.nbytes and storage.data_ptr() not in seen_storages
        found[key] = tensor if is_sole_owner else tensor.clone()
        seen_storages.add(storage.data_ptr())
    return found


def unpack(data: MessageBytes, kind: type[MessageT], limits: MessageLimits | None = None) -> MessageT:
    """The task or the report that was packed; anything else is an :class:`EngineError`, as is what has too much.

    The arrays of what lies in a file stay there, and keep it as long as they are used. Without `most` whoever wrote it
    is trusted with our memory.
    """
    try:
        (digest, _, text), names = _read_header(data, limits)
        fields = json.loads(text)
        _check_references(fields, names)
        arrays = _arrays(data)
        if _message_digest(text, arrays) != digest:
            raise ValueError("something in them has changed on the way")
        return from_fields(fields, arrays, kind)
    except _DECODE_ERRORS as error:
        raise EngineError(f"These {len(data)} bytes are not a {kind.__name__} of this version: {error}") from error


def _arrays(data: MessageBytes) -> dict[str, Tensor]:
    if isinstance(data, bytes) or data.path is None:
        return load(data[:])
    return map_tensors(data.path)


def _message_digest(fields: str, arrays: Mapping[str, Tensor]) -> str:
    """Of all that is said; anybody can make it: it is against faults, not against forgers."""
    found = hashlib.sha256(fields.encode())
    for name, tensor in sorted(arrays.items()):
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        found.update(_tensor_bytes(tensor))
    return found.hexdigest()


def _read_header(data: MessageBytes, limits: MessageLimits | None) -> tuple[tuple[str, str, str], set[str]]:
    """Digest and text, and the names of the arrays, of the header that safetensors has; 8 bytes say how long it is."""
    length = int.from_bytes(data[:8], "little")
    if not 0 < length <= len(data) - 8:
        raise ValueError("the header is cut off")
    if limits is not None and length > limits.max_header_bytes:
        raise ValueError(f"the header has {length} bytes, and may have {limits.max_header_bytes}")
    header = json.loads(data[8 : 8 + length])
    names = set(header) - {_METADATA_KEY}
    if limits is not None and len(names) > limits.max_arrays:
        raise ValueError(f"it has {len(names)} arrays, and may have {limits.max_arrays}")
    return str(header[_METADATA_KEY][_HEADER_KEY]).partition(" "), names


def _check_references(fields: Any, names: set[str]) -> None:
    """What nobody refers to is not carried along."""
    referenced = {*fields["arrays"].values(), fields.get(_CORESET_KEY, "")} - {""}
    if referenced != names:
        raise ValueError(
            f"it has {len(names - referenced)} arrays that it does not name, and not {len(referenced - names)}"
        )


_FIELD_TYPES: dict[str, type | tuple[type, ...]] = {
    "party": str,
    "round": int,
    "kind": str,
    "status": str,
    "reason": str,
    "encrypted_coreset": bytes,
    "arrays": dict,
    "settings": dict,
    "metrics": dict,
    "deadline": (int, float),
}


def _check_fields(fields: dict[str, Any]) -> None:
    for name, value in fields.items():
        if name not in _FIELD_TYPES or not isinstance(value, _FIELD_TYPES[name]) or isinstance(value, bool):
            raise ValueError(f"its {name!r:.40} is {value!r:.40}")
    if fields.get("status", "ok") not in get_args(Status):
        raise ValueError(f"its status is {fields['status']!r:.40}")
    if not 0 < fields.get("deadline", 1) <= _MAX_DEADLINE:
        raise ValueError(f"its deadline is {fields['deadline']!r:.40}")
