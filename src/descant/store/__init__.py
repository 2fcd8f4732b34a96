"""State that outlives a round."""

from .party_state import PartyStore

__all__ = ["PartyStore"]
