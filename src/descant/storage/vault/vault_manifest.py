"""The manifest of a vault, checked against the first line of its audit log."""

from __future__ import annotations

import json
from pathlib import Path

from ...errors import StateError
from ..audit_log import AUDIT_LOG
from ..event_log import first_event
from .private_keys import key_fingerprint

MANIFEST = "vault.json"


def read_manifest(folder: Path) -> tuple[str, bytes]:
    """Return the run and the public key of a vault."""
    file = folder / MANIFEST
    if not file.exists():
        raise StateError(
            f"{folder} holds no vault: there is no {MANIFEST} in it. Create one: descant vault init {folder}"
        )
    try:
        manifest = json.loads(file.read_bytes())
        run = str(manifest["run"])
        public = bytes.fromhex(manifest["public"])
        if manifest["vault"] != 1 or len(public) != 32:
            raise ValueError
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise StateError(f"{file} is damaged, or of another version of Descant. Restore it from a copy.") from None
    _check_against_log(file, run=run, vault=key_fingerprint(public))
    return run, public


def _check_against_log(file: Path, **claims: str) -> None:
    """Raise if run or key differ from those at creation; a log without its first line is an error later."""
    creation = first_event(file.with_name(AUDIT_LOG))
    for field, value in claims.items():
        if creation and creation.get(field) != value:
            raise StateError(
                f"{file} names the {field} {value!r:.80}, and the first line of {AUDIT_LOG} names "
                f"{creation.get(field)!r:.80}: one of them was changed after the vault was created. "
                "Nothing is encrypted for it. Find out who did that, and restore them from a copy."
            )
