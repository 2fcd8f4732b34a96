"""Party states that stay on the machines where they were made; of the large ones, this process has a reference."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from torch import Tensor

from ...core.algorithm import NamedTensors
from ...storage import PartyStore
from ...storage.party_store import total_bytes

MIN_REMOTE_BYTES = 100_000
"""Least bytes of a state that stays remote; Ray returns smaller objects to the caller in any case."""


class RemoteState(Mapping[str, Tensor]):
    """A party state on another machine; each access fetches it again."""

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
        """Fetch the whole state."""
        return self._fetch(self.object_ref)


def state_bytes(party_state: NamedTensors) -> int:
    """Return the size of a party state without fetching it."""
    return party_state.size_bytes if isinstance(party_state, RemoteState) else total_bytes(party_state)


class RemotePartyStore:
    """A `core.Store` of party states that are local, as in a :class:`PartyStore`, or a :class:`RemoteState`."""

    def __init__(self, budget: int) -> None:
        self._local = PartyStore(budget)
        self._remote_by_round: dict[int, dict[str, RemoteState]] = {0: {}}  # after the last two commits
        self._staged: dict[str, RemoteState | None] = {}  # None: it is staged in the local store
        self.has_remote = False  # whether any state was ever large enough to stay remote

    @property
    def round(self) -> int:
        return self._local.round

    @property
    def _remote(self) -> dict[str, RemoteState]:
        """The remote states of the local store's round, so that both stores commit together."""
        return self._remote_by_round[self._local.round]

    @property
    def held_bytes(self) -> int:
        """The bytes of party states in the memory of this process."""
        return self._local.memory_bytes

    def peek(self, party: str) -> NamedTensors:
        """Return the committed state of a party without fetching a remote one."""
        return self._remote[party] if party in self._remote else self._local.get(party)

    def get(self, party: str) -> dict[str, Tensor]:
        state = self.peek(party)
        return state.load() if isinstance(state, RemoteState) else dict(state)

    def stage(self, party: str, tensors: NamedTensors) -> None:
        remote = tensors if isinstance(tensors, RemoteState) else None
        self.has_remote = self.has_remote or remote is not None or total_bytes(tensors) >= MIN_REMOTE_BYTES
        self._local.stage(party, tensors if remote is None else {})
        self._staged[party] = remote

    def commit(self, round: int, parties: Collection[str]) -> None:
        committed = {party: self._staged[party] for party in self._staged.keys() & set(parties)}
        remote = {party: state for party, state in {**self._remote, **committed}.items() if state is not None}
        self._remote_by_round = {self.round: self._remote, round: remote}
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
