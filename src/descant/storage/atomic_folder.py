"""Folders that are written completely or not at all."""

from __future__ import annotations

import errno
import json
import sqlite3
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path

from safetensors import SafetensorError

from ..errors import StateError


@contextmanager
def replace_folder(folder: Path, files: Sequence[str]) -> Iterator[Path]:
    """Give a new folder to fill; it replaces ``folder`` when the block succeeds, and otherwise nothing changes.

    Only a folder that Descant wrote is replaced. It is an error if it holds files other than ``files`` (shell
    patterns), or if the first of them, the manifest, is not JSON with the key "descant".
    """
    check_replaceable(folder, files)
    target = folder.resolve()
    with write_errors(folder):
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as temporary:
            new = Path(temporary, "new")
            old = Path(temporary, "old")
            new.mkdir()
            yield new
            try:
                if target.exists():
                    target.replace(old)
                new.replace(target)
            except BaseException:  # also an interrupt: put the old folder back before the temporary one is deleted
                if old.exists() and not target.exists():
                    old.replace(target)
                raise


def check_replaceable(folder: Path, files: Sequence[str], in_place: bool = False) -> None:
    """Raise StateError unless the folder can be written and holds no other files; call it before long work, not after.

    With ``in_place`` the existing folder is kept and the files are written into it. It may then also hold hidden files
    of other programs (.DS_Store), and it may lack the manifest, as after a first save that was killed.
    """
    target = folder.resolve()
    if target.is_dir():
        found = sorted(entry.name for entry in target.iterdir())
        if in_place:
            found = [name for name in found if name in files or not name.startswith(".")]
        foreign = [name for name in found if not any(fnmatchcase(name, pattern) for pattern in files)]
        recognized = _is_manifest(target / files[0]) or (in_place and files[0] not in found)
        if foreign:
            raise StateError(
                f"{folder} holds {foreign[0]!r}, which Descant did not write for a result of this kind. "
                "Give a new or an empty folder."
            )
        if found and not recognized:
            raise StateError(
                f"{folder} holds {found[0]!r}, but no {files[0]} written by Descant. Give a new or an empty folder."
            )
        if target.is_mount() and not in_place:
            raise StateError(f"{folder} is a mount point, which cannot be replaced. Give a folder inside it.")
    elif target.exists():
        raise StateError(f"{folder} is a file. A folder is needed: give a new or an empty folder.")
    within = [target, *target.parents] if in_place else target.parents
    nearest = next(parent for parent in within if parent.exists())
    with write_errors(folder), tempfile.TemporaryDirectory(prefix=".descant-", dir=nearest):
        pass


def _is_manifest(file: Path) -> bool:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and "descant" in found


@contextmanager
def write_errors(folder: Path) -> Iterator[None]:
    """Turn errors of writing a folder into a StateError of one sentence."""
    try:
        yield
    except (OSError, SafetensorError, sqlite3.Error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        disk_full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or any(
            text in reason for text in ("disk is full", "No space left")
        )
        hint = (
            "What was saved before is complete: free some space and continue"
            if disk_full
            else "Give a folder that you may write to"
        )
        raise StateError(f"{folder} cannot be written: {reason}. {hint}.") from error
