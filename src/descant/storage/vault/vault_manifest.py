"""What a vault's folder says of itself, and that its log says the same."""

from __future__ import annotations

import json
from pathlib import Path

from ...errors import StateError
from ..audit_log import AUDIT_LOG
from ..event_log import first_event
from .private_keys import key_fingerprint

MANIFEST = "vault.json"


def read_manifest(folder: Path) -> tuple[str, bytes]:
    """The run and the public key of a vault."""
    file = folder / MANIFEST
    if not file.exists():
        raise StateError(
            f"{folder} holds no vault: there is no {MANIFEST} in it. Make one: descant vault init {folder}"
        )
    try:
        found = json.loads(file.read_bytes())
        run = str(found["run"])
        public = bytes.fromhex(found["public"])
        if found["vault"] != 1 or len(public) != 32:
            raise ValueError
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise StateError(f"{file} is damaged, or of another version of Descant. Restore it from a copy.") from None
    _check_against_log(file, run=run, vault=key_fingerprint(public))
    return run, public


def _check_against_log(file: Path, **claims: str) -> None:
    """Refuse a vault of another run or key than the one that was made; a log without its first line is named later."""
    creation = first_event(file.with_name(AUDIT_LOG))
    for what, found in claims.items():
        if creation and creation.get(what) != found:
            raise StateError(
                f"{file} speaks of the {what} {found!r:.80}, and the first line of {AUDIT_LOG} of {creation.get(what)!r:.80}: "
                "one of them was changed after the vault was made. Nothing is sealed for it. Find out who did that, "
                "and restore them from a copy."
            )
