"""Checks of names and addresses that go into certificates, files and configurations."""

from __future__ import annotations

import re
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address

from ...errors import PartyError, SettingError

_PARTY_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")  # a common name holds 64 characters
_HOST_LABEL = re.compile(r"(?!-)[A-Za-z0-9-]{1,63}(?<!-)")


def check_name(name: str) -> str:
    """Return a party's name, or raise unless it is safe in a certificate, a file name and a log.

    >>> check_name("north-2")
    'north-2'
    >>> check_name("../north")
    Traceback (most recent call last):
    descant.errors.PartyError: The name of a party has 1 to 64 of the characters A-Z, a-z, 0-9, '.', '_' and '-', and
    begins with a letter or a digit, because it goes into its certificate. Got '../north'.
    """
    if not isinstance(name, str) or not _PARTY_NAME.fullmatch(name):
        raise PartyError(
            "The name of a party has 1 to 64 of the characters A-Z, a-z, 0-9, '.', '_' and '-', and begins with a "
            f"letter or a digit, because it goes into its certificate. Got {name!r:.80}."
        )
    return name


def parse_ip(host: str) -> IPv4Address | IPv6Address | None:
    """Return the IP address that a host is given by, or None for a host name."""
    try:
        return ip_address(host)
    except ValueError:
        return None


def check_hosts(hosts: Sequence[str]) -> tuple[str, ...]:
    """Return the hosts, or raise unless they are at least one valid host name or address."""
    for host in hosts:
        labels = host.removesuffix(".").split(".")
        if parse_ip(host) is None and (len(host) > 253 or not all(_HOST_LABEL.fullmatch(label) for label in labels)):
            raise SettingError(
                f"A host is a name such as fl.example.org, or an address such as 10.0.0.5, without a port. "
                f"Got {host!r:.80}."
            )
        if getattr(parse_ip(host), "scope_id", None):
            raise SettingError(f"The address {host!r} is valid on one machine only: give it without '%'.")
    if not hosts:
        raise SettingError("There must be at least one host at which parties reach the server. Got none.")
    return tuple(hosts)


def join_address(host: str, port: int) -> str:
    """Return host and port as one string.

    >>> join_address("fl.example.org", 8443), join_address("::1", 8443)
    ('fl.example.org:8443', '[::1]:8443')
    """
    return f"[{host}]:{port}" if isinstance(parse_ip(host), IPv6Address) else f"{host}:{port}"


def parse_address(text: str) -> tuple[str, int]:
    """Return the host and the port of an address from :func:`join_address`."""
    host, _, port = text.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not re.fullmatch(r"[0-9]{1,5}", port) or not 1 <= int(port) <= 65535:
        raise SettingError(
            f"An address is a host and a port from 1 to 65535, such as fl.example.org:8443. Got {text!r:.80}."
        )
    check_hosts([host])
    return host, int(port)
