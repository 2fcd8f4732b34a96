"""The roster: the organiser's folder, and who may take part in the federation.

    server/recipe.toml     what was agreed on, as it was given
    server/audit.jsonl     who was invited, has joined and was revoked, in lines that cannot be changed unseen
    server/roster.json     the same as a table, for people and programs to read
    server/keys/           the authority (ca), the server's certificate, and the list of those that were revoked
    server/run/            what belongs to the run

A change counts once its line is in the log. The table and the list of revoked certificates follow from it: they are
made anew whenever they say something else, after a kill, too. So an edit of the table changes nothing.

The private keys of parties are not kept here, only in their invites. The authority's is, because to invite and to
revoke need it: whoever may read `keys/` can let in whom he wants, and write the log anew.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cryptography import x509

from ... import __version__
from ...core.settings import check, unknown
from ...errors import PartyError, SettingError, StateError
from ...storage import atomic
from ...storage.atomic_folder import clear_errors
from ...storage.audit_log import somebody
from ...storage.lock import Lock
from .certificates import AUTHORITY, REVOKED, Authority, fingerprint, new_node_key, node_public, serial
from .federation_setup import KEYS, LOCK, PATIENCE, RECIPE, ROSTER, RUN, Terms, audit_of, found, founded, recipe_in
from .invite import Invite
from .name_checks import check_name


@dataclass(frozen=True)
class Entry:
    """A party, as the log has it."""

    name: str
    state: str  # "invited", "joined" or "revoked"
    since: str
    serial: str  # of its certificate
    fingerprint: str  # of its certificate
    node_key: str  # the public half, as Flower registers it
    expires: str
    machine: str  # where it has joined from


@dataclass(frozen=True)
class Verified:
    """What was found to be in order. The last line's number and seal, noted elsewhere, are for `verify` later."""

    lines: int
    seal: str
    parties: int


class Roster:
    """The organiser's folder. Several processes may use it; each has it to itself for moments."""

    def __init__(self, folder: str | Path, who: str = "") -> None:
        self.folder, self._who = Path(folder), who or somebody()
        self.keys, self.run = self.folder / KEYS, self.folder / RUN
        made = founded(self.folder)
        self.federation, self.address, self.recipe = made["federation"], made["address"], made["recipe"]
        self._invite_days = int(made["invite_days"])
        self.home = Path(made.get("home", self.folder))  # where the recipe was
        self.authority = Authority.read(self.keys)
        self._audit = audit_of(self.folder, self.authority, self.federation)
        if fingerprint(self.authority.certificate) != made["authority"]:
            raise StateError(f"{self.keys} holds another authority than {self.folder} was made with. Restore it.")
        with self._alone():
            pass

    @classmethod
    def create(cls, folder: str | Path, recipe: str | Path, terms: Terms = Terms(), who: str = "") -> Roster:  # noqa: B008
        """A new federation in a new or empty folder: its keys, a copy of the recipe, and nobody invited yet."""
        found(Path(folder), Path(recipe), terms, who or somebody())
        return cls(folder, who)

    def __repr__(self) -> str:
        return f"Roster({str(self.folder)!r}, federation {self.federation!r} at {self.address})"

    @property
    def fingerprint(self) -> str:
        """Of the authority: what parties compare with their invites', by telephone or on paper."""
        return fingerprint(self.authority.certificate)

    def invite(self, name: str, file: str | Path, days: int | None = None, vault: str = "") -> Invite:
        """Let a party of this name in, and write its invite into a new file, which holds the only copy of its keys.

        `vault` is the fingerprint of the vault that it seals for, if there is one: the invite says it.
        """
        check(Terms(invite_days=self._invite_days if days is None else days))
        place = Path(file)
        with self._alone():
            self.check_recipe()
            held = self._audit.latest.get(check_name(name))
            if held is not None and held["event"] != "revoked":
                raise PartyError(
                    f"Party {name!r} was invited on {held['invited']:.10} already. If its invite is lost or in wrong "
                    f"hands, revoke it, and invite it again: descant server revoke {self.folder} {name}"
                )
            if place.exists() or place.is_symlink() or not place.parent.is_dir():
                raise StateError(f"{place} must be a new file in a folder that exists. Give another for the invite.")
            invite, about = self._made_for(name, days or self._invite_days, vault)
            self._note("invited", name, about, revoked=_revoked(held))
            with clear_errors(place.parent), self._undoing(name):
                invite.write(place, self.authority)
            return invite

    def joined(self, name: str, machine: str) -> Entry:
        """Note that a party has joined, and from where: an invite that is used in a second place is refused, and noted.

        `machine` is what the silo has drawn by chance when it first ran there, not something that others know of it:
        so what is refused is told without it. The log has both.
        """
        if not machine.isprintable() or not 1 <= len(machine) <= 128:
            raise SettingError(f"The mark of a machine has 1 to 128 printable characters. Got {machine!r:.80}.")
        with self._alone():
            held = self._held(name)
            if held["event"] == "revoked":
                raise PartyError(f"Party {name!r} was revoked on {held['at']:.10}. It needs a new invite.")
            before = held.get("machine")
            if before is not None and before != machine:
                self._audit.add("refused", party=name, machine=machine, who=self._who)
                raise PartyError(
                    f"Party {name!r} has joined from another machine, or another folder: its invite is used in two "
                    "places. If it has moved, or the invite is in wrong hands, the organiser must revoke it and invite "
                    f"it again: descant server revoke DIR {name}"
                )
            if before is None:
                self._note("joined", name, held, machine=machine)
            return _entry(self._audit.latest[name])

    def revoke(self, name: str) -> Entry:
        """Let a party in no more: its certificate is on the list that the proxy reads. Tell the proxy to read it."""
        with self._alone():
            held = self._held(name)
            if held["event"] == "revoked":
                raise PartyError(f"Party {name!r} was revoked on {held['at']:.10} already.")
            self._note("revoked", name, held)
            return _entry(self._audit.latest[name])

    def check_recipe(self) -> None:
        """Raise StateError if the recipe was changed after it was agreed on."""
        if recipe_in(self.folder / RECIPE)[1] != self.recipe:
            raise StateError(
                f"{self.folder / RECIPE} was changed after the federation was made, and its parties have agreed to "
                "what it said. Restore it, or make a new server for the new recipe."
            )

    def parties(self) -> list[Entry]:
        """Everybody who was ever invited, by name."""
        with self._alone():
            return self._entries()

    def verify(self, line: int = 0, seal: str = "") -> Verified:
        """Check the log from its first line on, the recipe and the keys; then log that.

        A line and its seal that were noted elsewhere show whether the folder was put back to an older copy.
        """
        with self._alone():
            self._audit.read_again(line, seal)
            self.check_recipe()
            self._audit.add("verified", who=self._who)
            return Verified(self._audit.last.number, self._audit.last.seal, len(self._audit.latest))

    def _made_for(self, name: str, days: int, vault: str) -> tuple[Invite, dict[str, Any]]:
        """A party's invite, and what the roster keeps of it."""
        pair, node = self.authority.party(name, days), new_node_key()
        own = x509.load_pem_x509_certificate(pair.certificate)
        ours = (self.address, self.federation, self.recipe, (self.keys / f"{AUTHORITY}.crt").read_text())
        invite = Invite(name, *ours, pair.certificate.decode(), pair.key.decode(), node.decode(), vault)
        about = {
            "serial": serial(own),
            "fingerprint": fingerprint(own),
            "node_key": node_public(node),
            "expires": own.not_valid_after_utc.isoformat("T", "seconds"),
            "invited": datetime.now(UTC).isoformat("T", "seconds"),
        }
        return invite, about

    @contextmanager
    def _undoing(self, name: str) -> Iterator[None]:
        """An invite that could not be written is nobody's."""
        try:
            yield
        except OSError:
            self._note("revoked", name, self._held(name))
            raise

    def _note(self, event: str, name: str, about: Mapping[str, Any], **more: Any) -> None:
        """A line that says all there is of a party, and what follows from it."""
        kept = ("serial", "fingerprint", "node_key", "expires", "invited", "machine", "revoked")
        told = {key: value for key, value in about.items() if key in kept}
        self._audit.add(event, party=name, who=self._who, **{**told, **more})
        self._follow()

    def _held(self, name: str) -> dict[str, Any]:
        if name not in self._audit.latest:
            raise unknown("party", name, self._audit.latest)
        return self._audit.latest[name]

    def _entries(self) -> list[Entry]:
        return [_entry(event) for _, event in sorted(self._audit.latest.items())]

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """While no other process is at the folder, and after what one that died has left was put in order."""
        with clear_errors(self.folder):
            lock = Lock(self.folder / LOCK, PATIENCE)
            try:
                self._audit.catch_up()
                self._follow()
                yield
            finally:
                lock.release()

    def _follow(self) -> None:
        """The list of revoked certificates and the table say what the log says."""
        revoked = {one: at for event in self._audit.latest.values() for one, at in _revoked(event)}
        if self.authority.listed(self.keys / REVOKED) != revoked.keys():
            since = {one: datetime.fromisoformat(at) for one, at in revoked.items()}
            atomic.replace(self.keys / REVOKED, self.authority.revocations(since), f"{REVOKED}.new")
        about = {"descant": __version__, "federation": self.federation, "address": self.address, "recipe": self.recipe}
        text = json.dumps({**about, "parties": [asdict(entry) for entry in self._entries()]}, indent=1).encode()
        file = self.folder / ROSTER
        if not file.exists() or file.read_bytes() != text:
            atomic.replace(file, text, f"{ROSTER}.new")


def _revoked(event: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """The serials of all certificates that a party had and that count no more, and since when."""
    if event is None:
        return []
    now = [(event["serial"], event["at"])] if event["event"] == "revoked" else []
    return [(one, at) for one, at in event.get("revoked", [])] + now


def _entry(event: Mapping[str, Any]) -> Entry:
    told = {key: event[key] for key in ("serial", "fingerprint", "node_key", "expires")}
    return Entry(event["party"], event["event"], event["at"], **told, machine=event.get("machine", ""))
