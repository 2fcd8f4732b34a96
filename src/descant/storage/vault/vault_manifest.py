"""What a vault's folder says of itself, and that its log says the same."""

from __future__ import annotations

import json
from pathlib import Path

from ...errors import StateError
from ..audit_log import LOG
from ..event_log import first
from .private_keys import fingerprint

ABOUT = "vault.json"


def read(folder: Path) -> tuple[str, bytes]:
    """The run and the public key of a vault."""
    file = folder / ABOUT
    if not file.exists():
        raise StateError(f"{folder} holds no vault: there is no {ABOUT} in it. Make one: descant vault init {folder}")
    try:
        found = json.loads(file.read_bytes())
        run, public = str(found["run"]), bytes.fromhex(found["public"])
        if found["vault"] != 1 or len(public) != 32:
            raise ValueError
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise StateError(f"{file} is damaged, or of another version of Descant. Restore it from a copy.") from None
    _check(file, run=run, vault=fingerprint(public))
    return run, public


def _check(file: Path, **told: str) -> None:
    """Refuse a vault of another run or key than the one that was made; a log without its first line is named later."""
    made = first(file.with_name(LOG))
    for what, found in told.items():
        if made and made.get(what) != found:
            raise StateError(
                f"{file} speaks of the {what} {found!r:.80}, and the first line of {LOG} of {made.get(what)!r:.80}: "
                "one of them was changed after the vault was made. Nothing is sealed for it. Find out who did that, "
                "and restore them from a copy."
            )
