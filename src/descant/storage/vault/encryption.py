"""Encryption of a coreset by its party, and decryption with the vault's key.

An encrypted coreset consists of a magic string with the version, the length of a header, the header as plain JSON, and
a ciphertext. The header tells carriers the run, the party and the generation. Nothing else is readable.

Two private keys are needed to open it, and each alone opens nothing. The *vault's* key is in the memory of the worker
that trains the proxy. The *party's* key in that vault lies in the vault's folder and is destroyed when the party is
forgotten. The party makes an ephemeral key for one message, agrees with both keys (X25519) and drops it. So it cannot
open the message again itself:

    secret = X25519(once, vault) ‖ X25519(once, party)
    k1 ‖ k2 = HKDF-SHA256(secret, info = version ‖ once ‖ vault ‖ party)
    header.digest = HMAC-SHA256(k2, plain)
    ciphertext = AES-256-GCM(k1, nonce, plain, associated data = magic ‖ length ‖ header)

A stolen disk has the party's key but not the vault's. Once the party's key is destroyed, no copy of the ciphertext (in
a backup or a database's journal) can be opened, even with the vault's key. Nothing secret is sent to the party: its
invitation is two public keys. The digest is keyed, because a plain one would confirm a correct guess of the rows.
"""

from __future__ import annotations

import hmac
import json
import os
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from ...errors import VaultError
from .private_keys import PrivateKey, hkdf_sha256, key_fingerprint, shared_secret

MAX_BYTES = 2**30  # of a plain coreset
MAX_GENERATION = 2**53  # every JSON reader keeps whole numbers up to this exactly
_MAGIC = b"descant sealed 1\n"
_MAX_HEADER_BYTES = 4096
_TAG_BYTES = 16
_PARSE_ERRORS = (ValueError, TypeError, RecursionError)


@dataclass(frozen=True)
class CoresetHeader:
    """The public header of an encrypted coreset; trust it only after decryption."""

    run: str
    party: str
    generation: int  # grows with every coreset of the party, which identifies older ones
    vault: str  # public keys: the vault's, the party's, and the ephemeral one
    key: str
    once: str
    nonce: str
    digest: str
    size: int  # bytes of the plaintext


class Invitation(NamedTuple):
    """The public keys and the generation that a party encrypts its coreset with; nothing in it is secret."""

    public_keys: bytes  # the vault's public key, the same for all parties, and the party's own
    generation: int  # of the coreset that the vault accepts next


def encrypt_coreset(
    invitation: Invitation, plaintext: bytes, run: str, party: str, expected_fingerprint: str = ""
) -> bytes:
    """Encrypt a coreset so that only this run's vault can open it, until the party is forgotten there.

    `expected_fingerprint` is the vault's, received through another channel than the invitation. Without it, anybody
    who carries the invitation could replace the key in it.
    """
    public, generation = invitation
    if expected_fingerprint and key_fingerprint(public) != expected_fingerprint:
        raise VaultError(
            f"Party {party!r} is asked to encrypt for vault {key_fingerprint(public)}, and expects the vault "
            f"{expected_fingerprint!r:.80}. Nothing has left: ask the server operator, through another channel, "
            "which one is right."
        )
    if len(public) != 64:
        raise VaultError(f"An invitation has two keys of 32 bytes. Got {len(public)} bytes. Request one: Vault.invite.")
    if len(plaintext) > MAX_BYTES:
        raise VaultError(f"A coreset has at most {MAX_BYTES} bytes. This one has {len(plaintext)}: choose fewer rows.")
    if not 0 <= generation <= MAX_GENERATION:
        raise VaultError(f"The generation of a coreset is a number from 0 to 2**53. Got {generation}.")
    ephemeral_key = X25519PrivateKey.generate()
    vault = public[:32]
    party_key = public[32:]
    ephemeral_public = ephemeral_key.public_key().public_bytes_raw()
    secret, mac_key = _derive_keys(
        shared_secret(ephemeral_key, vault) + shared_secret(ephemeral_key, party_key),
        vault,
        party_key,
        ephemeral_public=ephemeral_public,
    )
    nonce = os.urandom(12)
    key_fields = (vault.hex(), party_key.hex(), ephemeral_public.hex(), nonce.hex())
    header = CoresetHeader(run, party, generation, *key_fields, _digest(mac_key, plaintext), len(plaintext))
    text = json.dumps(asdict(header), separators=(",", ":")).encode()
    if len(text) > _MAX_HEADER_BYTES:
        raise VaultError(f"The names of run and party are too long for a header: {run!r:.40}, {party!r:.40}.")
    prefix = _MAGIC + len(text).to_bytes(4, "big") + text
    return prefix + AESGCM(secret).encrypt(nonce, plaintext, prefix)


def read_coreset_header(ciphertext: bytes) -> CoresetHeader:
    """Read the header without a key; it is not yet trustworthy. Overlong headers are rejected unread."""
    return _split_message(ciphertext)[0]


def decrypt_coreset(ciphertext: bytes, vault: PrivateKey, party_key: PrivateKey, run: str, party: str) -> bytes:
    """Decrypt and verify a coreset, or raise VaultError; afterwards its header can be trusted."""
    header, prefix, body = _split_message(ciphertext)
    check_recipient(header, run, party, vault=vault.public, party_key=party_key.public)
    ephemeral_public = bytes.fromhex(header.once)
    nonce = bytes.fromhex(header.nonce)
    secret, mac_key = _derive_keys(
        vault.exchange(ephemeral_public) + party_key.exchange(ephemeral_public),
        vault.public,
        party_key.public,
        ephemeral_public=ephemeral_public,
    )
    try:
        plaintext = AESGCM(secret).decrypt(nonce, body, prefix)
    except InvalidTag:
        raise VaultError(
            f"The coreset of party {party!r} was changed after encryption. Let the party encrypt it again."
        ) from None
    if not hmac.compare_digest(_digest(mac_key, plaintext), header.digest):
        raise VaultError(f"The coreset of party {party!r} does not match its header. It is rejected.")
    return plaintext


def check_recipient(header: CoresetHeader, run: str, party: str, vault: bytes, party_key: bytes) -> None:
    """Raise unless the header names this party, run, vault and key."""
    for field, found, expected, hint in (
        ("of party", header.party, party, "Coresets cannot be exchanged between parties."),
        ("for run", header.run, run, "Coresets cannot be moved from run to run."),
        ("for the vault", header.vault, vault.hex(), "The party must encrypt it with this vault's invitation."),
        (
            "for the key",
            header.key,
            party_key.hex(),
            "That is not the party's key in this vault: the party was forgotten since.",
        ),
    ):
        if found != expected:
            raise VaultError(f"This coreset is {field} {found!r:.80}, and {expected!r:.80} was expected. {hint}")


def _split_message(ciphertext: bytes) -> tuple[CoresetHeader, bytes, bytes]:
    """Split a message into its header, everything before the ciphertext, and the ciphertext."""
    begin = len(_MAGIC) + 4
    if ciphertext[: len(_MAGIC)] != _MAGIC:
        raise VaultError("These bytes are no encrypted coreset of this version.")
    length = int.from_bytes(ciphertext[len(_MAGIC) : begin], "big")
    if not 0 < length <= min(_MAX_HEADER_BYTES, len(ciphertext) - begin):
        raise VaultError(
            f"An encrypted coreset declares a header of {length} bytes. At most {_MAX_HEADER_BYTES} are allowed, "
            f"and {max(0, len(ciphertext) - begin)} are present."
        )
    prefix = ciphertext[: begin + length]
    body = ciphertext[begin + length :]
    try:
        header = _validated_header(json.loads(prefix[begin:]))
    except _PARSE_ERRORS:
        raise VaultError("The header of an encrypted coreset is not one of this version.") from None
    if len(body) != header.size + _TAG_BYTES:
        raise VaultError(
            f"The encrypted coreset of party {header.party!r:.80} has {len(body)} bytes after its header instead of "
            f"{header.size + _TAG_BYTES}: it was truncated, or bytes were added."
        )
    return header, prefix, body


def _validated_header(fields: Any) -> CoresetHeader:
    header = CoresetHeader(**fields)
    for name, size in (("vault", 32), ("key", 32), ("once", 32), ("nonce", 12), ("digest", 32)):
        if len(bytes.fromhex(getattr(header, name))) != size:
            raise ValueError
    for number, maximum in ((header.generation, MAX_GENERATION), (header.size, MAX_BYTES)):
        if type(number) is not int or not 0 <= number <= maximum:
            raise ValueError
    if not isinstance(header.run, str) or not isinstance(header.party, str):
        raise ValueError
    return header


def _derive_keys(secret: bytes, vault: bytes, party_key: bytes, ephemeral_public: bytes) -> tuple[bytes, bytes]:
    key_material = hkdf_sha256(secret, _MAGIC + ephemeral_public + vault + party_key, 64)
    return key_material[:32], key_material[32:]


def _digest(mac_key: bytes, plaintext: bytes) -> str:
    return hmac.digest(mac_key, plaintext, "sha256").hex()
