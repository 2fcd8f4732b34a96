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

from ...core.settings import unknown
from ...errors import StateError, VaultError
from .. import atomic
from ..atomic_folder import clear_errors
from ..audit_log import LOG, Audit
from ..lock import Lock
from .private_keys import PrivateKey, key_in

PARTIES, LOCK = "parties", ".lock"
PATIENCE = 10.0  # seconds to wait for another process, which needs the folder for moments only
_FILES = _KEY, _CORESET, _OLD, _NEW = "key", "coreset", "coreset.old", "coreset.new"
_GONE = ("forgetting", "forgotten")  # events after which nothing is held of a party
_NO_KEY = "Nobody can open what the party has sealed: forget it, and invite it again."


class Drawers:
    """What a vault holds of its parties. All but :meth:`alone` is done within it."""

    def __init__(self, folder: Path, audit: Audit, who: str) -> None:
        self.folder, self.audit, self._who = folder, audit, who

    @contextmanager
    def alone(self, forgetting: str | None = None) -> Iterator[set[str]]:
        """While no other process is at the folder, and after what one that died has left was put in order.

        It gives the parties whose forgetting was finished by that. Whoever is to be forgotten is destroyed even where
        nothing else can be done: when the log is damaged, or when a copy of a forgotten drawer was put back.
        """
        with clear_errors(self.folder):
            lock = Lock(self.folder / LOCK, PATIENCE)
            try:
                self._catch_up(forgetting)
                yield self._mend(forgetting)
            finally:
                lock.release()

    def note(self, event: str, party: str, **fields: Any) -> None:
        """A line in the audit log, on the disk when this returns."""
        self.audit.add(event, party=party, who=self._who, **fields)

    def names(self) -> list[str]:
        """Who was invited and not forgotten."""
        return sorted(party for party, held in self.audit.latest.items() if held["event"] not in _GONE)

    def held(self, party: str) -> dict[str, Any] | None:
        """What the log says is held of a party: with a digest and a generation, if it has sealed something."""
        held = self.audit.latest.get(party)
        return None if held is None or held["event"] in _GONE else held

    def key(self, party: str) -> PrivateKey:
        """The party's own key in this vault."""
        return key_in(self._place(party) / _KEY, _NO_KEY)

    def add(self, party: str, key: PrivateKey, about: str) -> None:
        """A drawer with a key; until the log has it, it is nobody's. Generations go on from what was forgotten."""
        known = self.audit.latest.get(party, {}).get("generation")
        atomic.make(self._place(party), 0o700)
        key.write(self._place(party) / _KEY)
        self.note("invited", party, key=about, **({} if known is None else {"generation": known}))

    def put(self, party: str, sealed: bytes, generation: int) -> None:
        """A sealed coreset. The one before it is kept, for a run that is resumed from then; older ones are not."""
        place, held = self._place(party), self.audit.latest[party]
        atomic.write(place / _NEW, sealed, atomic.PRIVATE)
        atomic.settle(place)
        event, before = ("refreshed" if "digest" in held else "sealed"), {}
        if (place / _CORESET).exists() and digest((place / _CORESET).read_bytes()) == held.get("digest"):
            before = {"before": held["digest"]}  # one that was changed since is not kept
        self.note(event, party, digest=digest(sealed), generation=generation, **before)
        self._finish_putting(place, self.audit.latest[party])

    def digests(self, party: str) -> list[str]:
        """Of the coresets that are held of a party, the newest first."""
        return [self.audit.latest[party][name] for name in ("digest", "before") if name in self.audit.latest[party]]

    def get(self, party: str, wanted: str) -> bytes:
        """The sealed coreset of this digest, which is one of those that the log speaks of."""
        newest = wanted == self.audit.latest[party]["digest"]
        file = self._place(party) / (_CORESET if newest else _OLD)
        try:
            found = file.read_bytes()
        except OSError as error:
            raise VaultError(f"The coreset of party {party!r} cannot be read: {error.strerror}.") from None
        if digest(found) != wanted:
            number = self.audit.latest[party]["generation"]
            raise VaultError(
                f"The coreset of party {party!r} is not the one {'of' if newest else 'before'} generation {number} "
                f"that was stored: {file} was changed, or replaced by another one. Let the party seal a new one."
            )
        return found

    def forget(self, party: str) -> None:
        """No key, no coreset, and a line that says so."""
        held = self.audit.latest.get(party)
        if held is not None and held["event"] == "forgotten":
            raise VaultError(f"Party {party!r} was forgotten already, at {held['at']}. Nothing of it is held.")
        if held is None and not self.names():
            raise VaultError(f"Party {party!r} is not in the vault {self.folder}, and nobody else is.")
        if held is None:
            raise unknown("party in this vault", party, self.names())
        self._forget(party)

    def _forget(self, party: str) -> None:
        """From the first line on it is forgotten, by whom the line says, whatever happens and whatever is missing."""
        self.note("forgetting", party, **_about(self.audit.latest[party]))
        self._finish_forgetting(party)

    def _finish_forgetting(self, party: str) -> None:
        _clear(self._place(party))
        self.note("forgotten", party, **_about(self.audit.latest[party]))

    def _catch_up(self, forgetting: str | None) -> None:
        try:
            self.audit.catch_up()
        except StateError as error:
            if forgetting is None or not self._place(forgetting).exists():
                raise
            _clear(self._place(forgetting))
            raise StateError(
                f"The key and the coreset of party {forgetting!r} are destroyed, but the log cannot say so. {error} "
                "Then forget the party once more, so that the log has it."
            ) from error

    def _mend(self, forgetting: str | None) -> set[str]:
        finished = {party for party, held in self.audit.latest.items() if held["event"] == "forgetting"}
        for name in sorted(finished):
            self._finish_forgetting(name)
        if forgetting in self.audit.latest and self.held(forgetting) is None and _filled(self._place(forgetting)):
            self._forget(forgetting)
            finished.add(forgetting)
        known = {self._place(party).name: party for party in self.audit.latest}
        for place in sorted((self.folder / PARTIES).glob("?" * 32)):
            party = known.get(place.name)
            if party is not None and (held := self.held(party)):
                self._finish_putting(place, held)
            elif not _filled(place):
                _clear(place)  # an invitation that nobody got, or the last of a forgotten party
            else:
                raise self._put_back(place, None if party is None else self.audit.latest[party])
        return finished

    def _finish_putting(self, place: Path, held: dict[str, Any]) -> None:
        """A new coreset is in its place if the log has it; if not, it was never there."""
        if not (place / _NEW).exists():
            return
        if digest((place / _NEW).read_bytes()) != held.get("digest"):
            atomic.remove(place / _NEW)
            return
        if "before" not in held:
            atomic.remove(place / _OLD)
        elif (place / _CORESET).exists():
            atomic.rename(place / _CORESET, place / _OLD)
        atomic.rename(place / _NEW, place / _CORESET)

    def _put_back(self, place: Path, gone: dict[str, Any] | None) -> StateError:
        """What is wrong with a coreset that should not be there."""
        if gone is None:
            return StateError(
                f"{place} holds a coreset that {self.folder / LOG} knows nothing of: one of them was put back "
                "to an older copy. Restore both from the same one."
            )
        return StateError(
            f"{place} holds a coreset of party {gone['party']!r}, which was forgotten at {gone['at']}: somebody has "
            "put it back from a copy. Forget the party once more, and this copy is destroyed, too."
        )

    def _place(self, party: str) -> Path:
        return self.folder / PARTIES / hashlib.sha256(party.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def digest(sealed: bytes) -> str:
    """The name of a sealed coreset, of its ciphertext: it says nothing of the rows, and may stay when they go."""
    return hashlib.sha256(sealed).hexdigest()


def _filled(place: Path) -> bool:
    return (place / _CORESET).exists() or (place / _OLD).exists()


def _about(held: dict[str, Any]) -> dict[str, Any]:
    return {name: held[name] for name in ("digest", "generation", "before") if name in held}


def _clear(place: Path) -> None:
    """No such drawer any more; what a vault puts there is overwritten first, and anything else named."""
    strange = []
    for file in sorted(place.iterdir()) if place.is_dir() and not place.is_symlink() else [place]:
        if file.name in _FILES and file.is_file() and not file.is_symlink():
            atomic.blank(file)
            atomic.remove(file)
        elif file != place or os.path.lexists(place):
            strange.append(file)
    if strange:
        raise StateError(f"{strange[0]} is nothing that a vault puts there. Look what it is, and take it away.")
    atomic.remove(place)
    atomic.settle(place.parent)
