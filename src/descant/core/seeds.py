"""Seeds are keys, not state: every draw comes from a stream keyed by (run, round, party, purpose).

So neither the engine, the batching, the order of arrival nor a resume changes a draw. The generator is the
counter-based Philox, whose numbers are the same on every CPU.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.random.bit_generator import ISeedSequence
from numpy.typing import NDArray

ALL_PARTIES = ""
"""The party of draws that concern the whole federation: participants, L2GD's coin."""


def stream_key(seed: int, round: int, party: str, purpose: str) -> int:
    """Return the 128-bit key of a stream.

    >>> stream_key(0, 1, "a", "batch") == stream_key(0, 1, "a", "batch") != stream_key(0, 1, "b", "batch")
    True
    """
    label = f"{seed}/{round}/{purpose}/{party}".encode()  # the party comes last: its name may hold any character
    return int.from_bytes(hashlib.blake2b(label, digest_size=16).digest(), "little")


class _FixedSeedSequence(ISeedSequence):
    """A fixed key for Philox, which would otherwise mix in entropy of the operating system."""

    def __init__(self, name: int) -> None:
        self._words = np.array([name & (2**64 - 1), name >> 64], np.uint64)

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> NDArray[Any]:
        return self._words


def stream(seed: int, round: int, party: str, purpose: str) -> np.random.Generator:
    """Return the generator for one purpose of one party in one round.

    >>> int(stream(7, 1, "a", "batch").integers(1000)) == int(stream(7, 1, "a", "batch").integers(1000))
    True
    """
    # numpy documents this argument; its type stubs do not have it
    seed_sequence: Any = _FixedSeedSequence(stream_key(seed, round, party, purpose=purpose))
    return np.random.Generator(np.random.Philox(seed_sequence))


def torch_seed(seed: int, round: int, party: str, purpose: str) -> int:
    """Return a seed for torch's own generator, for draws of a module (initial weights, dropout)."""
    return stream_key(seed, round, party, purpose=purpose) & (2**63 - 1)
