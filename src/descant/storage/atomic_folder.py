"""A folder that is written whole or not at all."""

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
    """A new folder to fill, which takes the place of ``folder`` when the block ends well; else nothing has changed.

    What is replaced must be of our own making: a folder is refused if it holds anything else than ``files`` (shell
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
            except BaseException:  # an interrupt, too: the old folder goes back before the temporary one is cleared
                if old.exists() and not target.exists():
                    old.replace(target)
                raise


def check_replaceable(folder: Path, files: Sequence[str], in_place: bool = False) -> None:
    """Raise StateError unless such files can be written there: to be asked before long work, not after it.

    ``in_place`` is for files that are written into the folder, which itself stays: hidden files of others may lie there
    (a desktop's .DS_Store), and such files without their manifest, of a first save that was killed.
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
                f"{folder} holds {found[0]!r}, but no {files[0]} that says that Descant wrote it. "
                "Give a new or an empty folder."
            )
        if target.is_mount() and not in_place:
            raise StateError(f"{folder} is a mount point, which cannot be replaced. Give a folder inside it.")
    elif target.exists():
        raise StateError(f"{folder} is a file, and a folder is needed. Give a new or an empty folder.")
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
    """What goes wrong while a folder is written, as one sentence."""
    try:
        yield
    except (OSError, SafetensorError, sqlite3.Error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        disk_full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or any(
            said in reason for said in ("disk is full", "No space left")
        )
        hint = (
            "What was saved before is whole: free some space and go on"
            if disk_full
            else "Give one that you may write to"
        )
        raise StateError(f"{folder} cannot be written: {reason}. {hint}.") from error
