"""The vault: encrypted coresets of parties, to train on in their place while they are away. One folder per run.

    vault/vault.json             the run and the vault's public key
    vault/audit.jsonl            every access, in a tamper-evident log (audit.head belongs to it)
    vault/parties/*/key          the party's own key in this vault, destroyed by `forget`: keep it out of backups
    vault/parties/*/coreset      the party's newest coreset
    vault/parties/*/coreset.old  the one before it, for a run that is resumed from before the newest one

The vault's private key lies elsewhere. Only opening a coreset needs it. With the folder but without the key one can
invite, store, list, verify and forget, and read no row.

    vault = Vault.create("vault", PrivateKey.new())                    # once, by the key's owner
    invitation = vault.invite("north")                                 # at the server: public keys, and a number
    encrypted = encrypt_coreset(invitation, pack_rows(rows), vault.run, "north")    # at the party, within its limit
    vault.store("north", encrypted)                                    # at the server, unopened
    rows = Vault("vault", read_key()).open("north", round, expected)   # at the worker that trains the proxy
    vault.forget("north")

Threat model:

- A *stolen disk or backup* of the folder, of the server or of an engine's database reveals names, sizes, times and
  generations. It reveals no row; not even with the vault's key, for a party that was forgotten before `parties/*/key`
  was copied.
- An *operator without the key*, who may write to the folder, sees the same, and can destroy. Coresets that are swapped,
  edited or restored from a copy are detected when they are opened, and `verify` detects a changed log (see
  :mod:`descant.storage.audit_log`). The operator could hand out another key in place of the vault's, with a matching
  log. So parties get the fingerprint through another channel, and `encrypt_coreset` takes it; in a federation,
  `VaultLocation(..., fingerprint=...)`.
- The *network, or anybody who replays it*, can read and change nothing, nor reuse a message for another run, party or
  time; it can withhold messages. A sender that passes as a party can replace its coreset: the transport must
  authenticate senders.
- A *malicious party*: coresets that are too large, of another shape, not finite or with unknown labels are rejected
  before training. False rows of the right form are not detected here: use robust aggregators.
- The *worker that trains the proxy* sees the rows, and is trusted with them. Its memory, swap and core dumps are not
  protected, nor is its environment if the key comes from there. A trusted server that lies is not defended against.
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
    """The state of a party in the vault, also after it was forgotten."""

    party: str
    state: str  # the last event: "invited", "sealed", "refreshed" or "forgotten"
    since: str
    generation: int | None
    digest: str  # of the encrypted bytes
    opened: int  # number of times


@dataclass(frozen=True)
class VaultVerification:
    """The result of a verification; note the last line and its chain hash elsewhere, for a later `verify`."""

    lines: int
    chain_hash: str
    parties: int
    coresets: int
    with_key: bool


class Vault:
    """A vault's folder, and optionally its private key, which is needed only to open coresets."""

    def __init__(self, folder: str | Path, key: PrivateKey | None = None, user: str = "") -> None:
        self.folder = Path(folder)
        self._key = key
        self.run, self.public = vault_manifest.read_manifest(self.folder)
        if key is not None and key.public != self.public:
            raise VaultError(
                f"This is the key of the vault {key_fingerprint(key.public)}, and {self.folder} was created with "
                f"the key of {key_fingerprint(self.public)}. Give that one."
            )
        self._audit_log = AuditLog(self.folder, None if key is None else _first_secret(key, self.run))
        self._entries = VaultEntries(self.folder, self._audit_log, user or current_user())

    @classmethod
    def create(cls, folder: str | Path, key: PrivateKey, run: str = "", user: str = "") -> Vault:
        """Create a vault in a new or empty folder; a run without a name gets a unique one."""
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
        """Return the keys for a party's next coreset: always the same ones until the party is forgotten."""
        with self._entries.exclusive_access():
            if self._entries.entry(party) is None:
                key = PrivateKey.new()
                self._entries.add(party, key, key_fingerprint(key.public))
            generation = self._audit_log.latest_events[party].get("generation", 0) + 1
            return Invitation(self.public + self._entries.key(party).public, generation)

    def store(self, party: str, ciphertext: bytes, expected: ExpectedCoreset | None = None) -> None:
        """Store a party's encrypted coreset in place of its earlier one; the same bytes may come again.

        The party is the sender as the transport knows it. Without the vault's key only the header is checked. With the
        key the coreset is opened, too, and its rows are checked if `expected` is given.
        """
        with self._entries.exclusive_access():
            with self._log_rejections(party, ciphertext_digest(ciphertext)):
                generation = self._validate(party, ciphertext, expected)
            if self._audit_log.latest_events[party].get("digest") != ciphertext_digest(ciphertext):
                self._entries.store(party, ciphertext, generation)

    def open(
        self, party: str, round: int, expected: ExpectedCoreset, generation: int = 0, digest: str = ""
    ) -> CoresetRows:
        """Open a party's coreset, in memory only, for a round; the log records it before the rows are returned.

        A run names its coreset by generation and digest of the encrypted bytes: the newest one, or the one before it
        if the run was resumed from a time when that was the newest. Any other is rejected.
        """
        with self._entries.exclusive_access():
            entry = self._entries.entry(party)
            if entry is None or "digest" not in entry:
                raise VaultError(
                    f"The vault holds no coreset of party {party!r:.80}: it has stored none, or was forgotten. "
                    "It can have no proxy."
                )
            expected_digest = digest or entry["digest"]
            with self._log_rejections(party, expected_digest):
                if expected_digest not in (entry["digest"], entry.get("previous_digest")):
                    raise VaultError(_unknown_coreset_message(party, entry["generation"], generation))
                rows = self._decode_rows(party, self._entries.load(party, expected_digest), expected)
            self._entries.log_event("opened", party, round=round, digest=expected_digest)
            return rows

    def forget(self, party: str) -> None:
        """Destroy a party's key and coreset, so that no copy of its coreset can be opened, and log it.

        Out of reach are a backup with the party's key, as long as someone has the vault's key; overwritten blocks that
        a flash drive or a copy-on-write file system keeps; rows in the memory of a worker that trains on them now; and
        what models have learned from them.

        This is no ban: a run asks the party for a new coreset when it returns after an absence. A party that wants to
        leave none sets `CoresetLimit(share=0)`.

        If the log is damaged the files are destroyed all the same, and the error says so.
        """
        with self._entries.exclusive_access(party_to_forget=party) as finished:
            if party not in finished:
                self._entries.forget(party)

    def parties(self) -> list[VaultEntryStatus]:
        """Return the state of every party that was ever invited, by name."""
        with self._entries.exclusive_access():
            return [
                VaultEntryStatus(
                    party,
                    latest["event"],
                    latest["at"],
                    generation=latest["generation"] if "digest" in latest else None,
                    digest=latest.get("digest", ""),
                    opened=self._audit_log.open_counts.get(party, 0),
                )
                for party, latest in sorted(self._audit_log.latest_events.items())
            ]

    def verify(self, line: int = 0, chain_hash: str = "") -> VaultVerification:
        """Check the log from its first line, and that the vault holds exactly what it says; then log that.

        With the vault's key each coreset is opened, too. A line and its chain hash that were noted elsewhere show
        whether the folder was restored from an older copy.
        """
        with self._entries.exclusive_access():
            self._audit_log.verify_all(line, chain_hash)
            names = self._entries.names()
            with_coreset = [name for name in names if "digest" in self._audit_log.latest_events[name]]
            for name in names:
                party_public = self._entries.key(name).public
                for coreset_digest in self._entries.digests(name):
                    ciphertext = self._entries.load(name, coreset_digest)
                    header = read_coreset_header(ciphertext)
                    check_recipient(header, self.run, name, vault=self.public, party_key=party_public)
                    if self._key is not None:
                        self._decrypt(name, ciphertext)
            self._entries.log_event("verified", "", with_key=self._key is not None)
            return VaultVerification(
                self._audit_log.last_line.number,
                self._audit_log.last_line.chain_hash,
                len(names),
                coresets=len(with_coreset),
                with_key=self._key is not None,
            )

    def _validate(self, party: str, ciphertext: bytes, expected: ExpectedCoreset | None) -> int:
        """Return the generation of a coreset that may be stored; raise if it may not."""
        entry = self._entries.entry(party)
        if entry is None:
            raise VaultError(f"Party {party!r:.80} was not invited, or was forgotten later. Invite it: Vault.invite.")
        header = read_coreset_header(ciphertext)
        check_recipient(header, self.run, party, vault=self.public, party_key=self._entries.key(party).public)
        newest = entry.get("generation", 0)
        if header.generation <= newest and ciphertext_digest(ciphertext) != entry.get("digest"):
            raise VaultError(
                f"The coreset of party {party!r} is of generation {header.generation}, and one of generation {newest} "
                "was stored: an older one is not accepted. Let the party encrypt with a new invitation."
            )
        if expected is not None:
            expected.check_size(header.size, party)
        if self._key is not None and expected is not None:
            self._decode_rows(party, ciphertext, expected)
        elif self._key is not None:
            self._decrypt(party, ciphertext)
        return header.generation

    def _decode_rows(self, party: str, ciphertext: bytes, expected: ExpectedCoreset) -> CoresetRows:
        from .coreset_rows import unpack_rows  # imported here, so that listing and forgetting need not load torch

        return unpack_rows(self._decrypt(party, ciphertext), expected, party)

    def _decrypt(self, party: str, ciphertext: bytes) -> bytes:
        if self._key is None:
            raise VaultError(f"{self.folder} is used without its private key here. Opening a coreset needs the key.")
        return decrypt_coreset(ciphertext, self._key, self._entries.key(party), run=self.run, party=party)

    @contextmanager
    def _log_rejections(self, party: str, digest: str) -> Iterator[None]:
        """Log a coreset that is rejected inside the block."""
        try:
            yield
        except VaultError as error:
            self._entries.log_event("rejected", f"{party:.80}", digest=digest, reason=f"{error!s:.300}")
            raise


def _unknown_coreset_message(party: str, newest: int, expected_generation: int) -> str:
    """Return why the vault does not hold the coreset that a run expects."""
    reason = "the vault was restored from an older copy"
    if newest >= expected_generation:
        reason = "the party has stored others since, in rounds that this run has not reached yet, or for another run"
    return (
        f"The newest coreset of party {party!r} in the vault is number {newest}, and not number {expected_generation} "
        f"of this run: {reason}. It is rejected until the party returns and stores a new one."
    )


def check_new_vault(folder: Path) -> None:
    """Raise StateError unless a vault can be created there."""
    if (folder / MANIFEST).exists():
        raise StateError(f"{folder} already holds a vault. Use it, or give another folder.")
    check_replaceable(folder, _VAULT_FILES, in_place=True)


def _first_secret(key: PrivateKey, run: str) -> bytes:
    return key.derive(b"descant audit 1\n" + run.encode("utf-8", "surrogatepass"))
