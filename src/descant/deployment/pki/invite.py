"""An invite: one file by which a party finds the server, is let in, and verifies the server.

Anyone who holds the file can act as the party, because it has the party's private keys. (A silo could make its own keys
and ask for a signature, at the price of a second exchange of files.) So send it over a channel that you trust, and
compare the authority's fingerprint over another: anyone who can change the file on its way can pose as the server.

The authority signs the whole invite. It expires with its certificate, which is what the proxy checks.
"""

from __future__ import annotations

import base64
import json
from contextlib import suppress
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization

from ... import __version__
from ...errors import PartyError, SettingError, TrustError
from ...storage import atomic
from ...storage.atomic_folder import write_errors
from ...storage.vault.private_keys import read_secret_file
from .certificates import (
    Authority,
    common_name,
    fingerprint,
    is_issued_by,
    is_party_certificate,
    is_signed_by,
    public_node_key,
)
from .name_checks import check_name, parse_address

INVITE_VERSION = 1
_SIGNATURE_PREFIX = b"descant invite 1\n"
_MAX_INVITE_BYTES = 2**16  # bytes of an invite; it has about 4,000
_ASK_FOR_NEW = "Ask the server operator for a new one."
_PARSE_ERRORS = (  # raised by cryptography and json for malformed input
    ValueError,
    TypeError,
    UnsupportedAlgorithm,
    NotImplementedError,
    RecursionError,
    x509.InvalidVersion,
    x509.DuplicateExtension,
)


@dataclass(frozen=True)
class Invite:
    """The contents of an invite; every field is text."""

    party: str
    address: str  # host:port of the proxy
    federation: str  # its id
    recipe: str  # digest of the agreed recipe
    authority: str = field(repr=False)  # its certificate, PEM
    certificate: str = field(repr=False)  # the party's, PEM
    key: str = field(repr=False)  # of the certificate, PEM
    node_key: str = field(repr=False)  # identifies the party to Flower, OpenSSH
    vault: str = ""  # fingerprint of the vault that the party encrypts its coresets for; "" if there was none yet

    @property
    def fingerprint(self) -> str:
        """The authority's fingerprint, which both sides compare by telephone or on paper."""
        return fingerprint(x509.load_pem_x509_certificate(self.authority.encode()))

    @property
    def expires(self) -> datetime:
        return x509.load_pem_x509_certificate(self.certificate.encode()).not_valid_after_utc

    def write(self, file: Path, authority: Authority) -> None:
        """Sign the invite and write it into a new file that only its owner may read."""
        signature = base64.b64encode(authority.sign(self._signed_bytes())).decode()
        content = {"descant": __version__, "invite": INVITE_VERSION, **self._as_dict(), "signature": signature}
        atomic.write_once(file, (json.dumps(content, indent=1) + "\n").encode(), atomic.PRIVATE_MODE)

    @classmethod
    def read(cls, file: Path, now: datetime | None = None) -> Invite:
        """Read and verify the invite in a file; raise :class:`TrustError` if anything is wrong with it."""
        data = read_secret_file(
            file, _ASK_FOR_NEW, _MAX_INVITE_BYTES, error_type=TrustError, check=partial(_parse_invite, where=str(file))
        )
        content, signature = _parse_invite(data, str(file))
        invite = cls(**content)
        try:
            check_name(invite.party)
            parse_address(invite.address)
            invite._verify(signature, now or datetime.now(UTC))
        except (PartyError, SettingError, TrustError) as error:
            raise TrustError(f"The invite {file} is rejected: {error}") from None
        except _PARSE_ERRORS:
            raise TrustError(
                f"The invite {file} is rejected: it has a damaged certificate or key. {_ASK_FOR_NEW}"
            ) from None
        return invite

    def unpack(self, folder: Path) -> CredentialFiles:
        """Write the keys and the address into separate files that only the owner may read."""
        files = CredentialFiles(folder)
        with write_errors(folder):
            atomic.make_folder(folder, 0o700)
            for file, text in (
                (files.authority, self.authority),
                (files.certificate, self.certificate),
                (files.key, self.key),
                (files.node_key, self.node_key),
                (files.address, self.address),
            ):
                atomic.replace(file, text.encode(), f"{file.name}.new", mode=atomic.PRIVATE_MODE)
        return files

    def _verify(self, signature: bytes, now: datetime) -> None:
        authority = x509.load_pem_x509_certificate(self.authority.encode())
        if not is_signed_by(self._signed_bytes(), signature, authority):
            raise TrustError(f"it was changed after it was made. {_ASK_FOR_NEW}")
        certificate = x509.load_pem_x509_certificate(self.certificate.encode())
        key = serialization.load_pem_private_key(self.key.encode(), None)
        public_node_key(self.node_key.encode())
        if (
            not is_issued_by(certificate, authority)
            or not is_party_certificate(certificate)
            or key.public_key() != certificate.public_key()
        ):
            raise TrustError(f"its certificate, its key and its authority do not belong together. {_ASK_FOR_NEW}")
        if common_name(certificate) != self.party:
            raise TrustError(
                f"it is for {self.party!r}, and its certificate for {common_name(certificate)!r:.80}. {_ASK_FOR_NEW}"
            )
        if now < certificate.not_valid_before_utc:
            raise TrustError(
                f"it is valid from {_format_time(certificate.not_valid_before_utc)} on, and this machine's clock says "
                f"{_format_time(now)}. Set the clock."
            )
        if now > certificate.not_valid_after_utc:
            raise TrustError(
                f"it has expired on {_format_time(certificate.not_valid_after_utc)}, and this machine's clock says "
                f"{_format_time(now)}. If the clock is right, ask the server operator for a new one."
            )

    def _as_dict(self) -> dict[str, str]:
        return {one.name: getattr(self, one.name) for one in fields(self)}

    def _signed_bytes(self) -> bytes:
        return _SIGNATURE_PREFIX + json.dumps(self._as_dict(), sort_keys=True).encode()


@dataclass(frozen=True)
class CredentialFiles:
    """The files of an unpacked invite: certificates, keys and the server's address."""

    folder: Path

    @property
    def authority(self) -> Path:
        return self.folder / "ca.crt"

    @property
    def certificate(self) -> Path:
        return self.folder / "party.crt"

    @property
    def key(self) -> Path:
        return self.folder / "party.key"

    @property
    def node_key(self) -> Path:
        return self.folder / "node"

    @property
    def address(self) -> Path:
        return self.folder / "address"

    @property
    def party(self) -> str:
        """The name of the party in its certificate."""
        return common_name(x509.load_pem_x509_certificate(self.certificate.read_bytes()))

    @property
    def federation(self) -> str:
        """The id of the federation in its authority's certificate."""
        return common_name(x509.load_pem_x509_certificate(self.authority.read_bytes())).removeprefix("descant ")


def _parse_invite(data: bytes, where: str) -> tuple[dict[str, str], bytes]:
    """Return the fields of an invite and its signature, not yet verified."""
    parsed: Any = None
    with suppress(*_PARSE_ERRORS):
        parsed = json.loads(data)
    if not isinstance(parsed, dict) or "invite" not in parsed:
        raise TrustError(f"{where} is no invite, or was cut off. Give the whole file from the server operator.")
    if parsed["invite"] != INVITE_VERSION or isinstance(parsed["invite"], bool):
        raise TrustError(
            f"{where} is an invite of version {parsed['invite']!r:.20}, and this Descant {__version__} reads version "
            f"{INVITE_VERSION}. Use the server operator's version of Descant, {parsed.get('descant')!r:.20}."
        )
    wanted = {one.name for one in fields(Invite)} | {"signature"}
    content = {key: value for key, value in parsed.items() if key not in ("descant", "invite")}
    invalid = sorted(wanted ^ content.keys()) or sorted(
        key for key, value in content.items() if not isinstance(value, str)
    )
    if invalid:
        raise TrustError(
            f"The invite {where} is rejected: its {invalid[0]!r:.40} is missing or invalid. {_ASK_FOR_NEW}"
        )
    try:
        signature = base64.b64decode(content.pop("signature"), validate=True)
    except _PARSE_ERRORS:
        raise TrustError(f"The invite {where} is rejected: its signature is damaged. {_ASK_FOR_NEW}") from None
    return content, signature


def _format_time(at: datetime) -> str:
    return at.astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC")
