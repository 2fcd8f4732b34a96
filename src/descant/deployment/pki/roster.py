"""The roster: the server folder, and the parties that may take part in the federation.

    server/recipe.toml     a copy of the agreed recipe
    server/audit.jsonl     the log of invitations, joins and revocations; edits of it are detected
    server/roster.json     the same as a table, for people and programs to read
    server/keys/           the authority (ca), the server's certificate, and the revocation list
    server/run/            the files of the run

A change counts once its line is in the log. The table and the revocation list are derived from the log and rewritten
whenever they differ from it, also after a kill. So an edit of the table changes nothing.

The parties' private keys are only in their invites. The authority's key is here, because invitations and revocations
need it: anyone who can read `keys/` can let in parties and rewrite the log.
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
    """A party's latest state in the log."""

    name: str
    state: str  # "invited", "joined" or "revoked"
    since: str
    serial: str  # of its certificate
    fingerprint: str  # of its certificate
    node_key: str  # the public half, as Flower registers it
    expires: str
    machine: str  # id of the machine that it joined from


@dataclass(frozen=True)
class RosterVerification:
    """The outcome of a verification; the last line's number and seal, kept elsewhere, anchor a later one."""

    lines: int
    seal: str
    parties: int


class Roster:
    """The server folder; several processes may use it, each under a short lock."""

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
        self.recipe_folder = Path(creation.get("home", self.folder))  # where the recipe came from
        self.authority = Authority.read(self.keys_folder)
        self._audit = open_audit_log(self.folder, self.authority, self.federation)
        if fingerprint(self.authority.certificate) != creation["authority"]:
            raise StateError(
                f"{self.keys_folder} holds another authority than the one that {self.folder} was made with. Restore it."
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
        """Create a federation in a new or empty folder: its keys and a copy of the recipe, without parties."""
        create_federation(Path(folder), Path(recipe), terms, operator=operator or current_user())
        return cls(folder, operator)

    def __repr__(self) -> str:
        return f"Roster({str(self.folder)!r}, federation {self.federation!r} at {self.address})"

    @property
    def fingerprint(self) -> str:
        """The authority's fingerprint, which parties compare with their invites by telephone or on paper."""
        return fingerprint(self.authority.certificate)

    def invite(self, name: str, file: str | Path, days: int | None = None, vault: str = "") -> Invite:
        """Invite a party and write its invite, with the only copy of its keys, into a new file.

        `vault` is the fingerprint of the vault that the party encrypts its coresets for; "" if there is none.
        """
        check_settings(FederationTerms(invite_days=self._invite_days if days is None else days))
        path = Path(file)
        with self._locked():
            self.check_recipe()
            latest = self._audit.latest_events.get(check_name(name))
            if latest is not None and latest["event"] != "revoked":
                raise PartyError(
                    f"Party {name!r} was already invited on {latest['invited']:.10}. If its invite was lost or stolen, "
                    f"revoke it and invite the party again: descant server revoke {self.folder} {name}"
                )
            if path.exists() or path.is_symlink() or not path.parent.is_dir():
                raise StateError(f"{path} must be a new file in an existing folder. Give another file for the invite.")
            invite, certificate_fields = self._make_invite(name, days or self._invite_days, vault)
            self._record_event("invited", name, certificate_fields, revoked=_revoked_serials(latest))
            with write_errors(path.parent), self._revoke_on_failure(name):
                invite.write(path, self.authority)
            return invite

    def record_join(self, name: str, machine: str) -> RosterEntry:
        """Record that a party has joined; reject and log the use of its invite on a second machine.

        `machine` is a random id that the silo drew when it first ran there. It is secret, so an error does not show it;
        the log has both ids.
        """
        if not machine.isprintable() or not 1 <= len(machine) <= 128:
            raise SettingError(f"A machine id has 1 to 128 printable characters. Got {machine!r:.80}.")
        with self._locked():
            latest = self._latest_event(name)
            if latest["event"] == "revoked":
                raise PartyError(f"Party {name!r} was revoked on {latest['at']:.10}. It needs a new invite.")
            known_machine = latest.get("machine")
            if known_machine is not None and known_machine != machine:
                self._audit.add("rejected", party=name, machine=machine, who=self._operator)
                raise PartyError(
                    f"Party {name!r} has joined from another machine or folder: its invite is used in two places. If "
                    "it has moved, or the invite was stolen, the server operator must revoke it and invite the party "
                    f"again: descant server revoke DIR {name}"
                )
            if known_machine is None:
                self._record_event("joined", name, latest, machine=machine)
            return _roster_entry(self._audit.latest_events[name])

    def revoke(self, name: str) -> RosterEntry:
        """Revoke a party by putting its certificate on the proxy's revocation list; the proxy must then reload it."""
        with self._locked():
            latest = self._latest_event(name)
            if latest["event"] == "revoked":
                raise PartyError(f"Party {name!r} was already revoked on {latest['at']:.10}.")
            self._record_event("revoked", name, latest)
            return _roster_entry(self._audit.latest_events[name])

    def check_recipe(self) -> None:
        """Raise StateError if the recipe was changed after the federation was created."""
        if read_recipe_bytes(self.folder / RECIPE_FILE)[1] != self.recipe:
            raise StateError(
                f"{self.folder / RECIPE_FILE} was changed after the federation was made, and its parties agreed to the "
                "old one. Restore it, or make a new server for the new recipe."
            )

    def parties(self) -> list[RosterEntry]:
        """Return all parties that were ever invited, sorted by name."""
        with self._locked():
            return self._entries()

    def verify(self, line: int = 0, seal: str = "") -> RosterVerification:
        """Verify the whole log, the recipe and the keys, and log the verification.

        A line number and its seal, kept elsewhere, reveal a folder that was replaced by an older copy.
        """
        with self._locked():
            self._audit.verify_all(line, seal)
            self.check_recipe()
            self._audit.add("verified", who=self._operator)
            return RosterVerification(
                self._audit.last_line.number, self._audit.last_line.chain_hash, len(self._audit.latest_events)
            )

    def _make_invite(self, name: str, days: int, vault: str) -> tuple[Invite, dict[str, Any]]:
        """Return a party's invite, and the fields of it that the log keeps."""
        pair = self.authority.issue_party_certificate(name, days)
        node = new_node_key()
        certificate = x509.load_pem_x509_certificate(pair.certificate)
        invite = Invite(
            party=name,
            address=self.address,
            federation=self.federation,
            recipe=self.recipe,
            authority=(self.keys_folder / f"{AUTHORITY_NAME}.crt").read_text(),
            certificate=pair.certificate.decode(),
            key=pair.key.decode(),
            node_key=node.decode(),
            vault=vault,
        )
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
        """Revoke a party if its invite cannot be written."""
        try:
            yield
        except OSError:
            self._record_event("revoked", name, self._latest_event(name))
            raise

    def _record_event(self, event: str, name: str, party_fields: Mapping[str, Any], **extra: Any) -> None:
        """Log an event with all fields of its party, and update the derived files."""
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
        """Hold the folder's lock, after finishing the changes of a process that died."""
        with write_errors(self.folder):
            lock = FolderLock(self.folder / LOCK_FILE, LOCK_TIMEOUT)
            try:
                self._audit.catch_up()
                self._update_derived_files()
                yield
            finally:
                lock.release()

    def _update_derived_files(self) -> None:
        """Rewrite the revocation list and the table if they differ from the log."""
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
    """Return the serials and revocation times of all revoked certificates of a party."""
    if event is None:
        return []
    newly_revoked = [(event["serial"], event["at"])] if event["event"] == "revoked" else []
    return [(one, at) for one, at in event.get("revoked", [])] + newly_revoked


def _roster_entry(event: Mapping[str, Any]) -> RosterEntry:
    selected = {key: event[key] for key in ("serial", "fingerprint", "node_key", "expires")}
    return RosterEntry(event["party"], event["event"], event["at"], **selected, machine=event.get("machine", ""))
