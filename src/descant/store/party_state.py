"""Tensors by party: in memory up to a budget, on disk beyond it, so that a hundred thousand parties fit."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
import weakref
from collections import OrderedDict
from collections.abc import Collection, Mapping
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

DEFAULT_BUDGET = 2**30


class PartyStore:
    """A `core.Store`. What was used last stays in memory; the rest goes to a folder that vanishes with the store.

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
        self._on_disk: set[str] = set()  # parties whose file is as new as their memory
        self._all: set[str] = set()
        self._round = 0
        self._folder: Path | None = None

    def get(self, party: str) -> dict[str, Tensor]:
        """What is committed of a party; empty for one that never kept anything."""
        if party not in self._all:
            return {}
        if party not in self._held:
            self._hold(party, load_file(self._file(party)))
        self._held.move_to_end(party)
        return {name: tensor.clone() for name, tensor in self._held[party].items()}

    def stage(self, party: str, tensors: Mapping[str, Tensor]) -> None:
        self._staged[party] = {name: tensor.detach().clone() for name, tensor in tensors.items()}

    @property
    def round(self) -> int:
        return self._round

    def commit(self, round: int, parties: Collection[str]) -> None:
        for party in self._staged.keys() & set(parties):
            self._on_disk.discard(party)
            self._all.add(party)
            self._hold(party, self._staged[party])
        self._staged = {}
        self._round = round

    def rollback(self) -> None:
        self._staged = {}

    def clear(self) -> None:
        """Forget everybody."""
        self._held.clear()
        self._bytes = 0
        self._staged, self._on_disk, self._all, self._round = {}, set(), set(), 0

    def names(self) -> list[str]:
        return sorted(self._all)

    @property
    def held_bytes(self) -> int:
        """How much of it is in memory now."""
        return self._bytes

    def _hold(self, party: str, tensors: dict[str, Tensor]) -> None:
        self._bytes -= _size(self._held.pop(party, {}))
        self._held[party] = tensors
        self._bytes += _size(tensors)
        while self._bytes > self._budget and len(self._held) > 1:
            oldest, spilled = self._held.popitem(last=False)
            self._bytes -= _size(spilled)
            if oldest not in self._on_disk:
                save_file({name: tensor.contiguous() for name, tensor in spilled.items()}, self._file(oldest))
                self._on_disk.add(oldest)

    def _file(self, party: str) -> Path:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="descant-"))
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        name = hashlib.blake2b(party.encode(), digest_size=16).hexdigest()
        return self._folder / f"{name}.safetensors"


def _size(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
