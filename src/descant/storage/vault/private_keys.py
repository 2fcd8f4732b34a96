"""Private keys: read from a file, an environment variable or a prompt, kept in memory and never shown."""

from __future__ import annotations

import getpass
import hashlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from ...errors import DescantError, VaultError
from .. import atomic

KEY_VARIABLE = "DESCANT_VAULT_KEY"
_KEY_PREFIX = "descant-key-1:"  # before 64 hexadecimal digits, so that such a line is recognized as a secret
_MAX_FILE_BYTES = 4096  # bytes read of a file that should hold a key
LOST_KEY_ADVICE = (
    "Without the vault's private key no one can open its coresets: absent parties have no proxy until they have "
    "encrypted new ones for the vault of a new run. The run, its models and the audit log are not lost, and `descant "
    "vault forget` and `descant vault verify` work without the key."
)


class PrivateKey:
    """An X25519 private key; it shows only its public half and cannot be pickled or copied."""

    __slots__ = ("_key", "public")

    def __init__(self, raw: bytes) -> None:
        self._key = X25519PrivateKey.from_private_bytes(raw)
        self.public = self._key.public_key().public_bytes_raw()

    @classmethod
    def new(cls) -> PrivateKey:
        return cls(os.urandom(32))

    @classmethod
    def from_text(cls, text: str, source: str, advice: str = LOST_KEY_ADVICE) -> PrivateKey:
        """Parse a key from a line of text; error messages show nothing of it."""
        digits = text.strip().removeprefix(_KEY_PREFIX)
        if len(digits) != 64 or not set(digits) <= set("0123456789abcdef"):
            raise VaultError(
                f"{source} holds no private key: it must be {_KEY_PREFIX!r} and 64 hexadecimal digits. {advice}"
            )
        return cls(bytes.fromhex(digits))

    def exchange(self, public: bytes) -> bytes:
        """Return the secret shared with another key, which is given by its public half."""
        return shared_secret(self._key, public)

    def derive(self, purpose: bytes) -> bytes:
        """Derive a secret for one purpose; it reveals neither the key nor the secrets of other purposes."""
        return hkdf_sha256(self._key.private_bytes_raw(), purpose, 32)

    def write(self, file: Path) -> None:
        """Write the key to a new file that only its owner may read."""
        atomic.write_once(file, f"{_KEY_PREFIX}{self._key.private_bytes_raw().hex()}\n".encode(), atomic.PRIVATE_MODE)

    def __repr__(self) -> str:
        return f"PrivateKey(of {key_fingerprint(self.public)})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("A private key stays in its process: it cannot be pickled or copied.")


def key_fingerprint(public: bytes) -> str:
    """Return the fingerprint of a public key or an invitation, to compare through a channel other than the network."""
    return hashlib.sha256(public[:32]).hexdigest()[:32]


def shared_secret(key: X25519PrivateKey, public: bytes) -> bytes:
    try:
        return key.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:  # not 32 bytes, or one of the few points that give zero with every key
        raise VaultError("This is not a valid public key: no shared secret can be computed with it.") from None


def hkdf_sha256(secret: bytes, purpose: bytes, length: int) -> bytes:
    return HKDF(hashes.SHA256(), length, None, purpose).derive(secret)


def read_key(file: str | Path | None = None) -> PrivateKey:
    """Read the vault's private key: from a file, else the variable DESCANT_VAULT_KEY, else a prompt."""
    if file is not None:
        return load_key(Path(file))
    if os.environ.get(KEY_VARIABLE):
        return PrivateKey.from_text(os.environ[KEY_VARIABLE], f"The environment variable {KEY_VARIABLE}")
    if sys.stdin is not None and sys.stdin.isatty():
        return PrivateKey.from_text(getpass.getpass("The vault's private key: "), "The typed text")
    raise VaultError(f"There is no private key: give its file, or set {KEY_VARIABLE}. {LOST_KEY_ADVICE}")


def load_key(file: Path, advice: str = LOST_KEY_ADVICE) -> PrivateKey:
    """Read the key in a file, which only its owner may access."""
    return PrivateKey.from_text(read_secret_file(file, advice).decode("ascii", "replace"), str(file), advice)


def read_secret_file(
    file: Path,
    advice: str,
    max_bytes: int = _MAX_FILE_BYTES,
    error_type: type[DescantError] = VaultError,
    check: Callable[[bytes], object] | None = None,
) -> bytes:
    """Read the first bytes of a file with a private key, which only its owner may access.

    `check` raises if the content is no key at all; then file permissions do not matter.
    """
    try:
        with file.open("rb") as stream:
            mode = os.fstat(stream.fileno()).st_mode
            data = stream.read(max_bytes)
    except OSError as error:
        raise error_type(f"The private key in {file} cannot be read: {error.strerror}. {advice}") from None
    if check is not None:
        check(data)
    if os.name != "nt" and mode & 0o077:
        raise error_type(
            f"The private key in {file} may be read or written by others than its owner (mode {mode & 0o777:04o}). "
            f"Consider who may have read it, then run: chmod 600 {file}"
        )
    return data
