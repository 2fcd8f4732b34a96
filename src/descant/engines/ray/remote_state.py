"""What parties remember, on the machines where it was made: of what is large, only the place is here."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from torch import Tensor

from ...core.algorithm import Memory
from ...storage import PartyStore
from ...storage.party_state import size

LARGE = 100_000
"""Bytes of a memory that stays where it was made: Ray itself hands what is smaller to whoever asked for it."""


class Far(Mapping[str, Tensor]):
    """A memory that is elsewhere: whoever looks into it fetches it, anew every time."""

    def __init__(self, place: Any, fetch: Callable[[Any], dict[str, Tensor]], bytes: int = 0) -> None:
        self.place, self._fetch, self.bytes = place, fetch, bytes

    def __getitem__(self, name: str) -> Tensor:
        return self.fetched()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.fetched())

    def __len__(self) -> int:
        return len(self.fetched())

    def fetched(self) -> dict[str, Tensor]:
        """The whole of it, here."""
        return self._fetch(self.place)


def weight(memory: Memory) -> int:
    """Bytes of a memory; it is not fetched for that."""
    return memory.bytes if isinstance(memory, Far) else size(memory)


class Afar:
    """A `core.Store` of memories that are here, as in a :class:`PartyStore`, or :class:`Far`."""

    def __init__(self, budget: int) -> None:
        self._near = PartyStore(budget)
        self._rounds: dict[int, dict[str, Far]] = {0: {}}  # that of the last commit, and the one before
        self._staged: dict[str, Far | None] = {}  # None: it is staged here
        self.has_large = False  # or had: whether to let memories stay

    @property
    def round(self) -> int:
        return self._near.round

    @property
    def _far(self) -> dict[str, Far]:
        """What is far changes with the round of what is here: neither is broken off without the other."""
        return self._rounds[self._near.round]

    @property
    def held_bytes(self) -> int:
        """How much of it is in the memory of this process."""
        return self._near.held_bytes

    def look(self, party: str) -> Memory:
        """What is committed of a party; what is far is not fetched."""
        return self._far[party] if party in self._far else self._near.get(party)

    def get(self, party: str) -> dict[str, Tensor]:
        found = self.look(party)
        return found.fetched() if isinstance(found, Far) else dict(found)

    def stage(self, party: str, tensors: Memory) -> None:
        far = tensors if isinstance(tensors, Far) else None
        self.has_large = self.has_large or far is not None or size(tensors) >= LARGE
        self._near.stage(party, tensors if far is None else {})
        self._staged[party] = far

    def commit(self, round: int, parties: Collection[str]) -> None:
        chosen = {party: self._staged[party] for party in self._staged.keys() & set(parties)}
        far = {party: far for party, far in {**self._far, **chosen}.items() if far is not None}
        self._rounds = {self.round: self._far, round: far}
        self._near.commit(round, parties)
        self._staged = {}

    def rollback(self, round: int) -> None:
        self._near.rollback(round)
        self._rounds, self._staged = {round: self._far}, {}

    def clear(self) -> None:
        self._rounds = {self.round: {}, 0: {}}
        self._near.clear()
        self._staged = {}

    def names(self) -> list[str]:
        return sorted({*self._near.names(), *self._far})
