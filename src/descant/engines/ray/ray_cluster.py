"""Connect to a Ray cluster or start one, with usage reports off and a token required."""

from __future__ import annotations

import os
import secrets
import socket
import sys
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ...errors import EngineError, SettingError

_RAY_ENVIRONMENT = {  # no usage reports; without the second, Ray reports that reports are off
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_USAGE_STATS_REPORT_URL": "http://127.0.0.1:9/",
    "RAY_AUTH_MODE": "token",
}
_TOKEN_VARIABLES = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
_CONNECT_SECONDS = 5.0  # seconds in which a cluster must answer
_CREATED_TOKENS: list[str] = []  # made by this process
_KNOWN_ADDRESSES: dict[str, str] = {}  # by requested address: Ray's own name of it


def connect(address: str | None, cores: int) -> None:
    """Connect to the cluster at this address, or start one with `cores` cores and a new token."""
    auth_mode_before = os.environ.get("RAY_AUTH_MODE")
    host_port = _host_port(address)
    if not _is_local(host_port) and not _has_token():
        raise SettingError(
            f"The cluster at {address} is not on this machine, and there is no token for it: anyone who reaches a "
            "cluster without a token can run code on it. Start it with RAY_AUTH_MODE=token, and set "
            f"{_TOKEN_VARIABLES[1]}."
        )
    ray_imported_early = "ray" in sys.modules and auth_mode_before != "token"
    os.environ.update(_RAY_ENVIRONMENT)
    try:
        import ray
    except ImportError as error:
        raise EngineError("Ray is not installed. Install it with: pip install 'descant[ray]'") from error
    if ray.is_initialized():
        _check_connected(ray.get_runtime_context().gcs_address, address, auth_mode_before)
        return
    if ray_imported_early:
        raise EngineError(
            "Ray was imported before RAY_AUTH_MODE was set, and it reads the variable only once. "
            "Set RAY_AUTH_MODE=token in the environment, or import ray after the first federation has started."
        )
    init_options: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
    if address is None:
        init_options |= {"num_cpus": cores, "include_dashboard": False}
        if not _has_token():
            if not _CREATED_TOKENS:  # Ray reads it once, so later clusters of this process have the same
                _CREATED_TOKENS.append(
                    secrets.token_hex(32)
                )  # Ray would write one into the home folder, world-readable
            os.environ[_TOKEN_VARIABLES[0]] = _CREATED_TOKENS[-1]
    _check_reachable(host_port, address)
    try:
        ray.init(address=address or "local", **init_options)
    except (ConnectionError, OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise EngineError(f"There is no Ray cluster at {address or 'this machine'}: {error}") from error
    _KNOWN_ADDRESSES[address or "local"] = ray.get_runtime_context().gcs_address


def _host_port(address: str | None) -> tuple[str, int] | None:
    """Return host and port of a cluster, or None if Ray is to find or start it."""
    resolved = _resolve_address(address)
    if resolved is None:
        return None
    try:
        parts = urlsplit(resolved if "://" in resolved else f"ray://{resolved}")
        host = parts.hostname
        port = parts.port
    except ValueError:
        host = None
        port = None
    if not host or not port:
        raise SettingError(
            f'The address of a Ray cluster must be host:port, such as "10.0.0.5:6379", or "auto". Got {resolved!r}.'
        )
    return host, port


def _resolve_address(address: str | None) -> str | None:
    """Return the address, with "auto" replaced by RAY_ADDRESS; None if Ray is to find or start the cluster."""
    resolved = os.environ.get("RAY_ADDRESS", "local") if address == "auto" else address
    return None if resolved in ("auto", "local") else resolved


def _check_reachable(host_port: tuple[str, int] | None, address: str | None) -> None:
    """Raise unless the port is open: Ray itself would retry for minutes and warn each time."""
    if host_port is None:
        return
    try:
        socket.create_connection(host_port, _CONNECT_SECONDS).close()
    except OSError as error:
        raise EngineError(
            f"Nothing answers at {address}: {error.strerror or error}. Check host and port, or start the cluster "
            "there: ray start --head."
        ) from error


def _check_connected(connected: str, requested: str | None, mode: str | None) -> None:
    """Raise if the cluster that this process is already connected to is not the requested one or needs no token."""
    if requested is not None and requested not in ("auto", connected) and _KNOWN_ADDRESSES.get(requested) != connected:
        raise EngineError(
            f"This process is already connected to the Ray cluster at {connected}, and {requested} was requested. "
            "Call ray.shutdown() first."
        )
    if mode == "disabled":
        raise EngineError(
            "This process is connected to a Ray cluster without a token: anyone who reaches it can run code on it. "
            "Call ray.shutdown() and set RAY_AUTH_MODE=token."
        )


def _is_local(host_port: tuple[str, int] | None) -> bool:
    """Return whether a cluster is on this machine."""
    if host_port is None:
        return True
    try:
        return ip_address(host_port[0]).is_loopback
    except ValueError:
        return host_port[0] == "localhost"


def _has_token() -> bool:
    """Return whether the user has a token; one made by this process does not open another cluster."""
    token, file = (os.environ.get(name) for name in _TOKEN_VARIABLES)
    if (token and token not in _CREATED_TOKENS) or (file and Path(file).is_file()):
        return True
    return (Path.home() / ".ray" / "auth_token").is_file()
