"""An invite: one file by which a party finds the server, is let in there, and knows that it is the right one.

Whoever holds it is the party, because the organiser makes the party's private keys and sends them along; a silo that
made its own and asked for a signature would spare that, for a second journey of files. So send it by a channel that you
trust, and compare the authority's fingerprint by another: who can change the file on its way can be the server.

The authority has signed all that is in it. It expires with its certificate: that is what the proxy goes by.
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
_ASK_FOR_NEW = "Ask the organiser for a new one."
_PARSE_ERRORS = (  # what cryptography makes of bytes that are no certificate or key, and json of those that are no JSON
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
    """What a party needs to join; all of it is text."""

    party: str
    address: str  # host:port of the proxy
    federation: str  # its id
    recipe: str  # digest of the recipe that was agreed on
    authority: str = field(repr=False)  # its certificate, PEM
    certificate: str = field(repr=False)  # the party's, PEM
    key: str = field(repr=False)  # of the certificate, PEM
    node_key: str = field(repr=False)  # by which Flower knows the party, OpenSSH
    vault: str = ""  # the fingerprint of the vault that the party seals for; "" where there was none yet

    @property
    def fingerprint(self) -> str:
        """Of the authority: what both sides compare by telephone or on paper."""
        return fingerprint(x509.load_pem_x509_certificate(self.authority.encode()))

    @property
    def expires(self) -> datetime:
        return x509.load_pem_x509_certificate(self.certificate.encode()).not_valid_after_utc

    def write(self, file: Path, authority: Authority) -> None:
        """Into a new file that only its owner may read, signed."""
        signature = base64.b64encode(authority.sign(self._signed_bytes())).decode()
        content = {"descant": __version__, "invite": INVITE_VERSION, **self._as_dict(), "signature": signature}
        atomic.write_once(file, (json.dumps(content, indent=1) + "\n").encode(), atomic.PRIVATE_MODE)

    @classmethod
    def read(cls, file: Path, now: datetime | None = None) -> Invite:
        """The invite in a file, after everything about it was found to be right."""
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
            raise TrustError(f"The invite {file} is refused: {error}") from None
        except _PARSE_ERRORS:
            raise TrustError(
                f"The invite {file} is refused: it holds a damaged certificate or key. {_ASK_FOR_NEW}"
            ) from None
        return invite

    def unpack(self, folder: Path) -> CredentialFiles:
        """The keys as files of their own, for those who read them from files; only the owner may."""
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
                atomic.replace(file, text.encode(), f"{file.name}.new", atomic.PRIVATE_MODE)
        return files

    def _verify(self, signature: bytes, now: datetime) -> None:
        authority = x509.load_pem_x509_certificate(self.authority.encode())
        if not is_signed_by(self._signed_bytes(), signature, authority):
            raise TrustError(f"something in it was changed after it was made. {_ASK_FOR_NEW}")
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
                f"it holds from {_format_time(certificate.not_valid_before_utc)} on, and the clock of this machine says "
                f"{_format_time(now)}. Set the clock."
            )
        if now > certificate.not_valid_after_utc:
            raise TrustError(
                f"it has expired on {_format_time(certificate.not_valid_after_utc)}, and the clock of this machine says "
                f"{_format_time(now)}. If the clock is right: ask the organiser for a new one."
            )

    def _as_dict(self) -> dict[str, str]:
        return {one.name: getattr(self, one.name) for one in fields(self)}

    def _signed_bytes(self) -> bytes:
        return _SIGNATURE_PREFIX + json.dumps(self._as_dict(), sort_keys=True).encode()


@dataclass(frozen=True)
class CredentialFiles:
    """Where an invite's certificates and keys are, and the address that they are for."""

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
        """Whose certificate it is."""
        return common_name(x509.load_pem_x509_certificate(self.certificate.read_bytes()))

    @property
    def federation(self) -> str:
        """Whose authority has made it."""
        return common_name(x509.load_pem_x509_certificate(self.authority.read_bytes())).removeprefix("descant ")


def _parse_invite(data: bytes, where: str) -> tuple[dict[str, str], bytes]:
    """The texts of an invite and its signature, of which nothing is believed yet."""
    found: Any = None
    with suppress(*_PARSE_ERRORS):
        found = json.loads(data)
    if not isinstance(found, dict) or "invite" not in found:
        raise TrustError(f"{where} is no invite, or was cut. Give the file that the organiser has sent you, whole.")
    if found["invite"] != INVITE_VERSION or isinstance(found["invite"], bool):
        raise TrustError(
            f"{where} is an invite of version {found['invite']!r:.20}, and this Descant {__version__} reads version "
            f"{INVITE_VERSION}. Use the same Descant as the organiser, who has {found.get('descant')!r:.20}."
        )
    wanted = {one.name for one in fields(Invite)} | {"signature"}
    content = {key: value for key, value in found.items() if key not in ("descant", "invite")}
    invalid = sorted(wanted ^ content.keys()) or sorted(
        key for key, value in content.items() if not isinstance(value, str)
    )
    if invalid:
        raise TrustError(
            f"The invite {where} is refused: its {invalid[0]!r:.40} is missing, or not what it must be. {_ASK_FOR_NEW}"
        )
    try:
        signature = base64.b64decode(content.pop("signature"), validate=True)
    except _PARSE_ERRORS:
        raise TrustError(f"The invite {where} is refused: its signature is damaged. {_ASK_FOR_NEW}") from None
    return content, signature


def _format_time(at: datetime) -> str:
    return at.astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC")
