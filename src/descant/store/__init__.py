"""State that outlives a round."""

from .folder import check_replaceable, clear_errors, replacing
from .party_state import DEFAULT_BUDGET, PartyStore

__all__ = ["DEFAULT_BUDGET", "PartyStore", "check_replaceable", "clear_errors", "replacing"]
