"""Tasks and replies as bytes: safetensors for the arrays, JSON for the rest; nothing is unpickled or executed.

Every engine outside this process uses this format. A packed message carries a digest of itself: a bit flipped in
memory or on a disk could otherwise turn one valid number into another.
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
from ..storage.safetensors_header import LENGTH_BYTES, METADATA_KEY, decode_header, encode_header, header_length
from ..storage.spill import SpillFile

MessageT = TypeVar("MessageT", Task, Reply)
MessageBytes: TypeAlias = bytes | SpillFile
"""A packed task or reply, in memory or in a file."""
_HEADER_KEY = "descant"
_CORESET_KEY = "encrypted_coreset"
_MAX_DEADLINE = 1e7  # seconds that a task may take
_MAX_TEXT_BYTES = 2**20  # bytes of all fields that are not arrays
_MAX_ENTRY_BYTES = 512  # header bytes of one array beside its name: its type, shape, byte range and key
_DECODE_ERRORS = (SafetensorError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, OverflowError)


@dataclass(frozen=True)
class MessageLimits:
    """Limits on a message that are checked before any of it is decoded."""

    max_arrays: int
    max_header_bytes: int

    @classmethod
    def for_tensors(cls, names: Collection[str]) -> MessageLimits:
        """Return the limits for a reply with arrays of these names and one encrypted coreset.

        >>> MessageLimits.for_tensors(["weight", "bias"]).max_arrays
        3
        """
        names = [*names, _CORESET_KEY]
        return cls(len(names), _MAX_TEXT_BYTES + sum(_MAX_ENTRY_BYTES + len(json.dumps(name)) for name in names))


class TensorPool:
    """The arrays of several messages, each stored once even if many tasks share it."""

    def __init__(self) -> None:
        self.arrays: dict[str, Tensor] = {}
        self._keys: dict[int, str] = {}
        self._kept_alive: list[Tensor] = []  # or another tensor could get the same id()

    def add(self, tensors: Mapping[str, Tensor]) -> dict[str, str]:
        """Add tensors and return their keys in the pool, by name."""
        return {name: self._add(tensor) for name, tensor in tensors.items()}

    def _add(self, tensor: Tensor) -> str:
        if id(tensor) not in self._keys:
            self._kept_alive.append(tensor)
            self._keys[id(tensor)] = str(len(self._keys))
            self.arrays[self._keys[id(tensor)]] = tensor.detach().contiguous()
        return self._keys[id(tensor)]


def to_fields(message: Task | Reply, pool: TensorPool) -> dict[str, Any]:
    """Return a task or a reply as JSON values, with its arrays in a pool."""
    fields = {**vars(message), "arrays": pool.add(message.arrays)}
    if isinstance(message, Reply):
        coreset = message.encrypted_coreset
        fields[_CORESET_KEY] = pool.add({"": _bytes_to_tensor(coreset)})[""] if coreset else ""
    return fields


def _bytes_to_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _tensor_to_bytes(tensor: Tensor) -> bytes:
    if tensor.dtype != torch.uint8:
        raise ValueError(f"its {_CORESET_KEY!r} has the type {tensor.dtype}")
    return bytes(tensor.numpy().tobytes())


def from_fields(fields: Any, arrays: Mapping[str, Tensor], kind: type[MessageT]) -> MessageT:
    """Return the task or reply with these fields, or raise :class:`EngineError`."""
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
    """Return a task or a reply as bytes; the same message always gives the same bytes.

    >>> import torch
    >>> unpack(pack(Reply("a", 1, "train", arrays={"w": torch.ones(2)})), Reply).arrays["w"]
    tensor([1., 1.])
    """
    arrays, metadata = _split_message(message)
    return save(unshare_storage(arrays), metadata)


def pack_or_spill(budget: int, message: Task | Reply) -> MessageBytes:
    """Return a message as bytes, in a file if its arrays have more bytes than a budget.

    safetensors itself would hold the arrays in memory twice.

    >>> import torch
    >>> reply = Reply("a", 1, "train", arrays={"w": torch.ones(2)})
    >>> pack_or_spill(0, reply)[:] == pack(reply)
    True
    """
    arrays, metadata = _split_message(message)
    if sum(tensor.nbytes for tensor in arrays.values()) <= budget:
        return save(unshare_storage(arrays), metadata)
    return write_to_file(arrays, metadata)


def write_to_file(arrays: Mapping[str, Tensor], metadata: Mapping[str, str]) -> SpillFile:
    """Write arrays and metadata in the format of safetensors into a file, without holding them in memory.

    >>> import torch
    >>> write_to_file({"w": torch.ones(2)}, {"round": "1"})[:] == save({"w": torch.ones(2)}, {"round": "1"})
    True
    """
    header, order = _file_header(arrays, metadata)
    file = SpillFile()
    file.append(header)
    for name in order:
        file.append(_tensor_bytes(arrays[name]))
    return file


def _split_message(message: Task | Reply) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return a message's arrays and its other fields as one text; with several texts their order would vary."""
    pool = TensorPool()
    fields = json.dumps(to_fields(message, pool))
    return pool.arrays, {_HEADER_KEY: f"{_message_digest(fields, pool.arrays)} {fields}"}


def _file_header(arrays: Mapping[str, Tensor], metadata: Mapping[str, str]) -> tuple[bytes, list[str]]:
    """Return the header that safetensors writes for these arrays, and their order, found with empty arrays."""
    header, _ = decode_header(save({name: tensor.new_empty(0) for name, tensor in arrays.items()}, dict(metadata)))
    order = [name for name in header if name != METADATA_KEY]
    end = 0
    for name in order:
        begin = end
        end += arrays[name].nbytes
        header[name] |= {"shape": list(arrays[name].shape), "data_offsets": [begin, end]}
    return encode_header(header), order


def _tensor_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor without copying them."""
    data: memoryview = tensor.reshape(-1).view(torch.uint8).numpy().data
    return data


def unshare_storage(arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors that share no storage, copying where needed: safetensors does not save two rows of a stack."""
    unshared = dict[str, Tensor]()
    seen_storages = set[int]()
    for key, tensor in arrays.items():
        storage = tensor.untyped_storage()
        is_sole_owner = storage.nbytes() == tensor.nbytes and storage.data_ptr() not in seen_storages
        unshared[key] = tensor if is_sole_owner else tensor.clone()
        seen_storages.add(storage.data_ptr())
    return unshared


def unpack(data: MessageBytes, kind: type[MessageT], limits: MessageLimits | None = None) -> MessageT:
    """Return the task or reply in these bytes; raise :class:`EngineError` if they hold another or are over a limit.

    The arrays of a message in a file stay in the file and keep it open. Without limits, the sender can make this
    process use any amount of memory.
    """
    try:
        (digest, _, text), names = _read_header(data, limits)
        fields = json.loads(text)
        _check_references(fields, names)
        arrays = _arrays(data)
        if _message_digest(text, arrays) != digest:
            raise ValueError("they were changed on the way")
        return from_fields(fields, arrays, kind)
    except _DECODE_ERRORS as error:
        raise EngineError(f"These {len(data)} bytes are not a {kind.__name__} of this version: {error}") from error


def _arrays(data: MessageBytes) -> dict[str, Tensor]:
    if isinstance(data, bytes) or data.path is None:
        return load(data[:])
    return map_tensors(data.path)


def _message_digest(fields: str, arrays: Mapping[str, Tensor]) -> str:
    """Return a digest of a whole message; it has no key, so it detects faults and not forgery."""
    hasher = hashlib.sha256(fields.encode())
    for name, tensor in sorted(arrays.items()):
        hasher.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        hasher.update(_tensor_bytes(tensor))
    return hasher.hexdigest()


def _read_header(data: MessageBytes, limits: MessageLimits | None) -> tuple[tuple[str, str, str], set[str]]:
    """Return the digest and the text of a message, and the names of its arrays, within the limits."""
    length = header_length(data)
    if not 0 < length <= len(data) - LENGTH_BYTES:
        raise ValueError("the header is cut off")
    if limits is not None and length > limits.max_header_bytes:
        raise ValueError(f"the header has {length} bytes, and the limit is {limits.max_header_bytes}")
    header, _ = decode_header(data)
    names = set(header) - {METADATA_KEY}
    if limits is not None and len(names) > limits.max_arrays:
        raise ValueError(f"it has {len(names)} arrays, and the limit is {limits.max_arrays}")
    return str(header[METADATA_KEY][_HEADER_KEY]).partition(" "), names


def _check_references(fields: Any, names: set[str]) -> None:
    """Raise unless the fields refer to exactly the arrays in the message."""
    referenced = {*fields["arrays"].values(), fields.get(_CORESET_KEY, "")} - {""}
    if referenced != names:
        raise ValueError(
            f"it has {len(names - referenced)} arrays that it does not refer to, and lacks {len(referenced - names)}"
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
