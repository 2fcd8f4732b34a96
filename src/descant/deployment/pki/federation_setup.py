"""How a federation begins: the organiser's folder with its keys, its recipe and the first line of its log."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...core.settings import check, setting
from ...errors import SettingError, StateError
from ...storage import atomic
from ...storage.atomic_folder import check_replaceable, clear_errors
from ...storage.audit_log import HEAD, LOG, Audit
from ...storage.event_log import first
from ...storage.lock import Lock
from .certificates import AUTHORITY, SERVER, Authority, fingerprint
from .name_checks import address, check_hosts

ROSTER, RECIPE, KEYS, RUN, LOCK = "roster.json", "recipe.toml", "keys", "run", ".lock"
PATIENCE = 10.0  # seconds to wait for another process, which needs the folder for moments only
_OURS = (ROSTER, RECIPE, KEYS, RUN, LOCK, LOG, HEAD, *(f"{name}.new" for name in (ROSTER, RECIPE, LOG, HEAD)))
_CHANGES = ("invited", "joined", "revoked")
_MEANWHILE = "Nobody is invited, let in or revoked until it is restored."
_TOLD = {"federation", "address", "recipe", "authority", "invite_days"}
_MOST = 2**20  # bytes of a recipe


@dataclass(frozen=True)
class Terms:
    """For how long, and where."""

    hosts: tuple[str, ...] = ("localhost",)  # by which parties reach the proxy; invites name the first
    port: int = setting(8443, "at which parties reach the proxy", least=1, most=65535, whole=True)
    days: int = setting(730, "for which the authority holds", least=1, most=36500, whole=True)
    invite_days: int = setting(365, "for which an invite holds", least=1, most=36500, whole=True)


def found(place: Path, recipe: Path, terms: Terms, who: str) -> None:
    """A new federation in a new or empty folder: its keys, a copy of the recipe, and nobody invited yet."""
    check(terms)
    check_hosts(terms.hosts)
    check_new(place)
    agreed, digest = recipe_in(recipe)
    with clear_errors(place):
        atomic.make(place, 0o700)
        lock = Lock(place / LOCK, PATIENCE)
        try:
            for inner in (KEYS, RUN):
                atomic.make(place / inner, 0o700)
            atomic.replace(place / RECIPE, agreed, f"{RECIPE}.new")
            _begin(place, recipe.resolve().parent, digest, terms, who)
        finally:
            lock.release()


def check_new(folder: Path) -> None:
    """Raise StateError unless a federation can be made there."""
    if (folder / HEAD).exists():
        raise StateError(f"{folder} holds a server already. Use it, or give another folder.")
    check_replaceable(folder, _OURS, in_place=True)


def _begin(place: Path, home: Path, recipe: str, terms: Terms, who: str) -> None:
    """Keys, and the first line of the log, which comes last: what has no log yet can be begun again."""
    federation = secrets.token_hex(16)
    authority, pair = Authority.new(f"descant {federation}", terms.days)
    pair.write(place / KEYS, AUTHORITY)
    authority.server(terms.hosts).write(place / KEYS, SERVER)
    audit_of(place, authority, federation).begin(
        "created",
        federation=federation,
        address=address(terms.hosts[0], terms.port),
        recipe=recipe,
        home=str(home),  # what the recipe names is found from there: a vault and its key are not copied
        authority=fingerprint(authority.certificate),
        invite_days=terms.invite_days,
        who=who,
    )


def audit_of(folder: Path, authority: Authority, federation: str) -> Audit:
    """The log of a federation, with the secret that only its authority gives."""
    return Audit(folder, authority.derive(b"descant roster 1\n" + federation.encode()), _CHANGES, _MEANWHILE)


def founded(folder: Path) -> dict[str, Any]:
    """What the first line of the log says; that it is as it was written is checked later."""
    if not (folder / HEAD).exists():
        raise StateError(f"{folder} holds no server. Make one: descant server init {folder} recipe.toml")
    made = first(folder / LOG)
    if not made.keys() >= _TOLD:
        raise StateError(f"Line 1 of {folder / LOG} is damaged or missing. Restore it from a copy. {_MEANWHILE}")
    return made


def recipe_in(file: Path) -> tuple[bytes, str]:
    """A recipe as it is written, and its digest."""
    try:
        data = file.read_bytes()
    except OSError as error:
        raise StateError(f"The recipe {file} cannot be read: {error.strerror}. Give the file of a recipe.") from None
    if len(data) > _MOST:
        raise SettingError(f"A recipe has at most {_MOST} bytes. {file} has {len(data)}.")
    return data, hashlib.sha256(data).hexdigest()
