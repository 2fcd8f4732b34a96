"""How a federation begins: the organiser's folder with its keys, its recipe and the first line of its log."""

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
LOCK_TIMEOUT = 10.0  # seconds to wait for another process, which needs the folder for moments only
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
_DAMAGED_LOG_NOTE = "Nobody is invited, let in or revoked until it is restored."
_CREATION_FIELDS = {"federation", "address", "recipe", "authority", "invite_days"}
_MAX_RECIPE_BYTES = 2**20  # bytes of a recipe


@dataclass(frozen=True)
class FederationTerms:
    """For how long, and where."""

    hosts: tuple[str, ...] = ("localhost",)  # by which parties reach the proxy; invites name the first
    port: int = setting(8443, "at which parties reach the proxy", least=1, most=65535, whole=True)
    days: int = setting(730, "for which the authority holds", least=1, most=36500, whole=True)
    invite_days: int = setting(365, "for which an invite holds", least=1, most=36500, whole=True)


def create_federation(folder: Path, recipe: Path, terms: FederationTerms, operator: str) -> None:
    """A new federation in a new or empty folder: its keys, a copy of the recipe, and nobody invited yet."""
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
    """Keys, and the first line of the log, which comes last: what has no log yet can be begun again."""
    federation = secrets.token_hex(16)
    authority, pair = Authority.new(f"descant {federation}", terms.days)
    pair.write(folder / KEYS_FOLDER, AUTHORITY_NAME)
    authority.issue_server_certificate(terms.hosts).write(folder / KEYS_FOLDER, SERVER_NAME)
    open_audit_log(folder, authority, federation).start(
        "created",
        federation=federation,
        address=join_address(terms.hosts[0], terms.port),
        recipe=recipe,
        home=str(home),  # what the recipe names is found from there: a vault and its key are not copied
        authority=fingerprint(authority.certificate),
        invite_days=terms.invite_days,
        who=operator,
    )


def open_audit_log(folder: Path, authority: Authority, federation: str) -> AuditLog:
    """The log of a federation, with the secret that only its authority gives."""
    return AuditLog(
        folder,
        authority.derive(b"descant roster 1\n" + federation.encode()),
        _MEMBERSHIP_EVENTS,
        consequence=_DAMAGED_LOG_NOTE,
    )


def read_creation_event(folder: Path) -> dict[str, Any]:
    """What the first line of the log says; that it is as it was written is checked later."""
    if not (folder / AUDIT_HEAD).exists():
        raise StateError(f"{folder} holds no server. Make one: descant server init {folder} recipe.toml")
    event = first_event(folder / AUDIT_LOG)
    if not event.keys() >= _CREATION_FIELDS:
        raise StateError(
            f"Line 1 of {folder / AUDIT_LOG} is damaged or missing. Restore it from a copy. {_DAMAGED_LOG_NOTE}"
        )
    return event


def read_recipe_bytes(file: Path) -> tuple[bytes, str]:
    """A recipe as it is written, and its digest."""
    try:
        data = file.read_bytes()
    except OSError as error:
        raise StateError(f"The recipe {file} cannot be read: {error.strerror}. Give the file of a recipe.") from None
    if len(data) > _MAX_RECIPE_BYTES:
        raise SettingError(f"A recipe has at most {_MAX_RECIPE_BYTES} bytes. {file} has {len(data)}.")
    return data, hashlib.sha256(data).hexdigest()
