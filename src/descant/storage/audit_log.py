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
from .event_log import START, Line, Lines, Log

LOG, HEAD = "audit.jsonl", "audit.head"
CHANGES = (
    "invited",
    "sealed",
    "refreshed",
    "forgetting",
    "forgotten",
)  # what is held of a party
_ADVICE = "Somebody or something changed it after it was written: find out who, and compare with a copy. "
_VAULT = "The vault is not used until it is restored; the run and its models are not concerned."
_WRONG = (ValueError, TypeError, KeyError, RecursionError)


@dataclass(frozen=True)
class _Head:
    n: int
    seal: str
    secret: str

    def after(self, seal: str) -> _Head:
        """The head when one more line, with this seal, is there."""
        return _Head(self.n + 1, seal, hmac.digest(bytes.fromhex(self.secret), seal.encode(), "sha256").hex())

    @property
    def mark(self) -> str:
        """What the next line says of all before it."""
        return hashlib.sha256(b"descant mark" + bytes.fromhex(self.secret)).hexdigest()[:32]


class Audit:
    """A log that is read as far as it goes, and then written to; its user holds a lock on the folder meanwhile.

    `secret` is the first one, which only the owner's key gives: without it the chain is checked, but not the marks.
    `changes` are the events that change what is held of a party, `meanwhile` says what a damaged log is in the way of.
    """

    def __init__(
        self, folder: Path, secret: bytes | None, changes: Collection[str] = CHANGES, meanwhile: str = _VAULT
    ) -> None:
        self._file, self._head_file = folder / LOG, folder / HEAD
        self._changes, self._advice = changes, _ADVICE + meanwhile
        self._first = None if secret is None else _Head(0, "", secret.hex())
        self.rewind()

    def rewind(self) -> None:
        """Forget what was read, so that :meth:`catch_up` begins with the first line again."""
        self.last: Line = START
        self._known = self._first  # the head as it must have been after the last line that was read, if that is known
        self.latest: dict[str, dict[str, Any]] = {}  # by party, the last event that changed what is held of it
        self.opened: dict[str, int] = {}  # by party, how often its coreset was opened

    def begin(self, event: str, **fields: Any) -> None:
        """The first line of a new log; it needs the first secret."""
        if self._first is None:
            raise StateError(f"{self._file} cannot be begun without its owner's key.")
        self._known = self._first
        self.add(event, **fields)

    def add(self, event: str, **fields: Any) -> None:
        """One more line, on the disk when this returns; the head follows it."""
        if self._known is None:
            raise StateError(f"{self._file} must be read before it is written to.")
        lines = Log(self._file, self.last)
        lines.add(event, **fields, mark=self._known.mark)
        lines.flush()
        self._write(self._known.after(lines.written.seal))
        self.catch_up()

    def catch_up(self) -> tuple[str, ...]:
        """Read and check what was added since the last time, by whatever process, and mend what a kill has left.

        It gives the seals of the lines that it has read; none are kept, because a log grows with the rounds.
        """
        head = self._read_head()
        if head.n < self.last.number:
            raise self._damage(f"{self._file} and its head have gone back from line {self.last.number} to {head.n}.")
        if not self._file.exists() or self._file.stat().st_size < self.last.end:
            raise self._damage(f"{self._file} has lost lines that were there before.")
        found = event_log.read(self._file, self.last, self._advice)
        ahead = found.last.number - head.n
        if ahead < 0:
            raise self._damage(
                f"Line {found.last.number + 1} of {self._file} is damaged or missing: {head.n} were written."
            )
        if ahead > 1:
            raise self._damage(f"Line {head.n + 1} of {self._file} and what follows was added by somebody else.")
        self._check(found, head)
        if ahead == 1:  # a kill came between the line and the head
            head = head.after(found.last.seal)
            self._write(head)
        self._take(found, head)
        if found.torn:
            atomic.cut(self._file, found.last.end)
            self.add("mended", torn=found.torn)
        return found.seals

    def read_again(self, line: int = 0, seal: str = "") -> None:
        """Check all from the first line on; a line and its seal that were noted elsewhere must be there."""
        self.rewind()
        seals = self.catch_up()
        if line and (line > len(seals) or seals[line - 1] != seal):
            raise StateError(
                f"Line {line} of {self._file} is not the one that was noted, {seal!r:.80}: the folder was "
                "put back to an older copy, or its log was written anew."
            )

    def _check(self, found: Lines, head: _Head) -> None:
        """The head is that of these lines; with the key, or behind what was read before, so is everything in them."""
        if [self.last.seal, *found.seals][head.n - self.last.number] != head.seal:
            raise self._damage(f"The lines of {self._file} were sealed anew, or its head was: line {head.n} differs.")
        known = self._known
        self._compare(known, head)
        for event, seal in zip(found.events, found.seals, strict=True):
            n = event["n"]
            known = head if n == head.n + 1 else known
            if known is not None and event.get("mark") != known.mark:
                raise self._damage(f"Line {max(1, n - 1)} or {n} of {self._file} was changed and sealed anew.")
            known = None if known is None else known.after(seal)
            self._compare(known, head)

    def _compare(self, known: _Head | None, head: _Head) -> None:
        if known is not None and known.n == head.n and known != head:
            raise self._damage(f"Line {head.n} of {self._file}, or its head, was changed and sealed anew.")

    def _take(self, found: Lines, head: _Head) -> None:
        for event in found.events:
            party = event.get("party", "")
            if event.get("event") in self._changes:
                self.latest[party] = event
            elif event.get("event") == "opened":
                self.opened[party] = self.opened.get(party, 0) + 1
        self.last, self._known = found.last, head

    def _read_head(self) -> _Head:
        try:
            found = _Head(**json.loads(self._head_file.read_bytes()))
            whole = type(found.n) is int and isinstance(found.seal, str) and len(bytes.fromhex(found.secret)) == 32
        except OSError as error:
            raise self._damage(f"{self._head_file} cannot be read: {error.strerror}.") from None
        except _WRONG:
            whole = False
        if not whole:
            raise self._damage(f"{self._head_file} is damaged.")
        return found

    def _write(self, head: _Head) -> None:
        atomic.replace(self._head_file, json.dumps(asdict(head)).encode(), f"{HEAD}.new", atomic.PRIVATE)

    def _damage(self, what: str) -> StateError:
        return StateError(f"{what} {self._advice}")


def somebody() -> str:
    """Who does it, for the log: user, machine and process."""
    try:
        name = getpass.getuser()
    except (OSError, KeyError, ImportError):  # a container whose user has no name
        name = "somebody"
    return f"{name}@{socket.gethostname()}:{os.getpid()}"
