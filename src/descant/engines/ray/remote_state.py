"""What parties remember, on the machines where it was made: of what is large, only the place is here."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from torch import Tensor

from ...core.algorithm import NamedTensors
from ...storage import PartyStore
from ...storage.party_state import total_bytes

MIN_REMOTE_BYTES = 100_000
"""Bytes of a memory that stays where it was made: Ray itself hands what is smaller to whoever asked for it."""


class RemoteState(Mapping[str, Tensor]):
    """A memory that is elsewhere: whoever looks into it fetches it, anew every time."""

    def __init__(self, object_ref: Any, fetch: Callable[[Any], dict[str, Tensor]], size_bytes: int = 0) -> None:
        self.object_ref = object_ref
        self._fetch = fetch
        self.size_bytes = size_bytes

    def __getitem__(self, name: str) -> Tensor:
        return self.load()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.load())

    def __len__(self) -> int:
        return len(self.load())

    def load(self) -> dict[str, Tensor]:
        """The whole of it, here."""
        return self._fetch(self.object_ref)


def state_bytes(party_state: NamedTensors) -> int:
    """Bytes of a memory; it is not fetched for that."""
    return party_state.size_bytes if isinstance(party_state, RemoteState) else total_bytes(party_state)


class RemotePartyStore:
    """A `core.Store` of memories that are here, as in a :class:`PartyStore`, or :class:`Far`."""

    def __init__(self, budget: int) -> None:
        self._local = PartyStore(budget)
        self._remote_by_round: dict[int, dict[str, RemoteState]] = {
            0: {}
        }  # that of the last commit, and the one before
        self._staged: dict[str, RemoteState | None] = {}  # None: it is staged here
        self.has_remote = False  # or had: whether to let memories stay

    @property
    def round(self) -> int:
        return self._local.round

    @property
    def _remote(self) -> dict[str, RemoteState]:
        """What is far changes with the round of what is here: neither is broken off without the other."""
        return self._remote_by_round[self._local.round]

    @property
    def held_bytes(self) -> int:
        """How much of it is in the memory of this process."""
        return self._local.memory_bytes

    def peek(self, party: str) -> NamedTensors:
        """What is committed of a party; what is far is not fetched."""
        return self._remote[party] if party in self._remote else self._local.get(party)

    def get(self, party: str) -> dict[str, Tensor]:
        found = self.peek(party)
        return found.load() if isinstance(found, RemoteState) else dict(found)

    def stage(self, party: str, tensors: NamedTensors) -> None:
        far = tensors if isinstance(tensors, RemoteState) else None
        self.has_remote = self.has_remote or far is not None or total_bytes(tensors) >= MIN_REMOTE_BYTES
        self._local.stage(party, tensors if far is None else {})
        self._staged[party] = far

    def commit(self, round: int, parties: Collection[str]) -> None:
        chosen = {party: self._staged[party] for party in self._staged.keys() & set(parties)}
        far = {party: far for party, far in {**self._remote, **chosen}.items() if far is not None}
        self._remote_by_round = {self.round: self._remote, round: far}
        self._local.commit(round, parties)
        self._staged = {}

    def rollback(self, round: int) -> None:
        self._local.rollback(round)
        self._remote_by_round = {round: self._remote}
        self._staged = {}

    def clear(self) -> None:
        self._remote_by_round = {self.round: {}, 0: {}}
        self._local.clear()
        self._staged = {}

    def names(self) -> list[str]:
        return sorted({*self._local.names(), *self._remote})
