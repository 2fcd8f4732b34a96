"""Tensors by party, in memory up to a budget and on disk beyond it, so that 100,000 parties fit."""

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
_MMAP_THRESHOLD = -3  # glibc's number of this option of mallopt
_MMAP_BYTES = 2**20  # bytes


class PartyStore:
    """A `core.Store` that keeps the most recently used parties in memory and spills the rest to a temporary folder.

    The folder disappears with the store. A commit can be undone, even one that an interrupt or a full disk broke off:
    what it replaces is noted before anything changes, and :meth:`rollback` to the previous round restores it.

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
        self._staged_bytes = 0
        self._on_disk: set[str] = set()  # parties whose file is up to date
        self._parties: set[str] = set()
        self._round = 0
        self._undo: tuple[int, dict[str, dict[str, Tensor]]] | None = None  # the previous round, and what was replaced
        self._folder: Path | None = None
        self._spilled_bytes = 0  # bytes since memory was last trimmed

    @property
    def round(self) -> int:
        return self._round

    def get(self, party: str) -> dict[str, Tensor]:
        """Return the committed tensors of a party; empty for a party without any."""
        return {name: self._copy(name, tensor) for name, tensor in self._load(party).items()}

    def stage(self, party: str, tensors: Mapping[str, Tensor]) -> None:
        self._staged[party] = {name: self._copy(name, tensor.detach()) for name, tensor in tensors.items()}
        self._staged_bytes += total_bytes(self._staged[party])

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        """Return a copy; of a large tensor it is in a file if not everything fits into memory."""
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
        """Discard what is staged, undo a commit beyond this round, and drop the undo record."""
        self._staged = {}
        self._staged_bytes = 0
        if self._round == round:
            self._undo = None
            return
        if self._undo is None or self._undo[0] != round:
            raise StateError(
                f"The state is of round {round}, but the parties' models and party states are at {self._round}."
            )
        self._assign(self._undo[1])
        self._memory_bytes = sum(
            map(total_bytes, self._in_memory.values())
        )  # the interrupted commit may have miscounted
        self._round = round
        self._undo = None

    def clear(self) -> None:
        """Remove all parties."""
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
        """Bytes that are in memory now."""
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
            self._file(party).unlink(missing_ok=True)  # the old file may still be mapped
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
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _trim_heap() -> None:
    """Return freed memory to the system: glibc keeps the holes that rows leave between larger arrays."""
    _call_glibc("malloc_trim", 0)


def release_memory_eagerly() -> None:
    """Let glibc return each large array to the system when it is freed; use it in long-lived processes.

    The cost is that the system must map and clear new pages for the next array.
    """
    _call_glibc("mallopt", _MMAP_THRESHOLD, _MMAP_BYTES)


def _call_glibc(name: str, *numbers: int) -> None:
    function = getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
    if function is not None:
        function(*numbers)
