"""Digests of the parties' data, so that a run never continues unnoticed with different data."""

from __future__ import annotations

from hashlib import sha256
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from .population import PARTY_CACHE_SIZE, Party, Population

_SAMPLED_BYTES = 2**28  # approximate limit of the feature bytes read, about 0.25 s
_CACHE: WeakKeyDictionary[Population, dict[str, str]] = WeakKeyDictionary()


def data_fingerprints(population: Population) -> dict[str, str]:
    """Return a digest of each party's training and test data; computed once.

    Up to 256 MB all data are read; beyond that evenly spaced rows, and of many parties evenly spaced parties.

    >>> from descant.parties import from_arrays
    >>> old, new = (from_arrays({"a": ([[0.0], [1.0]], [0, 1]), "b": ([[x]], [0])}) for x in (2.0, 3.0))
    >>> [data_fingerprints(old)[name] == data_fingerprints(new)[name] for name in "ab"]
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
    """Return a digest of some tensors, from every `stride`-th row of each."""
    sha = sha256()
    for tensor in tensors:
        sha.update(f"{tuple(tensor.shape)}{tensor.dtype}".encode())
        rows = tensor[torch.arange(0, len(tensor), stride)]  # a copy, contiguous as `view` requires
        sha.update(rows.reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()[:16]
