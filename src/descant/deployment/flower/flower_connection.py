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

VERSIONS = "1.41"
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
HEARTBEAT = 10.0  # seconds
_HELD = 2 * HEARTBEAT  # Flower takes a party that was silent for so long for gone
_SKEW = 4.0  # seconds by which clocks may differ; Flower takes a signature from the future up to 5


def require() -> None:
    """Raise unless the Flower that is installed is one that this was made for; nothing of it has been imported yet."""
    os.environ.update(QUIET)
    from importlib.metadata import PackageNotFoundError, version

    try:
        found = version("flwr")
    except PackageNotFoundError:
        raise EngineError('Silos need Flower. Install it: pip install "descant[flower]".') from None
    if not f"{found}.".startswith(f"{VERSIONS}."):
        raise EngineError(
            f"Descant was made for flwr {VERSIONS}, and {found} is installed. pip install 'descant[flower]'."
        )


class Away(EngineError):
    """The other end cannot be reached now: try again."""


class Held(Away):
    """Somebody is there in our place: ourselves from before, who was not missed yet, or another with our keys."""


class TurnedAway(EngineError):
    """The other end does not want us: trying again does not help."""


@contextmanager
def told(whom: str, elsewhere: bool = False) -> Iterator[None]:
    """What went wrong on the line, in a sentence; whoever is on another machine may have another time."""
    import httpx

    try:
        yield
    except httpx.HTTPStatusError as error:
        code, said = error.response.status_code, error.response.text[:300].strip()
        if code == 400 and "certificate" in said.lower():  # nginx, of one that is revoked or has expired
            raise TurnedAway(f"{whom} does not take our certificate. Was it revoked, or has it expired?") from error
        if elsewhere and code == 401 and abs(late := _late(error.response)) > _SKEW:  # it was signed at another time
            off = f"{abs(late):.0f} s {'behind' if late > 0 else 'ahead'}"
            raise TurnedAway(f"{whom} has another time: the clock of this machine is {off}. Set the clock.") from error
        if "2004" in said:  # FLEET_NODE_ACTIVATION_FAILED
            raise Held(f"{whom} still holds our place from before (up to {_HELD:.0f} s)") from error
        if code in (502, 503, 504):  # the proxy, while there is nothing behind it
            raise Away(f"{whom} is not ready") from error
        raise Away(f"{whom} answers with {code}: {said}") from error
    except httpx.HTTPError as error:
        raise Away(f"{whom} cannot be reached: {error}") from error


def _late(response: Any) -> float:
    """By how many seconds the clock of this machine is behind that of whoever answers."""
    try:
        return parsedate_to_datetime(response.headers["date"]).timestamp() - time.time()
    except (KeyError, ValueError, TypeError):
        return 0.0
