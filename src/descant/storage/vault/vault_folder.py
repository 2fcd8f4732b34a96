"""The vault: sealed coresets of parties, to stand in for them while they are away. One folder a run.

    vault/vault.json             the run and the vault's public key
    vault/audit.jsonl            every access, in lines that cannot be changed unseen (audit.head belongs to it)
    vault/parties/*/key          the party's own key in this vault, destroyed by `forget`: keep it out of backups
    vault/parties/*/coreset      the newest coreset that the party has sealed
    vault/parties/*/coreset.old  the one before it: a run that is resumed from before the newest one needs it

The vault's private key is none of them. It is needed to open a coreset, and for nothing else: whoever has the folder
but not the key can invite, store, list, verify and forget, and reads no row.

    vault = Vault.create("vault", PrivateKey.new())                    # once, by whoever holds the key
    invitation = vault.invite("north")                                 # at the server: public keys, and a number
    sealed = seal(invitation, pack(rows), vault.run, "north")          # at the party, after check_agreed
    vault.store("north", sealed)                                       # at the server, unopened
    rows = Vault("vault", read_key()).open("north", round, expected)   # at the worker that stands in
    vault.forget("north")

Who can do what:

- A *stolen disk or backup* of the folder, of the server or of an engine's database: names, sizes, times, generations.
  No row; not even with the vault's key, for a party that was forgotten before `parties/*/key` was copied.
- An *operator without the key*, who may write to the folder: the same, and to destroy. Coresets that he swaps, edits or
  puts back are named when they are opened, and `verify` finds a changed log (see :mod:`.audit`). He could hand out a
  key of his own in place of the vault's, with a log that goes with it: so parties are told its fingerprint by another
  way, and `seal` takes it; in a federation, `VaultAt(..., fingerprint=...)`.
- The *network, or whoever replays it*: nothing can be read, changed, or passed off for another run, party or time; it
  can withhold. Who can speak as a party can replace its coreset: to prove who speaks is the transport's work.
- A *malicious party*: bytes that are too many, of another shape, not finite or with unknown labels are refused before
  anything is trained on them. False rows of the right form are not seen here: robust centres are for that.
- The *worker that stands in* sees the rows; that is what it is trusted for. Its memory, swap and core dumps are not
  protected, nor is its environment if the key comes from there; a trusted centre that lies is not defended against.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ... import __version__
from ...errors import StateError, VaultError
from .. import atomic
from ..atomic_folder import check_replaceable, write_errors
from ..audit_log import AUDIT_HEAD, AUDIT_LOG, AuditLog, current_user
from ..lock import FolderLock
from . import vault_manifest
from .encryption import Invitation, check_recipient, decrypt_coreset, read_coreset_header
from .party_entries import LOCK_FILE, LOCK_TIMEOUT, PARTIES_FOLDER, VaultEntries, ciphertext_digest
from .private_keys import PrivateKey, key_fingerprint
from .vault_manifest import MANIFEST

if TYPE_CHECKING:
    from .coreset_rows import CoresetRows, ExpectedCoreset

_VAULT_FILES = (
    MANIFEST,
    f"{MANIFEST}.new",
    AUDIT_LOG,
    f"{AUDIT_LOG}.new",
    AUDIT_HEAD,
    f"{AUDIT_HEAD}.new",
    PARTIES_FOLDER,
    LOCK_FILE,
)


@dataclass(frozen=True)
class VaultEntryStatus:
    """What the vault holds of a party, or that it has forgotten it."""

    party: str
    state: str  # the last event: "invited", "sealed", "refreshed" or "forgotten"
    since: str
    generation: int | None
    digest: str  # of the sealed bytes
    opened: int  # how often


@dataclass(frozen=True)
class VaultVerification:
    """What was found to be in order. The last line's number and seal, noted elsewhere, are for `verify` later."""

    lines: int
    chain_hash: str
    parties: int
    coresets: int
    with_key: bool


class Vault:
    """A vault's folder, with its private key or, for all but opening, without it."""

    def __init__(self, folder: str | Path, key: PrivateKey | None = None, user: str = "") -> None:
        self.folder = Path(folder)
        self._key = key
        self.run, self.public = vault_manifest.read_manifest(self.folder)
        if key is not None and key.public != self.public:
            raise VaultError(
                f"This is the key of the vault {key_fingerprint(key.public)}, and {self.folder} was made with the key of "
                f"{key_fingerprint(self.public)}. Give that one."
            )
        self._audit_log = AuditLog(self.folder, None if key is None else _first_secret(key, self.run))
        self._entries = VaultEntries(self.folder, self._audit_log, user or current_user())

    @classmethod
    def create(cls, folder: str | Path, key: PrivateKey, run: str = "", user: str = "") -> Vault:
        """A new vault in a new or empty folder; a run that has no name gets one that nobody else has."""
        target = Path(folder)
        run = run or secrets.token_hex(16)
        check_new_vault(target)
        with write_errors(target):
            atomic.make_folder(target, 0o700)
            lock = FolderLock(target / LOCK_FILE, LOCK_TIMEOUT)
            try:
                atomic.make_folder(target / PARTIES_FOLDER, 0o700)
                audit = AuditLog(target, _first_secret(key, run))
                audit.start("created", run=run, vault=key_fingerprint(key.public), who=user or current_user())
                manifest = {"descant": __version__, "vault": 1, "run": run, "public": key.public.hex()}
                atomic.replace(target / MANIFEST, json.dumps(manifest).encode(), f"{MANIFEST}.new")
            finally:
                lock.release()
        return cls(target, key, user)

    def __repr__(self) -> str:
        return f"Vault({str(self.folder)!r}, run {self.run!r}, {'with' if self._key else 'without'} its key)"

    def invite(self, party: str) -> Invitation:
        """What this party seals its next coreset with: always the same keys, until it is forgotten."""
        with self._entries.exclusive_access():
            if self._entries.entry(party) is None:
                key = PrivateKey.new()
                self._entries.add(party, key, key_fingerprint(key.public))
            generation = self._audit_log.latest_events[party].get("generation", 0) + 1
            return Invitation(self.public + self._entries.key(party).public, generation)

    def store(self, party: str, ciphertext: bytes, expected: ExpectedCoreset | None = None) -> None:
        """Keep what this party has sealed, in place of what it sealed before; the same bytes may come again.

        The party is the sender, as the one who carried the bytes knows it. Without the vault's key only the header can
        be checked; with it the coreset is opened, too, and its rows are looked at if it is said what is expected.
        """
        with self._entries.exclusive_access():
            with self._log_rejections(party, ciphertext_digest(ciphertext)):
                generation = self._validate(party, ciphertext, expected)
            if self._audit_log.latest_events[party].get("digest") != ciphertext_digest(ciphertext):
                self._entries.store(party, ciphertext, generation)

    def open(
        self, party: str, round: int, expected: ExpectedCoreset, generation: int = 0, digest: str = ""
    ) -> CoresetRows:
        """A party's rows, in memory only, to train on for a round; the log has it before they are handed out.

        A run says which coreset it knows of, by its generation and the digest of the sealed bytes: the newest one, or
        the one before it, if the run was resumed from a time when that was the newest. Any other is refused.
        """
        with self._entries.exclusive_access():
            entry = self._entries.entry(party)
            if entry is None or "digest" not in entry:
                raise VaultError(
                    f"The vault holds no coreset of party {party!r:.80}: it has sealed none, or was forgotten. "
                    "It cannot be stood in for."
                )
            expected_digest = digest or entry["digest"]
            with self._log_rejections(party, expected_digest):
                if expected_digest not in (entry["digest"], entry.get("previous_digest")):
                    raise VaultError(_unknown_coreset_message(party, entry["generation"], generation))
                rows = self._decode_rows(party, self._entries.load(party, expected_digest), expected)
            self._entries.log_event("opened", party, round=round, digest=expected_digest)
            return rows

    def forget(self, party: str) -> None:
        """Destroy a party's key and coreset, so that no copy of what it has sealed can be opened, and log it.

        Out of reach are a backup that holds the party's key, as long as somebody has the vault's key; what a flash
        drive or a file system that copies on writing keeps of overwritten blocks; rows in the memory of a worker that
        trains on them now; and what models have learnt from them.

        It is no ban: a run that the party takes part in asks it for a new coreset when it returns after an absence. A
        party that wants to leave none agrees to none, `Agreed(share=0)`.

        Where the log is damaged the files are destroyed all the same, and the error says so.
        """
        with self._entries.exclusive_access(party_to_forget=party) as finished:
            if party not in finished:
                self._entries.forget(party)

    def parties(self) -> list[VaultEntryStatus]:
        """Everybody whom the vault knows or has forgotten, by name."""
        with self._entries.exclusive_access():
            opened = self._audit_log.open_counts
            return [
                VaultEntryStatus(
                    p,
                    e["event"],
                    e["at"],
                    generation=e["generation"] if "digest" in e else None,
                    digest=e.get("digest", ""),
                    opened=n,
                )
                for p, e, n in ((p, e, opened.get(p, 0)) for p, e in sorted(self._audit_log.latest_events.items()))
            ]

    def verify(self, line: int = 0, chain_hash: str = "") -> VaultVerification:
        """Check the log from its first line on, and that the vault holds exactly what it says; then log that.

        With the vault's key each coreset is opened, too. A line and its seal that were noted elsewhere show whether the
        folder was put back to an older copy.
        """
        with self._entries.exclusive_access():
            self._audit_log.verify_all(line, chain_hash)
            names = self._entries.names()
            sealed = [name for name in names if "digest" in self._audit_log.latest_events[name]]
            for name in names:
                party_public = self._entries.key(name).public
                for coreset_digest in self._entries.digests(name):
                    found = self._entries.load(name, coreset_digest)
                    check_recipient(
                        read_coreset_header(found), self.run, name, vault=self.public, party_key=party_public
                    )
                    if self._key is not None:
                        self._decrypt(name, found)
            self._entries.log_event("verified", "", with_key=self._key is not None)
            return VaultVerification(
                self._audit_log.last_line.number,
                self._audit_log.last_line.chain_hash,
                len(names),
                coresets=len(sealed),
                with_key=self._key is not None,
            )

    def _validate(self, party: str, ciphertext: bytes, expected: ExpectedCoreset | None) -> int:
        """The generation of a coreset that may be kept."""
        entry = self._entries.entry(party)
        if entry is None:
            raise VaultError(f"Party {party!r:.80} was not invited, or was forgotten since. Invite it: Vault.invite.")
        header = read_coreset_header(ciphertext)
        check_recipient(header, self.run, party, vault=self.public, party_key=self._entries.key(party).public)
        newest = entry.get("generation", 0)
        if header.generation <= newest and ciphertext_digest(ciphertext) != entry.get("digest"):
            raise VaultError(
                f"The coreset of party {party!r} is of generation {header.generation}, and one of generation {newest} "
                "was held: an older one is not taken back. Let the party seal by a new invitation."
            )
        if expected is not None:
            expected.check_size(header.size, party)
        if self._key is not None and expected is not None:
            self._decode_rows(party, ciphertext, expected)
        elif self._key is not None:
            self._decrypt(party, ciphertext)
        return header.generation

    def _decode_rows(self, party: str, ciphertext: bytes, expected: ExpectedCoreset) -> CoresetRows:
        from .coreset_rows import unpack_rows  # here, because who lists or forgets must not wait for torch

        return unpack_rows(self._decrypt(party, ciphertext), expected, party)

    def _decrypt(self, party: str, ciphertext: bytes) -> bytes:
        if self._key is None:
            raise VaultError(f"{self.folder} is used without its private key here, and to open a coreset needs it.")
        return decrypt_coreset(ciphertext, self._key, self._entries.key(party), run=self.run, party=party)

    @contextmanager
    def _log_rejections(self, party: str, what: str) -> Iterator[None]:
        """What is refused is in the log."""
        try:
            yield
        except VaultError as error:
            self._entries.log_event("rejected", f"{party:.80}", digest=what, reason=f"{error!s:.300}")
            raise


def _unknown_coreset_message(party: str, newest: int, expected_generation: int) -> str:
    """Why the vault does not hold what a run knows of."""
    why = "the vault was put back to an older copy"
    if newest >= expected_generation:
        why = "the party has sealed others since, in rounds that this run has not come to yet, or for another run"
    description = f"The newest coreset of party {party!r} in the vault is number {newest}, and not number {expected_generation} of this run"
    return f"{description}: {why}. It is refused until the party has come back and sealed a new one."


def check_new_vault(folder: Path) -> None:
    """Raise StateError unless a vault can be made there."""
    if (folder / MANIFEST).exists():
        raise StateError(f"{folder} holds a vault already. Use it, or give another folder.")
    check_replaceable(folder, _VAULT_FILES, in_place=True)


def _first_secret(key: PrivateKey, run: str) -> bytes:
    return key.derive(b"descant audit 1\n" + run.encode("utf-8", "surrogatepass"))
