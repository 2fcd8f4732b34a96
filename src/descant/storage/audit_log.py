"""The audit log of a vault, or of a roster: who did what with what, in lines that cannot be changed unseen.

The lines are those of :mod:`.log`: numbered, each with a digest of itself and of all before it. On top of that chain,
which anybody could write anew from an edited line on, goes a secret that runs along with the log:

    secret(0) = derived from the owner's private key         secret(n) = HMAC-SHA256(secret(n - 1), seal of line n)

Only the newest one is kept, in the head beside the log, with the number and the seal of the last line; so lines can be
added without the owner's key. None of the earlier secrets follows from it: who comes to the folder later cannot write
a line that looks as if it had been there before. Each line carries a mark, a digest of the secret before it, by which
the place of a change is found.

What :meth:`Audit.catch_up` finds:

- without that key: any line that was edited, removed, inserted or moved, and lines that are missing at the end,
  as long as the head beside the log was not written anew with it;
- with the key: that, too;
- not: a whole folder that was put back to an older copy (compare the last line with a note of it that is kept
  elsewhere), nor false lines that are added at the end by somebody who may write to the folder.

A last line that a kill has torn is told from a damaged one by the head: a line counts once the head has it, and only
what lies behind such lines is ever cut off, which the log then says.
"""

from __future__ import annotations

import getpass
import hashlib
import hmac
import json
import os
import socket
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import StateError
from . import atomic, event_log
from .event_log import LOG_START, EventLog, LogContent, LogLine

AUDIT_LOG = "audit.jsonl"
AUDIT_HEAD = "audit.head"
CUSTODY_EVENTS = (
    "invited",
    "sealed",
    "refreshed",
    "forgetting",
    "forgotten",
)  # what is held of a party
_ADVICE = "Somebody or something changed it after it was written: find out who, and compare with a copy. "
_VAULT_CONSEQUENCE = "The vault is not used until it is restored; the run and its models are not concerned."
_PARSE_ERRORS = (ValueError, TypeError, KeyError, RecursionError)


@dataclass(frozen=True)
class _Head:
    n: int
    chain_hash: str
    secret: str

    def advance(self, chain_hash: str) -> _Head:
        """The head when one more line, with this seal, is there."""
        return _Head(
            self.n + 1, chain_hash, hmac.digest(bytes.fromhex(self.secret), chain_hash.encode(), "sha256").hex()
        )

    @property
    def mark(self) -> str:
        """What the next line says of all before it."""
        return hashlib.sha256(b"descant mark" + bytes.fromhex(self.secret)).hexdigest()[:32]


class AuditLog:
    """A log that is read as far as it goes, and then written to; its user holds a lock on the folder meanwhile.

    `secret` is the first one, which only the owner's key gives: without it the chain is checked, but not the marks.
    `changes` are the events that change what is held of a party, `meanwhile` says what a damaged log is in the way of.
    """

    def __init__(
        self,
        folder: Path,
        secret: bytes | None,
        custody_events: Collection[str] = CUSTODY_EVENTS,
        consequence: str = _VAULT_CONSEQUENCE,
    ) -> None:
        self._file = folder / AUDIT_LOG
        self._head_file = folder / AUDIT_HEAD
        self._custody_events = custody_events
        self._advice = _ADVICE + consequence
        self._initial_head = None if secret is None else _Head(0, "", secret.hex())
        self.rewind()

    def rewind(self) -> None:
        """Forget what was read, so that :meth:`catch_up` begins with the first line again."""
        self.last_line: LogLine = LOG_START
        self._verified_head = (
            self._initial_head
        )  # the head as it must have been after the last line that was read, if that is known
        self.latest_events: dict[str, dict[str, Any]] = {}  # by party, the last event that changed what is held of it
        self.open_counts: dict[str, int] = {}  # by party, how often its coreset was opened

    def start(self, event: str, **fields: Any) -> None:
        """The first line of a new log; it needs the first secret."""
        if self._initial_head is None:
            raise StateError(f"{self._file} cannot be begun without its owner's key.")
        self._verified_head = self._initial_head
        self.add(event, **fields)

    def add(self, event: str, **fields: Any) -> None:
        """One more line, on the disk when this returns; the head follows it."""
        if self._verified_head is None:
            raise StateError(f"{self._file} must be read before it is written to.")
        lines = EventLog(self._file, self.last_line)
        lines.add(event, **fields, mark=self._verified_head.mark)
        lines.flush()
        self._write_head(self._verified_head.advance(lines.last_written.chain_hash))
        self.catch_up()

    def catch_up(self) -> tuple[str, ...]:
        """Read and check what was added since the last time, by whatever process, and mend what a kill has left.

        It gives the seals of the lines that it has read; none are kept, because a log grows with the rounds.
        """
        head = self._read_head()
        if head.n < self.last_line.number:
            raise self._damage_error(
                f"{self._file} and its head have gone back from line {self.last_line.number} to {head.n}."
            )
        if not self._file.exists() or self._file.stat().st_size < self.last_line.end:
            raise self._damage_error(f"{self._file} has lost lines that were there before.")
        found = event_log.read_log(self._file, self.last_line, self._advice)
        ahead = found.last.number - head.n
        if ahead < 0:
            raise self._damage_error(
                f"Line {found.last.number + 1} of {self._file} is damaged or missing: {head.n} were written."
            )
        if ahead > 1:
            raise self._damage_error(f"Line {head.n + 1} of {self._file} and what follows was added by somebody else.")
        self._check_chain(found, head)
        if ahead == 1:  # a kill came between the line and the head
            head = head.advance(found.last.chain_hash)
            self._write_head(head)
        self._apply(found, head)
        if found.torn_bytes:
            atomic.truncate(self._file, found.last.end)
            self.add("repaired", torn=found.torn_bytes)
        return found.chain_hashes

    def verify_all(self, line: int = 0, chain_hash: str = "") -> None:
        """Check all from the first line on; a line and its seal that were noted elsewhere must be there."""
        self.rewind()
        chain_hashes = self.catch_up()
        if line and (line > len(chain_hashes) or chain_hashes[line - 1] != chain_hash):
            raise StateError(
                f"Line {line} of {self._file} is not the one that was noted, {chain_hash!r:.80}: the folder was "
                "put back to an older copy, or its log was written anew."
            )

    def _check_chain(self, content: LogContent, head: _Head) -> None:
        """The head is that of these lines; with the key, or behind what was read before, so is everything in them."""
        if [self.last_line.chain_hash, *content.chain_hashes][head.n - self.last_line.number] != head.chain_hash:
            raise self._damage_error(
                f"The lines of {self._file} were sealed anew, or its head was: line {head.n} differs."
            )
        expected_head = self._verified_head
        self._compare_heads(expected_head, head)
        for event, seal in zip(content.events, content.chain_hashes, strict=True):
            n = event["n"]
            expected_head = head if n == head.n + 1 else expected_head
            if expected_head is not None and event.get("mark") != expected_head.mark:
                raise self._damage_error(f"Line {max(1, n - 1)} or {n} of {self._file} was changed and sealed anew.")
            expected_head = None if expected_head is None else expected_head.advance(seal)
            self._compare_heads(expected_head, head)

    def _compare_heads(self, expected_head: _Head | None, head: _Head) -> None:
        if expected_head is not None and expected_head.n == head.n and expected_head != head:
            raise self._damage_error(f"Line {head.n} of {self._file}, or its head, was changed and sealed anew.")

    def _apply(self, content: LogContent, head: _Head) -> None:
        for event in content.events:
            party = event.get("party", "")
            if event.get("event") in self._custody_events:
                self.latest_events[party] = event
            elif event.get("event") == "opened":
                self.open_counts[party] = self.open_counts.get(party, 0) + 1
        self.last_line = content.last
        self._verified_head = head

    def _read_head(self) -> _Head:
        try:
            found = _Head(**json.loads(self._head_file.read_bytes()))
            whole = (
                type(found.n) is int and isinstance(found.chain_hash, str) and len(bytes.fromhex(found.secret)) == 32
            )
        except OSError as error:
            raise self._damage_error(f"{self._head_file} cannot be read: {error.strerror}.") from None
        except _PARSE_ERRORS:
            whole = False
        if not whole:
            raise self._damage_error(f"{self._head_file} is damaged.")
        return found

    def _write_head(self, head: _Head) -> None:
        atomic.replace(self._head_file, json.dumps(asdict(head)).encode(), f"{AUDIT_HEAD}.new", atomic.PRIVATE_MODE)

    def _damage_error(self, problem: str) -> StateError:
        return StateError(f"{problem} {self._advice}")


def current_user() -> str:
    """Who does it, for the log: user, machine and process."""
    try:
        name = getpass.getuser()
    except (OSError, KeyError, ImportError):  # a container whose user has no name
        name = "unknown_user"
    return f"{name}@{socket.gethostname()}:{os.getpid()}"
