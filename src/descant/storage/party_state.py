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

from ..core.algorithm import LOG
from ..errors import StateError
from .mapped_tensors import tensors_in
from .spill import room

DEFAULT_BUDGET = 2**30
_WORTH_GIVING_BACK = 2**25
_MMAP_THRESHOLD, _LARGE = -3, 2**20  # glibc's number for it, and bytes


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
        self._held: OrderedDict[str, dict[str, Tensor]] = OrderedDict()
        self._bytes = 0
        self._staged: dict[str, dict[str, Tensor]] = {}
        self._waiting = 0  # bytes that are staged
        self._on_disk: set[str] = set()  # parties whose file is as new as their memory
        self._all: set[str] = set()
        self._round = 0
        self._before: tuple[int, dict[str, dict[str, Tensor]]] | None = None  # the round before, and what was replaced
        self._folder: Path | None = None
        self._spilled = 0  # bytes since memory was last given back

    @property
    def round(self) -> int:
        return self._round

    def get(self, party: str) -> dict[str, Tensor]:
        """What is committed of a party; empty for one that never kept anything."""
        return {name: self._copied(name, tensor) for name, tensor in self._look(party).items()}

    def stage(self, party: str, tensors: Mapping[str, Tensor]) -> None:
        self._staged[party] = {name: self._copied(name, tensor.detach()) for name, tensor in tensors.items()}
        self._waiting += size(self._staged[party])

    def _copied(self, name: str, tensor: Tensor) -> Tensor:
        """A copy to be used or kept; of what is large it is in a file, where not everything fits into memory."""
        if name.startswith(LOG):
            return tensor
        crowded = len(self._held) < len(self._all) or self._waiting > self._budget
        most = 0 if crowded and tensor.nbytes > _LARGE else tensor.nbytes
        return room(tuple(tensor.shape), tensor.dtype, most).copy_(tensor)

    def commit(self, round: int, parties: Collection[str]) -> None:
        chosen = {party: self._staged[party] for party in self._staged.keys() & set(parties)}
        self._before = (self._round, {party: self._look(party) for party in chosen})  # first, before anything changes
        self._round = round
        self._put(chosen)
        self._staged, self._waiting = {}, 0

    def rollback(self, round: int) -> None:
        """Forget what is staged, a commit that went beyond this round, and what was before: nobody goes back there."""
        self._staged, self._waiting = {}, 0
        if self._round == round:
            self._before = None
            return
        if self._before is None or self._before[0] != round:
            raise StateError(
                f"The state is of round {round}, but the parties' models and memories are at {self._round}."
            )
        self._put(self._before[1])
        self._bytes = sum(map(size, self._held.values()))  # the broken commit may have lost count
        self._round, self._before = round, None

    def clear(self) -> None:
        """Forget everybody."""
        self._held.clear()
        self._bytes = 0
        self._staged, self._waiting, self._before = {}, 0, None
        self._on_disk, self._all, self._round = set(), set(), 0

    def names(self) -> list[str]:
        return sorted(self._all)

    @property
    def held_bytes(self) -> int:
        """How much of it is in memory now."""
        return self._bytes

    def _look(self, party: str) -> dict[str, Tensor]:
        if party not in self._all:
            return {}
        if party not in self._held:
            self._hold(party, tensors_in(self._file(party)))
        self._held.move_to_end(party)
        return self._held[party]

    def _put(self, parties: Mapping[str, dict[str, Tensor]]) -> None:
        for party, tensors in parties.items():
            self._on_disk.discard(party)
            if tensors:
                self._hold(party, tensors)
                self._all.add(party)
            else:
                self._bytes -= size(self._held.pop(party, {}))
                self._all.discard(party)

    def _hold(self, party: str, tensors: dict[str, Tensor]) -> None:
        self._bytes += size(tensors) - size(self._held.get(party, {}))
        self._held[party] = tensors
        self._held.move_to_end(party)
        while self._bytes > self._budget and len(self._held) > 1:
            oldest = next(iter(self._held))
            self._spill(oldest)  # on disk first: a row that cannot be written stays in memory
            self._bytes -= size(self._held.pop(oldest))

    def _spill(self, party: str) -> None:
        if party in self._on_disk:
            return
        try:
            self._file(party).unlink(missing_ok=True)  # somebody may have mapped what is there
            save_file({name: tensor.contiguous() for name, tensor in self._held[party].items()}, self._file(party))
        except (OSError, SafetensorError) as error:
            raise StateError(
                f"The state of party {party!r:.40} cannot be written to {self._folder}: {error}"
            ) from error
        self._on_disk.add(party)
        self._spilled += size(self._held[party])
        if self._spilled > max(self._budget, _WORTH_GIVING_BACK):
            self._spilled = 0
            _give_back()

    def _file(self, party: str) -> Path:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="descant-"))
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        name = hashlib.blake2b(party.encode(), digest_size=16).hexdigest()
        return self._folder / f"{name}.safetensors"


def size(tensors: Mapping[str, Tensor]) -> int:
    """Bytes of them all."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _give_back() -> None:
    """Return freed memory to the system: rows that come and go between larger arrays leave holes that glibc keeps."""
    _glibc("malloc_trim", 0)


def give_back_at_once() -> None:
    """From now on a large array goes back to the system when it is freed, and leaves no hole: for a process that lasts.

    It costs the time to find and clear its pages anew.
    """
    _glibc("mallopt", _MMAP_THRESHOLD, _LARGE)


def _glibc(name: str, *numbers: int) -> None:
    function = getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
    if function is not None:
        function(*numbers)
