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
from ...core.settings import check_settings, unknown_name_error
from ...errors import PartyError, SettingError, StateError
from ...storage import atomic
from ...storage.atomic_folder import write_errors
from ...storage.audit_log import current_user
from ...storage.lock import FolderLock
from .certificates import AUTHORITY_NAME, REVOCATION_FILE, Authority, fingerprint, new_node_key, public_node_key, serial
from .federation_setup import (
    KEYS_FOLDER,
    LOCK_FILE,
    LOCK_TIMEOUT,
    RECIPE_FILE,
    ROSTER_FILE,
    RUN_FOLDER,
    FederationTerms,
    create_federation,
    open_audit_log,
    read_creation_event,
    read_recipe_bytes,
)
from .invite import Invite
from .name_checks import check_name


@dataclass(frozen=True)
class RosterEntry:
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
class RosterVerification:
    """What was found to be in order. The last line's number and seal, noted elsewhere, are for `verify` later."""

    lines: int
    seal: str
    parties: int


class Roster:
    """The organiser's folder. Several processes may use it; each has it to itself for moments."""

    def __init__(self, folder: str | Path, operator: str = "") -> None:
        self.folder = Path(folder)
        self._operator = operator or current_user()
        self.keys_folder = self.folder / KEYS_FOLDER
        self.run_folder = self.folder / RUN_FOLDER
        creation = read_creation_event(self.folder)
        self.federation = creation["federation"]
        self.address = creation["address"]
        self.recipe = creation["recipe"]
        self._invite_days = int(creation["invite_days"])
        self.recipe_folder = Path(creation.get("home", self.folder))  # where the recipe was
        self.authority = Authority.read(self.keys_folder)
        self._audit = open_audit_log(self.folder, self.authority, self.federation)
        if fingerprint(self.authority.certificate) != creation["authority"]:
            raise StateError(
                f"{self.keys_folder} holds another authority than {self.folder} was made with. Restore it."
            )
        with self._locked():
            pass

    @classmethod
    def create(
        cls,
        folder: str | Path,
        recipe: str | Path,
        terms: FederationTerms = FederationTerms(),  # noqa: B008  a frozen value
        operator: str = "",
    ) -> Roster:
        """A new federation in a new or empty folder: its keys, a copy of the recipe, and nobody invited yet."""
        create_federation(Path(folder), Path(recipe), terms, operator=operator or current_user())
        return cls(folder, operator)

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
        check_settings(FederationTerms(invite_days=self._invite_days if days is None else days))
        path = Path(file)
        with self._locked():
            self.check_recipe()
            latest = self._audit.latest_events.get(check_name(name))
            if latest is not None and latest["event"] != "revoked":
                raise PartyError(
                    f"Party {name!r} was invited on {latest['invited']:.10} already. If its invite is lost or in wrong "
                    f"hands, revoke it, and invite it again: descant server revoke {self.folder} {name}"
                )
            if path.exists() or path.is_symlink() or not path.parent.is_dir():
                raise StateError(f"{path} must be a new file in a folder that exists. Give another for the invite.")
            invite, certificate_fields = self._make_invite(name, days or self._invite_days, vault)
            self._record_event("invited", name, certificate_fields, revoked=_revoked_serials(latest))
            with write_errors(path.parent), self._revoke_on_failure(name):
                invite.write(path, self.authority)
            return invite

    def record_join(self, name: str, machine: str) -> RosterEntry:
        """Note that a party has joined, and from where: an invite that is used in a second place is refused, and noted.

        `machine` is what the silo has drawn by chance when it first ran there, not something that others know of it:
        so what is refused is told without it. The log has both.
        """
        if not machine.isprintable() or not 1 <= len(machine) <= 128:
            raise SettingError(f"The mark of a machine has 1 to 128 printable characters. Got {machine!r:.80}.")
        with self._locked():
            latest = self._latest_event(name)
            if latest["event"] == "revoked":
                raise PartyError(f"Party {name!r} was revoked on {latest['at']:.10}. It needs a new invite.")
            known_machine = latest.get("machine")
            if known_machine is not None and known_machine != machine:
                self._audit.add("rejected", party=name, machine=machine, who=self._operator)
                raise PartyError(
                    f"Party {name!r} has joined from another machine, or another folder: its invite is used in two "
                    "places. If it has moved, or the invite is in wrong hands, the organiser must revoke it and invite "
                    f"it again: descant server revoke DIR {name}"
                )
            if known_machine is None:
                self._record_event("joined", name, latest, machine=machine)
            return _roster_entry(self._audit.latest_events[name])

    def revoke(self, name: str) -> RosterEntry:
        """Let a party in no more: its certificate is on the list that the proxy reads. Tell the proxy to read it."""
        with self._locked():
            latest = self._latest_event(name)
            if latest["event"] == "revoked":
                raise PartyError(f"Party {name!r} was revoked on {latest['at']:.10} already.")
            self._record_event("revoked", name, latest)
            return _roster_entry(self._audit.latest_events[name])

    def check_recipe(self) -> None:
        """Raise StateError if the recipe was changed after it was agreed on."""
        if read_recipe_bytes(self.folder / RECIPE_FILE)[1] != self.recipe:
            raise StateError(
                f"{self.folder / RECIPE_FILE} was changed after the federation was made, and its parties have agreed to "
                "what it said. Restore it, or make a new server for the new recipe."
            )

    def parties(self) -> list[RosterEntry]:
        """Everybody who was ever invited, by name."""
        with self._locked():
            return self._entries()

    def verify(self, line: int = 0, seal: str = "") -> RosterVerification:
        """Check the log from its first line on, the recipe and the keys; then log that.

        A line and its seal that were noted elsewhere show whether the folder was put back to an older copy.
        """
        with self._locked():
            self._audit.verify_all(line, seal)
            self.check_recipe()
            self._audit.add("verified", who=self._operator)
            return RosterVerification(
                self._audit.last_line.number, self._audit.last_line.chain_hash, len(self._audit.latest_events)
            )

    def _make_invite(self, name: str, days: int, vault: str) -> tuple[Invite, dict[str, Any]]:
        """A party's invite, and what the roster keeps of it."""
        pair = self.authority.issue_party_certificate(name, days)
        node = new_node_key()
        certificate = x509.load_pem_x509_certificate(pair.certificate)
        federation_fields = (
            self.address,
            self.federation,
            self.recipe,
            (self.keys_folder / f"{AUTHORITY_NAME}.crt").read_text(),
        )
        invite = Invite(name, *federation_fields, pair.certificate.decode(), pair.key.decode(), node.decode(), vault)
        certificate_fields = {
            "serial": serial(certificate),
            "fingerprint": fingerprint(certificate),
            "node_key": public_node_key(node),
            "expires": certificate.not_valid_after_utc.isoformat("T", "seconds"),
            "invited": datetime.now(UTC).isoformat("T", "seconds"),
        }
        return invite, certificate_fields

    @contextmanager
    def _revoke_on_failure(self, name: str) -> Iterator[None]:
        """An invite that could not be written is nobody's."""
        try:
            yield
        except OSError:
            self._record_event("revoked", name, self._latest_event(name))
            raise

    def _record_event(self, event: str, name: str, party_fields: Mapping[str, Any], **extra: Any) -> None:
        """A line that says all there is of a party, and what follows from it."""
        carried = ("serial", "fingerprint", "node_key", "expires", "invited", "machine", "revoked")
        selected = {key: value for key, value in party_fields.items() if key in carried}
        self._audit.add(event, party=name, who=self._operator, **{**selected, **extra})
        self._update_derived_files()

    def _latest_event(self, name: str) -> dict[str, Any]:
        if name not in self._audit.latest_events:
            raise unknown_name_error("party", name, self._audit.latest_events)
        return self._audit.latest_events[name]

    def _entries(self) -> list[RosterEntry]:
        return [_roster_entry(event) for _, event in sorted(self._audit.latest_events.items())]

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """While no other process is at the folder, and after what one that died has left was put in order."""
        with write_errors(self.folder):
            lock = FolderLock(self.folder / LOCK_FILE, LOCK_TIMEOUT)
            try:
                self._audit.catch_up()
                self._update_derived_files()
                yield
            finally:
                lock.release()

    def _update_derived_files(self) -> None:
        """The list of revoked certificates and the table say what the log says."""
        revoked = {one: at for event in self._audit.latest_events.values() for one, at in _revoked_serials(event)}
        if self.authority.read_revoked_serials(self.keys_folder / REVOCATION_FILE) != revoked.keys():
            revoked_at = {one: datetime.fromisoformat(at) for one, at in revoked.items()}
            atomic.replace(
                self.keys_folder / REVOCATION_FILE, self.authority.revocation_list(revoked_at), f"{REVOCATION_FILE}.new"
            )
        header = {"descant": __version__, "federation": self.federation, "address": self.address, "recipe": self.recipe}
        text = json.dumps({**header, "parties": [asdict(entry) for entry in self._entries()]}, indent=1).encode()
        file = self.folder / ROSTER_FILE
        if not file.exists() or file.read_bytes() != text:
            atomic.replace(file, text, f"{ROSTER_FILE}.new")


def _revoked_serials(event: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """The serials of all certificates that a party had and that count no more, and since when."""
    if event is None:
        return []
    newly_revoked = [(event["serial"], event["at"])] if event["event"] == "revoked" else []
    return [(one, at) for one, at in event.get("revoked", [])] + newly_revoked


def _roster_entry(event: Mapping[str, Any]) -> RosterEntry:
    selected = {key: event[key] for key in ("serial", "fingerprint", "node_key", "expires")}
    return RosterEntry(event["party"], event["event"], event["at"], **selected, machine=event.get("machine", ""))
