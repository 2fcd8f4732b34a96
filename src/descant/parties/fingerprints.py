"""What tells one party's data from another's: a digest each, so that a run never goes on with other data unnoticed."""

from __future__ import annotations

from hashlib import sha256
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from .population import PARTY_CACHE_SIZE, Party, Population

_SAMPLED_BYTES = 2**28  # of features that are read, about: a quarter of a second
_CACHE: WeakKeyDictionary[Population, dict[str, str]] = WeakKeyDictionary()


def data_fingerprints(population: Population) -> dict[str, str]:
    """Party -> a digest of what it trains and is tested on; reckoned once.

    All of it is read up to 256 MB; beyond that evenly spaced rows, and of many parties evenly spaced ones.

    >>> from descant.parties import from_arrays
    >>> here, there = (from_arrays({"a": ([[0.0], [1.0]], [0, 1]), "b": ([[x]], [0])}) for x in (2.0, 3.0))
    >>> [fingerprints(here)[name] == fingerprints(there)[name] for name in "ab"]
    [True, False]
    """
    if population not in _CACHE:
        chosen = population.names[:: -(-len(population) // PARTY_CACHE_SIZE)]
        first_row = population[chosen[0]].data[0][:1]
        rows = sum(population.samples[name] for name in chosen)
        stride = max(1, -(-rows * first_row.numel() * first_row.element_size() // _SAMPLED_BYTES))
        _CACHE[population] = {name: _party_fingerprint(population[name], stride) for name in chosen}
    return _CACHE[population]


def _party_fingerprint(party: Party, stride: int) -> str:
    return tensor_fingerprint(*party.data, stride=stride)


def tensor_fingerprint(*tensors: Tensor, stride: int = 1) -> str:
    """A digest of some tensors, of each one row out of ``every``."""
    sha = sha256()
    for tensor in tensors:
        sha.update(f"{tuple(tensor.shape)}{tensor.dtype}".encode())
        rows = tensor[torch.arange(0, len(tensor), stride)]  # a copy, whose strides are as `view` wants them
        sha.update(rows.reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()[:16]
