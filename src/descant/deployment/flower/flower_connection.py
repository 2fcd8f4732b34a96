"""What both ends of a line to Flower share: the versions it was made for, its silence, and what goes wrong on the line.

Telemetry and the check for updates are off before anything of Flower is imported.
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
_SESSION_TIMEOUT = 2 * HEARTBEAT_INTERVAL  # Flower takes a party that was silent for so long for gone
_MAX_CLOCK_SKEW = 4.0  # seconds by which clocks may differ; Flower takes a signature from the future up to 5


def require_flower() -> None:
    """Raise unless the Flower that is installed is one that this was made for; nothing of it has been imported yet."""
    os.environ.update(FLOWER_ENVIRONMENT)
    from importlib.metadata import PackageNotFoundError, version

    try:
        found = version("flwr")
    except PackageNotFoundError:
        raise EngineError('Silos need Flower. Install it: pip install "descant[flower]".') from None
    if not f"{found}.".startswith(f"{FLOWER_VERSION}."):
        raise EngineError(
            f"Descant was made for flwr {FLOWER_VERSION}, and {found} is installed. pip install 'descant[flower]'."
        )


class PeerUnavailable(EngineError):
    """The other end cannot be reached now: try again."""


class SessionInUse(PeerUnavailable):
    """Somebody is there in our place: ourselves from before, who was not missed yet, or another with our keys."""


class ConnectionRejected(EngineError):
    """The other end does not want us: trying again does not help."""


@contextmanager
def translate_http_errors(peer: str, is_remote: bool = False) -> Iterator[None]:
    """What went wrong on the line, in a sentence; whoever is on another machine may have another time."""
    import httpx

    try:
        yield
    except httpx.HTTPStatusError as error:
        status = error.response.status_code
        body = error.response.text[:300].strip()
        if status == 400 and "certificate" in body.lower():  # nginx, of one that is revoked or has expired
            raise ConnectionRejected(
                f"{peer} does not take our certificate. Was it revoked, or has it expired?"
            ) from error
        if (
            is_remote and status == 401 and abs(clock_lag := _clock_lag(error.response)) > _MAX_CLOCK_SKEW
        ):  # it was signed at another time
            clock_error = f"{abs(clock_lag):.0f} s {'behind' if clock_lag > 0 else 'ahead'}"
            raise ConnectionRejected(
                f"{peer} has another time: the clock of this machine is {clock_error}. Set the clock."
            ) from error
        if "2004" in body:  # FLEET_NODE_ACTIVATION_FAILED
            raise SessionInUse(f"{peer} still holds our place from before (up to {_SESSION_TIMEOUT:.0f} s)") from error
        if status in (502, 503, 504):  # the proxy, while there is nothing behind it
            raise PeerUnavailable(f"{peer} is not ready") from error
        raise PeerUnavailable(f"{peer} answers with {status}: {body}") from error
    except httpx.HTTPError as error:
        raise PeerUnavailable(f"{peer} cannot be reached: {error}") from error


def _clock_lag(response: Any) -> float:
    """By how many seconds the clock of this machine is behind that of whoever answers."""
    try:
        return parsedate_to_datetime(response.headers["date"]).timestamp() - time.time()
    except (KeyError, ValueError, TypeError):
        return 0.0
