"""State that outlives a round."""

from typing import TYPE_CHECKING, Any

from .atomic_folder import check_replaceable, clear_errors, replacing

if TYPE_CHECKING:
    from .party_state import DEFAULT_BUDGET, PartyStore

__all__ = ["DEFAULT_BUDGET", "PartyStore", "check_replaceable", "clear_errors", "replacing"]


def __getattr__(name: str) -> Any:
    """Import on first use: whoever only reads a run's log must not wait for torch."""
    if name in ("DEFAULT_BUDGET", "PartyStore"):
        from . import party_state

        return getattr(party_state, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
