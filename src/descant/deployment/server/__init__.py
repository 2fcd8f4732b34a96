"""The server of a federation whose parties are silos."""

from typing import TYPE_CHECKING

from ...core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from .handshakes import HandshakeTransport
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            ".handshakes": ("HandshakeTransport",),
        },
    )

__all__ = [
    "HandshakeTransport",
]
