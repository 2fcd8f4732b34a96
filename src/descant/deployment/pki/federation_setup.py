"""Creation of a federation: the server folder with its keys, its recipe and the first line of its audit log."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...core.settings import check_settings, setting
from ...errors import SettingError, StateError
from ...storage import atomic
from ...storage.atomic_folder import check_replaceable, write_errors
from ...storage.audit_log import AUDIT_HEAD, AUDIT_LOG, AuditLog
from ...storage.event_log import first_event
from ...storage.lock import FolderLock
from .certificates import AUTHORITY_NAME, SERVER_NAME, Authority, fingerprint
from .name_checks import check_hosts, join_address

ROSTER_FILE = "roster.json"
RECIPE_FILE = "recipe.toml"
KEYS_FOLDER = "keys"
RUN_FOLDER = "run"
LOCK_FILE = ".lock"
LOCK_TIMEOUT = 10.0  # seconds to wait for another process; each holds the lock only briefly
_SERVER_FILES = (
    ROSTER_FILE,
    RECIPE_FILE,
    KEYS_FOLDER,
    RUN_FOLDER,
    LOCK_FILE,
    AUDIT_LOG,
    AUDIT_HEAD,
    *(f"{name}.new" for name in (ROSTER_FILE, RECIPE_FILE, AUDIT_LOG, AUDIT_HEAD)),
)
_MEMBERSHIP_EVENTS = ("invited", "joined", "revoked")
_DAMAGED_LOG_NOTE = "No party can be invited, join or be revoked until it is restored."
_CREATION_FIELDS = {"federation", "address", "recipe", "authority", "invite_days"}
_MAX_RECIPE_BYTES = 2**20  # bytes of a recipe


@dataclass(frozen=True)
class FederationTerms:
    """The address of a federation and the validity of its keys."""

    hosts: tuple[str, ...] = ("localhost",)  # names or addresses of the proxy; invites have the first
    port: int = setting(8443, "port at which parties reach the proxy", least=1, most=65535, whole=True)
    days: int = setting(730, "days for which the authority is valid", least=1, most=36500, whole=True)
    invite_days: int = setting(365, "days for which an invite is valid", least=1, most=36500, whole=True)


def create_federation(folder: Path, recipe: Path, terms: FederationTerms, operator: str) -> None:
    """Create a federation in a new or empty folder: its keys and a copy of the recipe, without parties."""
    check_settings(terms)
    check_hosts(terms.hosts)
    check_new_folder(folder)
    recipe_text, digest = read_recipe_bytes(recipe)
    with write_errors(folder):
        atomic.make_folder(folder, 0o700)
        lock = FolderLock(folder / LOCK_FILE, LOCK_TIMEOUT)
        try:
            for subfolder in (KEYS_FOLDER, RUN_FOLDER):
                atomic.make_folder(folder / subfolder, 0o700)
            atomic.replace(folder / RECIPE_FILE, recipe_text, f"{RECIPE_FILE}.new")
            _create_keys_and_log(folder, recipe.resolve().parent, digest, terms=terms, operator=operator)
        finally:
            lock.release()


def check_new_folder(folder: Path) -> None:
    """Raise StateError unless a federation can be made there."""
    if (folder / AUDIT_HEAD).exists():
        raise StateError(f"{folder} holds a server already. Use it, or give another folder.")
    check_replaceable(folder, _SERVER_FILES, in_place=True)


def _create_keys_and_log(folder: Path, home: Path, recipe: str, terms: FederationTerms, operator: str) -> None:
    """Write the keys, and then the first line of the log: creation can be repeated until the log exists."""
    federation = secrets.token_hex(16)
    authority, pair = Authority.new(f"descant {federation}", terms.days)
    pair.write(folder / KEYS_FOLDER, AUTHORITY_NAME)
    authority.issue_server_certificate(terms.hosts).write(folder / KEYS_FOLDER, SERVER_NAME)
    open_audit_log(folder, authority, federation).start(
        "created",
        federation=federation,
        address=join_address(terms.hosts[0], terms.port),
        recipe=recipe,
        home=str(home),  # paths in the recipe are relative to it; a vault and its key are not copied
        authority=fingerprint(authority.certificate),
        invite_days=terms.invite_days,
        who=operator,
    )


def open_audit_log(folder: Path, authority: Authority, federation: str) -> AuditLog:
    """Return the audit log of a federation, keyed with a secret derived from its authority."""
    return AuditLog(
        folder,
        authority.derive(b"descant roster 1\n" + federation.encode()),
        _MEMBERSHIP_EVENTS,
        consequence=_DAMAGED_LOG_NOTE,
    )


def read_creation_event(folder: Path) -> dict[str, Any]:
    """Return the first event of the log; its seal is checked later."""
    if not (folder / AUDIT_HEAD).exists():
        raise StateError(f"{folder} holds no server. Make one: descant server init {folder} recipe.toml")
    event = first_event(folder / AUDIT_LOG)
    if not event.keys() >= _CREATION_FIELDS:
        raise StateError(
            f"Line 1 of {folder / AUDIT_LOG} is damaged or missing. Restore it from a backup. {_DAMAGED_LOG_NOTE}"
        )
    return event


def read_recipe_bytes(file: Path) -> tuple[bytes, str]:
    """Return the bytes of a recipe file and their digest."""
    try:
        data = file.read_bytes()
    except OSError as error:
        raise StateError(f"The recipe {file} cannot be read: {error.strerror}. Give the file of a recipe.") from None
    if len(data) > _MAX_RECIPE_BYTES:
        raise SettingError(f"A recipe has at most {_MAX_RECIPE_BYTES} bytes. {file} has {len(data)}.")
    return data, hashlib.sha256(data).hexdigest()
