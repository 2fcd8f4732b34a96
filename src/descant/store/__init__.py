"""State that outlives a round."""

from .folder import check_replaceable, replacing
from .party_state import PartyStore

__all__ = ["PartyStore", "check_replaceable", "replacing"]
