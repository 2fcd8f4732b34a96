"""Common ground of both ends of a Flower connection: supported versions, environment, connection errors.

Telemetry and the update check are off before any module of Flower is imported.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from typing import Any

from ...errors import EngineError

FLOWER_VERSION = "1.41"
FLOWER_ENVIRONMENT = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
HEARTBEAT_INTERVAL = 10.0  # seconds
_SESSION_TIMEOUT = 2 * HEARTBEAT_INTERVAL  # seconds of silence after which Flower counts a party as gone
_MAX_CLOCK_SKEW = 4.0  # seconds between two clocks; Flower accepts signatures up to 5 s in the future


def require_flower() -> None:
    """Raise unless a supported version of Flower is installed; import nothing of it."""
    os.environ.update(FLOWER_ENVIRONMENT)
    from importlib.metadata import PackageNotFoundError, version

    try:
        installed = version("flwr")
    except PackageNotFoundError:
        raise EngineError('Silos need Flower. Install it: pip install "descant[flower]".') from None
    if not f"{installed}.".startswith(f"{FLOWER_VERSION}."):
        raise EngineError(
            f"Descant was made for flwr {FLOWER_VERSION}, and {installed} is installed. pip install 'descant[flower]'."
        )


class PeerUnavailable(EngineError):
    """The other end cannot be reached now; a retry may help."""


class SessionInUse(PeerUnavailable):
    """Another session uses our keys: our own previous one that has not expired, or another machine."""


class ConnectionRejected(EngineError):
    """The other end rejects us; a retry does not help."""


@contextmanager
def translate_http_errors(peer: str, is_remote: bool = False) -> Iterator[None]:
    """Turn HTTP errors into errors with a plain sentence; check the clocks if the peer is remote."""
    import httpx

    try:
        yield
    except httpx.HTTPStatusError as error:
        status = error.response.status_code
        body = error.response.text[:300].strip()
        if status == 400 and "certificate" in body.lower():  # nginx, for a revoked or expired certificate
            message = f"{peer} does not accept our certificate. Was it revoked, or has it expired?"
            raise ConnectionRejected(message) from error
        lag = _clock_lag(error.response) if is_remote and status == 401 else 0.0
        if abs(lag) > _MAX_CLOCK_SKEW:  # a signature made at another time
            clock_error = f"{abs(lag):.0f} s {'behind' if lag > 0 else 'ahead'}"
            raise ConnectionRejected(
                f"{peer} has another time: the clock of this machine is {clock_error}. Set the clock."
            ) from error
        if "2004" in body:  # FLEET_NODE_ACTIVATION_FAILED
            raise SessionInUse(f"{peer} still holds our previous session (up to {_SESSION_TIMEOUT:.0f} s)") from error
        if status in (502, 503, 504):  # the proxy, while no server runs behind it
            raise PeerUnavailable(f"{peer} is not ready") from error
        raise PeerUnavailable(f"{peer} answers with {status}: {body}") from error
    except httpx.HTTPError as error:
        raise PeerUnavailable(f"{peer} cannot be reached: {error}") from error


def _clock_lag(response: Any) -> float:
    """Return by how many seconds this machine's clock is behind that of the response."""
    try:
        return parsedate_to_datetime(response.headers["date"]).timestamp() - time.time()
    except (KeyError, ValueError, TypeError):
        return 0.0
