"""Durable storage: atomic files, locks, logs, party state, spill files and the vault."""

from typing import TYPE_CHECKING

from ..core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from .atomic_folder import check_replaceable, replace_folder, write_errors
    from .party_store import DEFAULT_BUDGET, PartyStore
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            ".atomic_folder": ("check_replaceable", "write_errors", "replace_folder"),
            ".party_store": ("DEFAULT_BUDGET", "PartyStore"),
        },
    )

__all__ = [
    "DEFAULT_BUDGET",
    "PartyStore",
    "check_replaceable",
    "write_errors",
    "replace_folder",
]
