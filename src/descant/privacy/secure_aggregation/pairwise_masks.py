"""Fixed-point numbers with pairwise masks that cancel in the sum.

Bonawitz et al. (2017), Practical secure aggregation for privacy-preserving machine learning: its pairwise masks,
without the recovery of dropouts. A change is an integer number of steps of 2⁻³⁶, modulo 2⁶⁴. Every two parties agree on
a secret (X25519) and derive a key for one round from it (HKDF-SHA256). One of them adds its keystream (AES-256-CTR) and
the other subtracts it. Sums of integers are exact: neither masks nor the order of addition change a bit.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR
from numpy.typing import NDArray
from torch import Tensor

from ...errors import EngineError, PartyError
from ...storage.vault.private_keys import PrivateKey, hkdf_sha256

WordArray: TypeAlias = NDArray[np.uint64]
"""Integers modulo 2⁶⁴."""

# A sum of K is off by at most K/2 steps, less than float32 rounding until K is in the hundreds.
STEPS_PER_UNIT = 2.0**36
# The largest change of a number: so a sum has 53 bits, and one whose masks do not cancel is far beyond them.
MAX_CHANGE = 2.0**16
KEY_BYTES = 32
_DOMAIN_LABEL = b"descant secure aggregation 1\n"
_BLOCK_WORDS = 2**17  # words of a keystream at a time


@dataclass(frozen=True)
class Cohort:
    """The parties whose updates are summed in a round, with their keys of that round and their weights."""

    names: tuple[str, ...]
    keys: Tensor  # [K, 32] public keys, as bytes
    weights: Tensor  # [K] integers

    @cached_property
    def _table(self) -> dict[str, tuple[bytes, int]]:
        keys = map(bytes, self.keys.numpy())
        return dict(zip(self.names, zip(keys, self.weights.tolist(), strict=True), strict=True))

    def key(self, name: str) -> bytes:
        return self._table[name][0]

    def weight(self, name: str) -> int:
        return self._table[name][1]

    def share(self, name: str) -> float:
        """Return p_k, the factor of a party's change; all of them add up to 1."""
        total: int = sum(self.weights.tolist())  # Python integers do not overflow
        return self.weight(name) / total

    def digest(self, round: int, global_model: Tensor) -> bytes:
        """Return the digest that masks are bound to: they cancel only if all parties received the same."""
        numbers = global_model.detach().contiguous().view(torch.uint8).numpy().tobytes()
        table = [round, [[name, key.hex(), weight] for name, (key, weight) in self._table.items()]]
        return hashlib.sha256(_DOMAIN_LABEL + json.dumps(table).encode() + hashlib.sha256(numbers).digest()).digest()


def round_key(secret: bytes, seed: int, round: int, party: str) -> PrivateKey:
    """Return a party's key of one round: repeatable, and revealing nothing of other rounds' keys."""
    return PrivateKey(hkdf_sha256(secret, _DOMAIN_LABEL + json.dumps([seed, round, party]).encode(), KEY_BYTES))


def to_fixed_point(change: Tensor, share: float) -> WordArray:
    """Return a party's share of a change ``[d]`` as integer steps; raise if the change is too large.

    >>> to_fixed_point(torch.tensor([1.0, -2.0]), 2**-36).view(np.int64)
    array([ 1, -2])
    """
    if not bool((change.abs() < MAX_CHANGE).all()):  # nan compares false
        raise PartyError(
            f"its training diverged: a number of the model moved by {MAX_CHANGE:g} or more, or is not finite."
        )
    steps: NDArray[Any] = np.rint(change.double().numpy() * (share * STEPS_PER_UNIT))
    return steps.astype(np.int64).view(np.uint64)


def add_masks(numbers: WordArray, name: str, key: PrivateKey, cohort: Cohort, digest: bytes) -> WordArray:
    """Add the masks that a party shares with each other party; the result alone is noise."""
    masked_numbers = numbers.copy()
    for other in cohort.names:
        if other != name:
            pair = json.dumps(sorted((name, other))).encode()
            mask_key = hkdf_sha256(key.exchange(cohort.key(other)), _DOMAIN_LABEL + digest + pair, 32)
            _apply_keystream(masked_numbers, mask_key, add=name < other)
    return masked_numbers


def _apply_keystream(numbers: WordArray, key: bytes, add: bool) -> None:
    """Add or subtract a keystream in place; each key has one stream only, so its counter may start at 0."""
    stream = Cipher(AES(key), CTR(bytes(16))).encryptor()
    for begin in range(0, len(numbers), _BLOCK_WORDS):
        part = numbers[begin : begin + _BLOCK_WORDS]
        drawn = np.frombuffer(stream.update(bytes(part.nbytes)), "<u8")
        (np.add if add else np.subtract)(part, drawn, out=part)


def unmasked_sum(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of all masked parts as a change in float64; raise if the masks do not cancel."""
    total = np.zeros(parts[0].shape, np.uint64)
    for part in parts:
        np.add(total, part.numpy().view(np.uint64), out=total)
    steps = total.view(np.int64)
    if steps.size and np.abs(steps.astype(np.float64)).max() > MAX_CHANGE * STEPS_PER_UNIT + len(parts):
        raise EngineError("the masks of the sum do not cancel: a key or an update is not what its party sent.")
    return torch.from_numpy(steps / STEPS_PER_UNIT)
