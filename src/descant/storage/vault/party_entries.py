"""The entries of a vault, one per party: a key and an encrypted coreset, changed only together with the audit log.

A change counts once its line is in the log. Anything beyond that in an entry was started by a killed process; it is
finished or undone before anything else happens (:meth:`VaultEntries.exclusive_access`). So a kill at any moment leaves
either the state before or the state after.
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
LOCK_TIMEOUT = 10.0  # seconds to wait for another process, which uses the folder only briefly
_FILES = _KEY, _CORESET, _PREVIOUS, _NEW = "key", "coreset", "coreset.old", "coreset.new"
_FORGOTTEN_EVENTS = ("forgetting", "forgotten")  # events after which nothing is held of a party
_NO_KEY_ADVICE = "No one can open what the party has encrypted: forget the party, and invite it again."


class VaultEntries:
    """The entries of all parties. Call every other method inside :meth:`exclusive_access`."""

    def __init__(self, folder: Path, audit: AuditLog, user: str) -> None:
        self.folder = folder
        self.audit = audit
        self._user = user

    @contextmanager
    def exclusive_access(self, party_to_forget: str | None = None) -> Iterator[set[str]]:
        """Lock the folder against other processes, and first repair what a killed one left.

        It yields the parties whose forgetting this repair finished. The entry of `party_to_forget` is destroyed even
        where nothing else can be done: when the log is damaged, or when a forgotten entry was restored from a copy.
        """
        with write_errors(self.folder):
            lock = FolderLock(self.folder / LOCK_FILE, LOCK_TIMEOUT)
            try:
                self._catch_up(party_to_forget)
                yield self._repair(party_to_forget)
            finally:
                lock.release()

    def log_event(self, event: str, party: str, **fields: Any) -> None:
        """Add a line to the audit log; it is on disk when this returns."""
        self.audit.add(event, party=party, who=self._user, **fields)

    def names(self) -> list[str]:
        """Return the parties that were invited and not forgotten."""
        return sorted(
            party for party, latest in self.audit.latest_events.items() if latest["event"] not in _FORGOTTEN_EVENTS
        )

    def entry(self, party: str) -> dict[str, Any] | None:
        """Return the logged state of a party, with a digest and a generation if it has stored a coreset."""
        latest = self.audit.latest_events.get(party)
        return None if latest is None or latest["event"] in _FORGOTTEN_EVENTS else latest

    def key(self, party: str) -> PrivateKey:
        """Return the party's own key in this vault."""
        return load_key(self._party_folder(party) / _KEY, _NO_KEY_ADVICE)

    def add(self, party: str, key: PrivateKey, key_fingerprint: str) -> None:
        """Create a party's entry with its key; generations continue after a forgotten entry."""
        known = self.audit.latest_events.get(party, {}).get("generation")
        atomic.make_folder(self._party_folder(party), 0o700)
        key.write(self._party_folder(party) / _KEY)
        self.log_event("invited", party, key=key_fingerprint, **({} if known is None else {"generation": known}))

    def store(self, party: str, ciphertext: bytes, generation: int) -> None:
        """Store an encrypted coreset and keep the one before it, for a run resumed from then; drop older ones."""
        folder = self._party_folder(party)
        latest = self.audit.latest_events[party]
        atomic.write(folder / _NEW, ciphertext, atomic.PRIVATE_MODE)
        atomic.sync_folder(folder)
        event = "refreshed" if "digest" in latest else "sealed"
        previous = {}
        if (folder / _CORESET).exists() and ciphertext_digest((folder / _CORESET).read_bytes()) == latest.get("digest"):
            previous = {"previous_digest": latest["digest"]}  # a file that was changed since is not kept
        self.log_event(event, party, digest=ciphertext_digest(ciphertext), generation=generation, **previous)
        self._finish_store(folder, self.audit.latest_events[party])

    def digests(self, party: str) -> list[str]:
        """Return the digests of the coresets held of a party, the newest first."""
        return [
            self.audit.latest_events[party][name]
            for name in ("digest", "previous_digest")
            if name in self.audit.latest_events[party]
        ]

    def load(self, party: str, expected_digest: str) -> bytes:
        """Read the encrypted coreset with this digest, which must be one of the logged ones."""
        newest = expected_digest == self.audit.latest_events[party]["digest"]
        file = self._party_folder(party) / (_CORESET if newest else _PREVIOUS)
        try:
            ciphertext = file.read_bytes()
        except OSError as error:
            raise VaultError(f"The coreset of party {party!r} cannot be read: {error.strerror}.") from None
        if ciphertext_digest(ciphertext) != expected_digest:
            number = self.audit.latest_events[party]["generation"]
            raise VaultError(
                f"The coreset of party {party!r} is not the one {'of' if newest else 'before'} generation {number} "
                f"that was stored: {file} was changed, or replaced by another one. Let the party encrypt a new one."
            )
        return ciphertext

    def forget(self, party: str) -> None:
        """Destroy the party's key and coreset, and log it."""
        latest = self.audit.latest_events.get(party)
        if latest is not None and latest["event"] == "forgotten":
            raise VaultError(
                f"Party {party!r} was already forgotten, at {latest['at']}. The vault holds nothing of it."
            )
        if latest is None and not self.names():
            raise VaultError(f"Party {party!r} is not in the vault {self.folder}, which is empty.")
        if latest is None:
            raise unknown_name_error("party in this vault", party, self.names())
        self._forget(party)

    def _forget(self, party: str) -> None:
        """Forget a party: once the first line is logged this will finish, whatever happens and whatever is missing."""
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
                f"The key and the coreset of party {party_to_forget!r} are destroyed, but the log could not record it. "
                f"{error} Then forget the party again, so that the log has it."
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
                _destroy_entry(folder)  # an invitation that was never sent, or the rest of a forgotten party
            else:
                raise self._unexpected_coreset_error(folder, None if party is None else self.audit.latest_events[party])
        return finished

    def _finish_store(self, folder: Path, latest: dict[str, Any]) -> None:
        """Move a new coreset into place if the log has it; otherwise remove it."""
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
        """Return the error for a coreset that should not exist."""
        if forgotten_event is None:
            return StateError(
                f"{folder} holds a coreset that {self.folder / AUDIT_LOG} does not mention: one of them was restored "
                "from an older copy. Restore both from the same copy."
            )
        return StateError(
            f"{folder} holds a coreset of party {forgotten_event['party']!r}, which was forgotten at "
            f"{forgotten_event['at']}: it was restored from a copy. Forget the party again to destroy this copy."
        )

    def _party_folder(self, party: str) -> Path:
        return self.folder / PARTIES_FOLDER / hashlib.sha256(party.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def ciphertext_digest(ciphertext: bytes) -> str:
    """Return the digest that names an encrypted coreset; it reveals nothing of the rows and may outlive them."""
    return hashlib.sha256(ciphertext).hexdigest()


def _has_coreset(folder: Path) -> bool:
    return (folder / _CORESET).exists() or (folder / _PREVIOUS).exists()


def _coreset_fields(latest: dict[str, Any]) -> dict[str, Any]:
    return {name: latest[name] for name in ("digest", "generation", "previous_digest") if name in latest}


def _destroy_entry(folder: Path) -> None:
    """Overwrite and remove an entry's files; anything that is not the vault's is an error that names it."""
    foreign = []
    for file in sorted(folder.iterdir()) if folder.is_dir() and not folder.is_symlink() else [folder]:
        if file.name in _FILES and file.is_file() and not file.is_symlink():
            atomic.overwrite_with_zeros(file)
            atomic.remove(file)
        elif file != folder or os.path.lexists(folder):
            foreign.append(file)
    if foreign:
        raise StateError(f"{foreign[0]} is not a file of the vault. Check what it is, and move it away.")
    atomic.remove(folder)
    atomic.sync_folder(folder.parent)
