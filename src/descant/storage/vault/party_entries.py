"""The drawers of a vault, one a party: a key and a sealed coreset, changed only together with the audit log.

A change counts once its line is in the log; what lies in a drawer beyond that was begun by a process that was killed,
and is finished or undone before anything else happens (:meth:`Drawers.alone`). So a kill at any moment leaves what was
there before, or what should be there after.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...core.settings import unknown_name_error
from ...errors import StateError, VaultError
from .. import atomic
from ..atomic_folder import write_errors
from ..audit_log import AUDIT_LOG, AuditLog
from ..lock import FolderLock
from .private_keys import PrivateKey, load_key

PARTIES_FOLDER = "parties"
LOCK_FILE = ".lock"
LOCK_TIMEOUT = 10.0  # seconds to wait for another process, which needs the folder for moments only
_FILES = _KEY, _CORESET, _PREVIOUS, _NEW = "key", "coreset", "coreset.old", "coreset.new"
_FORGOTTEN_EVENTS = ("forgetting", "forgotten")  # events after which nothing is held of a party
_NO_KEY_ADVICE = "Nobody can open what the party has sealed: forget it, and invite it again."


class VaultEntries:
    """What a vault holds of its parties. All but :meth:`alone` is done within it."""

    def __init__(self, folder: Path, audit: AuditLog, user: str) -> None:
        self.folder = folder
        self.audit = audit
        self._user = user

    @contextmanager
    def exclusive_access(self, party_to_forget: str | None = None) -> Iterator[set[str]]:
        """While no other process is at the folder, and after what one that died has left was put in order.

        It gives the parties whose forgetting was finished by that. Whoever is to be forgotten is destroyed even where
        nothing else can be done: when the log is damaged, or when a copy of a forgotten drawer was put back.
        """
        with write_errors(self.folder):
            lock = FolderLock(self.folder / LOCK_FILE, LOCK_TIMEOUT)
            try:
                self._catch_up(party_to_forget)
                yield self._repair(party_to_forget)
            finally:
                lock.release()

    def log_event(self, event: str, party: str, **fields: Any) -> None:
        """A line in the audit log, on the disk when this returns."""
        self.audit.add(event, party=party, who=self._user, **fields)

    def names(self) -> list[str]:
        """Who was invited and not forgotten."""
        return sorted(
            party for party, latest in self.audit.latest_events.items() if latest["event"] not in _FORGOTTEN_EVENTS
        )

    def entry(self, party: str) -> dict[str, Any] | None:
        """What the log says is held of a party: with a digest and a generation, if it has sealed something."""
        latest = self.audit.latest_events.get(party)
        return None if latest is None or latest["event"] in _FORGOTTEN_EVENTS else latest

    def key(self, party: str) -> PrivateKey:
        """The party's own key in this vault."""
        return load_key(self._party_folder(party) / _KEY, _NO_KEY_ADVICE)

    def add(self, party: str, key: PrivateKey, key_fingerprint: str) -> None:
        """A drawer with a key; until the log has it, it is nobody's. Generations go on from what was forgotten."""
        known = self.audit.latest_events.get(party, {}).get("generation")
        atomic.make_folder(self._party_folder(party), 0o700)
        key.write(self._party_folder(party) / _KEY)
        self.log_event("invited", party, key=key_fingerprint, **({} if known is None else {"generation": known}))

    def store(self, party: str, ciphertext: bytes, generation: int) -> None:
        """A sealed coreset. The one before it is kept, for a run that is resumed from then; older ones are not."""
        folder = self._party_folder(party)
        latest = self.audit.latest_events[party]
        atomic.write(folder / _NEW, ciphertext, atomic.PRIVATE_MODE)
        atomic.sync_folder(folder)
        event = "refreshed" if "digest" in latest else "sealed"
        previous = {}
        if (folder / _CORESET).exists() and ciphertext_digest((folder / _CORESET).read_bytes()) == latest.get("digest"):
            previous = {"previous_digest": latest["digest"]}  # one that was changed since is not kept
        self.log_event(event, party, digest=ciphertext_digest(ciphertext), generation=generation, **previous)
        self._finish_store(folder, self.audit.latest_events[party])

    def digests(self, party: str) -> list[str]:
        """Of the coresets that are held of a party, the newest first."""
        return [
            self.audit.latest_events[party][name]
            for name in ("digest", "previous_digest")
            if name in self.audit.latest_events[party]
        ]

    def load(self, party: str, expected_digest: str) -> bytes:
        """The sealed coreset of this digest, which is one of those that the log speaks of."""
        newest = expected_digest == self.audit.latest_events[party]["digest"]
        file = self._party_folder(party) / (_CORESET if newest else _PREVIOUS)
        try:
            found = file.read_bytes()
        except OSError as error:
            raise VaultError(f"The coreset of party {party!r} cannot be read: {error.strerror}.") from None
        if ciphertext_digest(found) != expected_digest:
            number = self.audit.latest_events[party]["generation"]
            raise VaultError(
                f"The coreset of party {party!r} is not the one {'of' if newest else 'before'} generation {number} "
                f"that was stored: {file} was changed, or replaced by another one. Let the party seal a new one."
            )
        return found

    def forget(self, party: str) -> None:
        """No key, no coreset, and a line that says so."""
        latest = self.audit.latest_events.get(party)
        if latest is not None and latest["event"] == "forgotten":
            raise VaultError(f"Party {party!r} was forgotten already, at {latest['at']}. Nothing of it is held.")
        if latest is None and not self.names():
            raise VaultError(f"Party {party!r} is not in the vault {self.folder}, and nobody else is.")
        if latest is None:
            raise unknown_name_error("party in this vault", party, self.names())
        self._forget(party)

    def _forget(self, party: str) -> None:
        """From the first line on it is forgotten, by whom the line says, whatever happens and whatever is missing."""
        self.log_event("forgetting", party, **_coreset_fields(self.audit.latest_events[party]))
        self._finish_forget(party)

    def _finish_forget(self, party: str) -> None:
        _destroy_entry(self._party_folder(party))
        self.log_event("forgotten", party, **_coreset_fields(self.audit.latest_events[party]))

    def _catch_up(self, party_to_forget: str | None) -> None:
        try:
            self.audit.catch_up()
        except StateError as error:
            if party_to_forget is None or not self._party_folder(party_to_forget).exists():
                raise
            _destroy_entry(self._party_folder(party_to_forget))
            raise StateError(
                f"The key and the coreset of party {party_to_forget!r} are destroyed, but the log cannot say so. {error} "
                "Then forget the party once more, so that the log has it."
            ) from error

    def _repair(self, party_to_forget: str | None) -> set[str]:
        finished = {party for party, held in self.audit.latest_events.items() if held["event"] == "forgetting"}
        for name in sorted(finished):
            self._finish_forget(name)
        if (
            party_to_forget in self.audit.latest_events
            and self.entry(party_to_forget) is None
            and _has_coreset(self._party_folder(party_to_forget))
        ):
            self._forget(party_to_forget)
            finished.add(party_to_forget)
        party_by_folder = {self._party_folder(party).name: party for party in self.audit.latest_events}
        for folder in sorted((self.folder / PARTIES_FOLDER).glob("?" * 32)):
            party = party_by_folder.get(folder.name)
            if party is not None and (held := self.entry(party)):
                self._finish_store(folder, held)
            elif not _has_coreset(folder):
                _destroy_entry(folder)  # an invitation that nobody got, or the last of a forgotten party
            else:
                raise self._unexpected_coreset_error(folder, None if party is None else self.audit.latest_events[party])
        return finished

    def _finish_store(self, folder: Path, latest: dict[str, Any]) -> None:
        """A new coreset is in its place if the log has it; if not, it was never there."""
        if not (folder / _NEW).exists():
            return
        if ciphertext_digest((folder / _NEW).read_bytes()) != latest.get("digest"):
            atomic.remove(folder / _NEW)
            return
        if "previous_digest" not in latest:
            atomic.remove(folder / _PREVIOUS)
        elif (folder / _CORESET).exists():
            atomic.rename(folder / _CORESET, folder / _PREVIOUS)
        atomic.rename(folder / _NEW, folder / _CORESET)

    def _unexpected_coreset_error(self, folder: Path, forgotten_event: dict[str, Any] | None) -> StateError:
        """What is wrong with a coreset that should not be there."""
        if forgotten_event is None:
            return StateError(
                f"{folder} holds a coreset that {self.folder / AUDIT_LOG} knows nothing of: one of them was put back "
                "to an older copy. Restore both from the same one."
            )
        return StateError(
            f"{folder} holds a coreset of party {forgotten_event['party']!r}, which was forgotten at {forgotten_event['at']}: somebody has "
            "put it back from a copy. Forget the party once more, and this copy is destroyed, too."
        )

    def _party_folder(self, party: str) -> Path:
        return self.folder / PARTIES_FOLDER / hashlib.sha256(party.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def ciphertext_digest(ciphertext: bytes) -> str:
    """The name of a sealed coreset, of its ciphertext: it says nothing of the rows, and may stay when they go."""
    return hashlib.sha256(ciphertext).hexdigest()


def _has_coreset(folder: Path) -> bool:
    return (folder / _CORESET).exists() or (folder / _PREVIOUS).exists()


def _coreset_fields(latest: dict[str, Any]) -> dict[str, Any]:
    return {name: latest[name] for name in ("digest", "generation", "previous_digest") if name in latest}


def _destroy_entry(folder: Path) -> None:
    """No such drawer any more; what a vault puts there is overwritten first, and anything else named."""
    foreign = []
    for file in sorted(folder.iterdir()) if folder.is_dir() and not folder.is_symlink() else [folder]:
        if file.name in _FILES and file.is_file() and not file.is_symlink():
            atomic.overwrite_with_zeros(file)
            atomic.remove(file)
        elif file != folder or os.path.lexists(folder):
            foreign.append(file)
    if foreign:
        raise StateError(f"{foreign[0]} is nothing that a vault puts there. Look what it is, and take it away.")
    atomic.remove(folder)
    atomic.sync_folder(folder.parent)
