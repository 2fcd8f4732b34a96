"""Keys and certificates: the federation's own authority, the server's certificate, and one for each party.

No other federation uses the authority, so its certificates are exactly those that the server operator has issued. Its
revocation list expires with the authority: a list that expired earlier would lock out every party.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NoReturn

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ...errors import StateError
from ...storage import atomic
from ...storage.vault.private_keys import hkdf_sha256, read_secret_file
from .name_checks import check_hosts, check_name, parse_ip

AUTHORITY_NAME = "ca"
SERVER_NAME = "server"
REVOCATION_FILE = "revoked.pem"  # files in a folder of keys: ca.crt, ca.key, ...
_CLOCK_SKEW = timedelta(hours=1)  # certificates are valid from before now, because clocks differ
_LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "::1")
_KEY_LOST = (
    "Without the authority's key no party can be invited or revoked: restore it from a backup, or make a new server."
)
_PARSE_ERRORS = (ValueError, TypeError, UnsupportedAlgorithm)


@dataclass(frozen=True)
class CertificateAndKey:
    """A certificate and its private key, both as PEM."""

    certificate: bytes
    key: bytes = field(repr=False)

    def write(self, folder: Path, name: str) -> None:
        """Write both into a folder; only the owner may read the key."""
        atomic.replace(folder / f"{name}.key", self.key, f"{name}.key.new", mode=atomic.PRIVATE_MODE)
        atomic.replace(folder / f"{name}.crt", self.certificate, f"{name}.crt.new")


class Authority:
    """A certificate authority; it exposes only its certificate and cannot be pickled or copied."""

    __slots__ = ("_key", "certificate")

    def __init__(self, pair: CertificateAndKey) -> None:
        key = serialization.load_pem_private_key(pair.key, None)
        self.certificate = x509.load_pem_x509_certificate(pair.certificate)
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != self.certificate.public_key():
            raise ValueError("the key is not that of the certificate")
        self._key = key

    @classmethod
    def new(cls, name: str, days: int) -> tuple[Authority, CertificateAndKey]:
        """Make an authority (EC P-256) that is valid for `days`; return it with its certificate and key."""
        key = ec.generate_private_key(ec.SECP256R1())
        until = datetime.now(UTC) + timedelta(days=days)
        builder = _certificate_builder(
            _x509_name(name), _x509_name(name), key.public_key(), signer=key.public_key(), until=until
        )
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        builder = builder.add_extension(_key_usage(signs_certificates=True), critical=True)
        pair = CertificateAndKey(_pem(builder.sign(key, hashes.SHA256())), _private_pem(key))
        return cls(pair), pair

    @classmethod
    def read(cls, folder: Path) -> Authority:
        """Read the authority from a keys folder."""
        secret = read_secret_file(folder / f"{AUTHORITY_NAME}.key", _KEY_LOST)
        try:
            return cls(CertificateAndKey((folder / f"{AUTHORITY_NAME}.crt").read_bytes(), secret))
        except (OSError, *_PARSE_ERRORS) as error:
            raise StateError(f"The authority in {folder} is damaged: {error}. {_KEY_LOST}") from None

    @property
    def expires(self) -> datetime:
        """The time at which the authority expires."""
        return self.certificate.not_valid_after_utc

    def issue_server_certificate(self, hosts: Sequence[str]) -> CertificateAndKey:
        """Issue a certificate for a server at these hosts and on loopback; it expires with the authority."""
        wanted = dict.fromkeys([*check_hosts(hosts), *_LOOPBACK_HOSTS])
        names = [x509.DNSName(host) if (ip := parse_ip(host)) is None else x509.IPAddress(ip) for host in wanted]
        return self._issue("descant server", ExtendedKeyUsageOID.SERVER_AUTH, self.expires, hosts=names)

    def issue_party_certificate(self, name: str, days: int) -> CertificateAndKey:
        """Issue a party's certificate, valid for `days` but not longer than the authority."""
        until = min(datetime.now(UTC) + timedelta(days=days), self.expires)
        return self._issue(check_name(name), ExtendedKeyUsageOID.CLIENT_AUTH, until)

    def revocation_list(self, serials: Mapping[str, datetime]) -> bytes:
        """Return the signed revocation list of these serials and their revocation times."""
        builder = x509.CertificateRevocationListBuilder(self.certificate.subject)
        builder = builder.last_update(self.certificate.not_valid_before_utc).next_update(self.expires)
        for serial, since in sorted(serials.items()):
            one = x509.RevokedCertificateBuilder().serial_number(int(serial, 16)).revocation_date(since)
            builder = builder.add_revoked_certificate(one.build())
        builder = builder.add_extension(x509.CRLNumber(len(serials) + 1), critical=False)
        builder = builder.add_extension(_authority_key_identifier(self._key.public_key()), critical=False)
        return builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    def read_revoked_serials(self, file: Path) -> set[str] | None:
        """Return the serials in a revocation list; None if the file has no valid list of this authority."""
        try:
            revocations = x509.load_pem_x509_crl(file.read_bytes())
        except (OSError, *_PARSE_ERRORS):
            return None
        is_own_list = revocations.is_signature_valid(self._key.public_key())
        return {f"{one.serial_number:x}" for one in revocations} if is_own_list else None

    def sign(self, data: bytes) -> bytes:
        """Sign bytes that are not a certificate; their prefix must name their purpose."""
        return self._key.sign(data, ec.ECDSA(hashes.SHA256()))

    def derive(self, purpose: bytes) -> bytes:
        """Derive a secret for one purpose; it reveals neither the key nor the secrets of other purposes."""
        return hkdf_sha256(self._key.private_numbers().private_value.to_bytes(32, "big"), purpose, 32)

    def _issue(
        self, name: str, use: x509.ObjectIdentifier, until: datetime, hosts: Sequence[x509.GeneralName] = ()
    ) -> CertificateAndKey:
        key = ec.generate_private_key(ec.SECP256R1())
        signer = self._key.public_key()
        builder = _certificate_builder(
            _x509_name(name), self.certificate.subject, key.public_key(), signer=signer, until=until
        )
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        builder = builder.add_extension(_key_usage(signs_certificates=False), critical=True)
        builder = builder.add_extension(x509.ExtendedKeyUsage([use]), critical=False)
        if hosts:
            builder = builder.add_extension(x509.SubjectAlternativeName(hosts), critical=False)
        return CertificateAndKey(_pem(builder.sign(self._key, hashes.SHA256())), _private_pem(key))

    def __repr__(self) -> str:
        return f"Authority({fingerprint(self.certificate)[:32]})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("A private key stays in its process: it cannot be pickled or copied.")


def fingerprint(certificate: x509.Certificate) -> str:
    """Return the fingerprint that people compare over a second channel."""
    return certificate.fingerprint(hashes.SHA256()).hex()


def serial(certificate: x509.Certificate) -> str:
    return f"{certificate.serial_number:x}"


def common_name(certificate: x509.Certificate) -> str:
    """Return the common name of a certificate, or "" unless it has exactly one."""
    names = [str(one.value) for one in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    return names[0] if len(names) == 1 else ""


def is_party_certificate(certificate: x509.Certificate) -> bool:
    """Return whether a certificate is a party's, not the server's or the authority's."""
    try:
        use = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        return False
    return list(use) == [ExtendedKeyUsageOID.CLIENT_AUTH]


def is_issued_by(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    """Return whether the authority has signed a certificate."""
    try:
        certificate.verify_directly_issued_by(authority)
    except (InvalidSignature, *_PARSE_ERRORS):
        return False
    return True


def is_signed_by(data: bytes, signature: bytes, authority: x509.Certificate) -> bool:
    """Return whether the authority has signed these bytes."""
    key = authority.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey):
        return False
    try:
        key.verify(signature, data, ec.ECDSA(hashes.SHA256()))
    except InvalidSignature:
        return False
    return True


def new_node_key() -> bytes:
    """Return a new private key for a Flower node: EC P-384 in the format of `ssh-keygen -t ecdsa -b 384`."""
    key = ec.generate_private_key(ec.SECP384R1())
    key_format = serialization.PrivateFormat.OpenSSH
    return key.private_bytes(serialization.Encoding.PEM, key_format, serialization.NoEncryption())


def public_node_key(private: bytes) -> str:
    """Return the public half of a node key as one line; raise ValueError for another kind of key."""
    key = serialization.load_ssh_private_key(private, None)
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP384R1):
        raise ValueError("no EC P-384 key")
    key_format = serialization.PublicFormat.OpenSSH
    return key.public_key().public_bytes(serialization.Encoding.OpenSSH, key_format).decode()


def _x509_name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _certificate_builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    signer: ec.EllipticCurvePublicKey,
    until: datetime,
) -> x509.CertificateBuilder:
    """Return the fields that all certificates have, with a random serial."""
    builder = x509.CertificateBuilder(issuer, subject, key, x509.random_serial_number())
    builder = builder.not_valid_before(datetime.now(UTC) - _CLOCK_SKEW).not_valid_after(until)
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    return builder.add_extension(_authority_key_identifier(signer), critical=False)


def _authority_key_identifier(key: ec.EllipticCurvePublicKey) -> x509.AuthorityKeyIdentifier:
    return x509.AuthorityKeyIdentifier.from_issuer_public_key(key)


def _key_usage(signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    key_format = serialization.PrivateFormat.PKCS8
    return key.private_bytes(serialization.Encoding.PEM, key_format, serialization.NoEncryption())
