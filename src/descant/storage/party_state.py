"""Tensors by party: in memory up to a budget, on disk beyond it, so that a hundred thousand parties fit."""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import sys
import tempfile
import weakref
from collections import OrderedDict
from collections.abc import Collection, Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ..core.algorithm import APPEND_ONLY
from ..errors import StateError
from .mapped_tensors import map_tensors
from .spill import spill_buffer

DEFAULT_BUDGET = 2**30
_TRIM_THRESHOLD = 2**25
_MMAP_THRESHOLD = -3
_MMAP_BYTES = 2**20  # glibc's number for it, and bytes


class PartyStore:
    """A `core.Store`. What was used last stays in memory; the rest goes to a folder that vanishes with the store.

    A commit can be undone, even one that was broken off half-way by an interrupt or a full disk: what it replaces is
    noted before anything changes, and :meth:`rollback` to the round before puts it back.

    >>> import torch
    >>> store = PartyStore()
    >>> store.stage("a", {"w": torch.ones(1)}); store.names()
    []
    >>> store.commit(1, ["a"]); store.names()
    ['a']
    """

    def __init__(self, budget: int = DEFAULT_BUDGET) -> None:
        self._budget = budget
        self._in_memory: OrderedDict[str, dict[str, Tensor]] = OrderedDict()
        self._memory_bytes = 0
        self._staged: dict[str, dict[str, Tensor]] = {}
        self._staged_bytes = 0  # bytes that are staged
        self._on_disk: set[str] = set()  # parties whose file is as new as their memory
        self._parties: set[str] = set()
        self._round = 0
        self._undo: tuple[int, dict[str, dict[str, Tensor]]] | None = None  # the round before, and what was replaced
        self._folder: Path | None = None
        self._spilled_bytes = 0  # bytes since memory was last given back

    @property
    def round(self) -> int:
        return self._round

    def get(self, party: str) -> dict[str, Tensor]:
        """What is committed of a party; empty for one that never kept anything."""
        return {name: self._copy(name, tensor) for name, tensor in self._load(party).items()}

    def stage(self, party: str, tensors: Mapping[str, Tensor]) -> None:
        self._staged[party] = {name: self._copy(name, tensor.detach()) for name, tensor in tensors.items()}
        self._staged_bytes += total_bytes(self._staged[party])

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        """A copy to be used or kept; of what is large it is in a file, where not everything fits into memory."""
        if name.startswith(APPEND_ONLY):
            return tensor
        over_budget = len(self._in_memory) < len(self._parties) or self._staged_bytes > self._budget
        memory_limit = 0 if over_budget and tensor.nbytes > _MMAP_BYTES else tensor.nbytes
        return spill_buffer(tuple(tensor.shape), tensor.dtype, memory_limit).copy_(tensor)

    def commit(self, round: int, parties: Collection[str]) -> None:
        chosen = {party: self._staged[party] for party in self._staged.keys() & set(parties)}
        self._undo = (self._round, {party: self._load(party) for party in chosen})  # first, before anything changes
        self._round = round
        self._assign(chosen)
        self._staged = {}
        self._staged_bytes = 0

    def rollback(self, round: int) -> None:
        """Forget what is staged, a commit that went beyond this round, and what was before: nobody goes back there."""
        self._staged = {}
        self._staged_bytes = 0
        if self._round == round:
            self._undo = None
            return
        if self._undo is None or self._undo[0] != round:
            raise StateError(
                f"The state is of round {round}, but the parties' models and memories are at {self._round}."
            )
        self._assign(self._undo[1])
        self._memory_bytes = sum(map(total_bytes, self._in_memory.values()))  # the broken commit may have lost count
        self._round = round
        self._undo = None

    def clear(self) -> None:
        """Forget everybody."""
        self._in_memory.clear()
        self._memory_bytes = 0
        self._staged = {}
        self._staged_bytes = 0
        self._undo = None
        self._on_disk = set()
        self._parties = set()
        self._round = 0

    def names(self) -> list[str]:
        return sorted(self._parties)

    @property
    def memory_bytes(self) -> int:
        """How much of it is in memory now."""
        return self._memory_bytes

    def _load(self, party: str) -> dict[str, Tensor]:
        if party not in self._parties:
            return {}
        if party not in self._in_memory:
            self._cache(party, map_tensors(self._file(party)))
        self._in_memory.move_to_end(party)
        return self._in_memory[party]

    def _assign(self, parties: Mapping[str, dict[str, Tensor]]) -> None:
        for party, tensors in parties.items():
            self._on_disk.discard(party)
            if tensors:
                self._cache(party, tensors)
                self._parties.add(party)
            else:
                self._memory_bytes -= total_bytes(self._in_memory.pop(party, {}))
                self._parties.discard(party)

    def _cache(self, party: str, tensors: dict[str, Tensor]) -> None:
        self._memory_bytes += total_bytes(tensors) - total_bytes(self._in_memory.get(party, {}))
        self._in_memory[party] = tensors
        self._in_memory.move_to_end(party)
        while self._memory_bytes > self._budget and len(self._in_memory) > 1:
            oldest = next(iter(self._in_memory))
            self._spill(oldest)  # on disk first: a row that cannot be written stays in memory
            self._memory_bytes -= total_bytes(self._in_memory.pop(oldest))

    def _spill(self, party: str) -> None:
        if party in self._on_disk:
            return
        try:
            self._file(party).unlink(missing_ok=True)  # somebody may have mapped what is there
            save_file({name: tensor.contiguous() for name, tensor in self._in_memory[party].items()}, self._file(party))
        except (OSError, SafetensorError) as error:
            raise StateError(
                f"The state of party {party!r:.40} cannot be written to {self._folder}: {error}"
            ) from error
        self._on_disk.add(party)
        self._spilled_bytes += total_bytes(self._in_memory[party])
        if self._spilled_bytes > max(self._budget, _TRIM_THRESHOLD):
            self._spilled_bytes = 0
            _trim_heap()

    def _file(self, party: str) -> Path:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="descant-"))
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        name = hashlib.blake2b(party.encode(), digest_size=16).hexdigest()
        return self._folder / f"{name}.safetensors"


def total_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Bytes of them all."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _trim_heap() -> None:
    """Return freed memory to the system: rows that come and go between larger arrays leave holes that glibc keeps."""
    _call_glibc("malloc_trim", 0)


def release_memory_eagerly() -> None:
    """From now on a large array goes back to the system when it is freed, and leaves no hole: for a process that lasts.

    It costs the time to find and clear its pages anew.
    """
    _call_glibc("mallopt", _MMAP_THRESHOLD, _MMAP_BYTES)


def _call_glibc(name: str, *numbers: int) -> None:
    function = getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
    if function is not None:
        function(*numbers)
