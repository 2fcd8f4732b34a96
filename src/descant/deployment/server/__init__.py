"""The organiser of a federation whose parties are on machines of their own."""

from .handshakes import Meeting

__all__ = ["Meeting"]
