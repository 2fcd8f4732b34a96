"""The tamper-evident audit log of a vault or a roster.

Its lines are those of :mod:`.event_log`: numbered, each with a hash of itself and of all lines before it. Anybody could
recompute that chain after editing a line. So a secret evolves with the log:

    secret(0) = derived from the owner's private key
    secret(n) = HMAC-SHA256(secret(n - 1), chain hash of line n)

The head file beside the log holds only the newest secret, with the number and the chain hash of the last line. So lines
can be added without the owner's key. The earlier secrets cannot be computed from the newest one, so a later intruder
cannot forge an older line. Each line carries a mark, a digest of the secret before it, which locates a change.

:meth:`AuditLog.catch_up` detects:

- without the owner's key: lines that were edited, removed, inserted or moved, and lines missing at the end, unless the
  head was rewritten as well;
- with the key: that case, too;
- not: a whole folder restored from an older copy (compare the last line with a note of it that is kept elsewhere), nor
  false lines added at the end by someone who may write to the folder.

The head distinguishes a last line that a kill cut short from a damaged one. A line counts once the head has it. Only
what lies behind such lines is ever cut off, and the log then says so.
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
CUSTODY_EVENTS = ("invited", "sealed", "refreshed", "forgetting", "forgotten")  # they change what is held of a party
_ADVICE = "Someone or something changed it after it was written: find out who, and compare with a copy. "
_VAULT_CONSEQUENCE = "The vault is not used until it is restored; the run and its models are not concerned."
_PARSE_ERRORS = (ValueError, TypeError, KeyError, RecursionError)
_EARLIER_HEAD_FIELDS = {"n", "seal", "secret"}  # of an earlier version of Descant


@dataclass(frozen=True)
class _Head:
    n: int
    chain_hash: str
    secret: str

    def advance(self, chain_hash: str) -> _Head:
        """Return the head after one more line with this chain hash."""
        return _Head(
            self.n + 1, chain_hash, hmac.digest(bytes.fromhex(self.secret), chain_hash.encode(), "sha256").hex()
        )

    @property
    def mark(self) -> str:
        """The digest that the next line carries of the secret before it."""
        return hashlib.sha256(b"descant mark" + bytes.fromhex(self.secret)).hexdigest()[:32]


class AuditLog:
    """A log that is first read to its end and then appended to, while its user holds a lock on the folder.

    `secret` is the first one, which only the owner's key gives: without it the chain is checked, but not the marks.
    `custody_events` are the events that change what is held of a party. `consequence` tells what a damaged log blocks.
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
        """Forget what was read, so that :meth:`catch_up` starts at the first line again."""
        self.last_line: LogLine = LOG_START
        # The head as it must have been after the last line that was read; None if that is unknown.
        self._verified_head = self._initial_head
        self.latest_events: dict[str, dict[str, Any]] = {}  # by party, the last event that changed what is held of it
        self.open_counts: dict[str, int] = {}  # by party, how often its coreset was opened

    def start(self, event: str, **fields: Any) -> None:
        """Write the first line of a new log; this needs the first secret."""
        if self._initial_head is None:
            raise StateError(f"{self._file} cannot be started without its owner's key.")
        self._verified_head = self._initial_head
        self.add(event, **fields)

    def add(self, event: str, **fields: Any) -> None:
        """Append a line, which is on disk when this returns, and then the head."""
        if self._verified_head is None:
            raise StateError(f"{self._file} must be read before it is written to.")
        lines = EventLog(self._file, self.last_line)
        lines.add(event, **fields, mark=self._verified_head.mark)
        lines.flush()
        self._write_head(self._verified_head.advance(lines.last_written.chain_hash))
        self.catch_up()

    def catch_up(self) -> tuple[str, ...]:
        """Read and check the lines added since the last call by any process, and repair what a kill left.

        It returns the chain hashes of these lines. They are not kept, because a log grows with the rounds.
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
            raise self._damage_error(f"Line {head.n + 1} of {self._file} and what follows was added by someone else.")
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
        """Check the log from its first line; a line number and chain hash noted elsewhere must match."""
        self.rewind()
        chain_hashes = self.catch_up()
        if line and (line > len(chain_hashes) or chain_hashes[line - 1] != chain_hash):
            raise StateError(
                f"Line {line} of {self._file} is not the one that was noted, {chain_hash!r:.80}: the folder was "
                "restored from an older copy, or its log was rewritten."
            )

    def _check_chain(self, content: LogContent, head: _Head) -> None:
        """Raise unless the head's hash is that of its line, and each line's mark fits the head before, if known."""
        if [self.last_line.chain_hash, *content.chain_hashes][head.n - self.last_line.number] != head.chain_hash:
            raise self._damage_error(f"The lines of {self._file} or its head were rewritten: line {head.n} differs.")
        expected_head = self._verified_head
        self._compare_heads(expected_head, head)
        for event, chain_hash in zip(content.events, content.chain_hashes, strict=True):
            n = event["n"]
            expected_head = head if n == head.n + 1 else expected_head
            if expected_head is not None and event.get("mark") != expected_head.mark:
                raise self._damage_error(
                    f"Line {max(1, n - 1)} or {n} of {self._file} was changed and its hash recomputed."
                )
            expected_head = None if expected_head is None else expected_head.advance(chain_hash)
            self._compare_heads(expected_head, head)

    def _compare_heads(self, expected_head: _Head | None, head: _Head) -> None:
        if expected_head is not None and expected_head.n == head.n and expected_head != head:
            raise self._damage_error(
                f"Line {head.n} of {self._file}, or its head, was changed and its hash recomputed."
            )

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
            fields = json.loads(self._head_file.read_bytes())
            if isinstance(fields, dict) and fields.keys() == _EARLIER_HEAD_FIELDS:
                raise StateError(event_log.earlier_version_message(self._file))
            found = _Head(**fields)
            is_valid = (
                type(found.n) is int and isinstance(found.chain_hash, str) and len(bytes.fromhex(found.secret)) == 32
            )
        except OSError as error:
            raise self._damage_error(f"{self._head_file} cannot be read: {error.strerror}.") from None
        except _PARSE_ERRORS:
            is_valid = False
        if not is_valid:
            raise self._damage_error(f"{self._head_file} is damaged.")
        return found

    def _write_head(self, head: _Head) -> None:
        atomic.replace(self._head_file, json.dumps(asdict(head)).encode(), f"{AUDIT_HEAD}.new", atomic.PRIVATE_MODE)

    def _damage_error(self, problem: str) -> StateError:
        return StateError(f"{problem} {self._advice}")


def current_user() -> str:
    """Return user, machine and process, for the log."""
    try:
        name = getpass.getuser()
    except (OSError, KeyError, ImportError):  # a container whose user has no name
        name = "unknown_user"
    return f"{name}@{socket.gethostname()}:{os.getpid()}"
