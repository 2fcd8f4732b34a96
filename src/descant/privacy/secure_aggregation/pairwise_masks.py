"""Numbers that tell nothing until all of them are added up: fixed point, and masks that cancel.

Bonawitz et al. (2017), Practical secure aggregation for privacy-preserving machine learning: its pairwise masks,
without the recovery of who drops out. A change is a whole number of steps of 2⁻³⁶, modulo 2⁶⁴. Every two parties agree
on a secret (X25519), and stretch it (HKDF-SHA256) to a key for this one round, whose keystream (AES-256-CTR) one of
them adds and the other takes off. Sums of whole numbers are exact: neither masks nor the order of adding change a bit.
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
"""Whole numbers modulo 2⁶⁴."""

STEPS_PER_UNIT = (
    2.0**36
)  # in 1: a sum of K is off by K/2 steps at most, less than float32 itself until K is in the hundreds
MAX_CHANGE = (
    2.0**16
)  # how far a number may change: so a sum has 53 bits, and one that was not opened is far beyond them
KEY_BYTES = 32
_DOMAIN_LABEL = b"descant secure aggregation 1\n"
_BLOCK_WORDS = 2**17  # words of a keystream at a time


@dataclass(frozen=True)
class Cohort:
    """Whose work is added up in a round, each with its key of that round and with how much it counts."""

    names: tuple[str, ...]
    keys: Tensor  # [K, 32] public keys, as bytes
    weights: Tensor  # [K] whole numbers

    @cached_property
    def _table(self) -> dict[str, tuple[bytes, int]]:
        keys = map(bytes, self.keys.numpy())
        return dict(zip(self.names, zip(keys, self.weights.tolist(), strict=True), strict=True))

    def key(self, name: str) -> bytes:
        return self._table[name][0]

    def weight(self, name: str) -> int:
        return self._table[name][1]

    def share(self, name: str) -> float:
        """p_k: what a party's change is multiplied by. All of them together are 1."""
        total: int = sum(self.weights.tolist())  # whole numbers of Python's, which no weights overflow
        return self.weight(name) / total

    def digest(self, round: int, global_model: Tensor) -> bytes:
        """What masks are bound to: told otherwise to one party than to the others, they do not cancel."""
        numbers = global_model.detach().contiguous().view(torch.uint8).numpy().tobytes()
        table = [round, [[name, key.hex(), weight] for name, (key, weight) in self._table.items()]]
        return hashlib.sha256(_DOMAIN_LABEL + json.dumps(table).encode() + hashlib.sha256(numbers).digest()).digest()


def round_key(secret: bytes, seed: int, round: int, party: str) -> PrivateKey:
    """A party's key of one round: the same whenever it is asked for, and telling nothing of any other."""
    return PrivateKey(hkdf_sha256(secret, _DOMAIN_LABEL + json.dumps([seed, round, party]).encode(), KEY_BYTES))


def to_fixed_point(change: Tensor, share: float) -> WordArray:
    """A party's share of a change ``[d]`` as whole numbers of steps; a change that is too long for that is an error.

    >>> fixed(torch.tensor([1.0, -2.0]), 2**-36).view(np.int64)
    array([ 1, -2])
    """
    if not bool((change.abs() < MAX_CHANGE).all()):  # nan compares false
        raise PartyError(
            f"its work has diverged: a number of the model moved by {MAX_CHANGE:g} or more, or is not finite."
        )
    steps: NDArray[Any] = np.rint(change.double().numpy() * (share * STEPS_PER_UNIT))
    return steps.astype(np.int64).view(np.uint64)


def add_masks(numbers: WordArray, name: str, key: PrivateKey, cohort: Cohort, digest: bytes) -> WordArray:
    """Whole numbers with the masks that a party shares with each of the others: alone they are noise."""
    masked_numbers = numbers.copy()
    for other in cohort.names:
        if other != name:
            pair = json.dumps(sorted((name, other))).encode()
            _apply_keystream(
                masked_numbers,
                hkdf_sha256(key.exchange(cohort.key(other)), _DOMAIN_LABEL + digest + pair, 32),
                name < other,
            )
    return masked_numbers


def _apply_keystream(numbers: WordArray, key: bytes, add: bool) -> None:
    """Add a keystream in place, or take it off. The key is of one stream only, so that it may begin at 0."""
    stream = Cipher(AES(key), CTR(bytes(16))).encryptor()
    for begin in range(0, len(numbers), _BLOCK_WORDS):
        part = numbers[begin : begin + _BLOCK_WORDS]
        drawn = np.frombuffer(stream.update(bytes(part.nbytes)), "<u8")
        (np.add if add else np.subtract)(part, drawn, out=part)


def unmasked_sum(parts: Sequence[Tensor]) -> Tensor:
    """The sum of what all have sent, as a change in float64; one that they cannot have come to is an error."""
    total = np.zeros(parts[0].shape, np.uint64)
    for part in parts:
        np.add(total, part.numpy().view(np.uint64), out=total)
    steps = total.view(np.int64)
    if steps.size and np.abs(steps.astype(np.float64)).max() > MAX_CHANGE * STEPS_PER_UNIT + len(parts):
        raise EngineError("the masks of the sum do not cancel: a key, or an answer, was not what its party sent.")
    return torch.from_numpy(steps / STEPS_PER_UNIT)
