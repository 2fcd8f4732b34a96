"""Differential privacy: what is shared of a party's work is clipped and noised, and what it gives away is counted.

Dwork & Roth (2014), The algorithmic foundations of differential privacy; McMahan et al. (2018), Learning differentially
private recurrent language models; Balle & Wang (2018), Improving the Gaussian mechanism.

Numbers are floating: what Mironov (2012) tells from the last bits of noise is not hidden.
"""

from __future__ import annotations

import hashlib
import math
import os
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..core import seeds
from ..core.settings import setting
from ..errors import SettingError

NoiseSource: TypeAlias = Literal["system", "seed"]
_RENYI_ORDERS = (*range(2, 65), 80, 96, 128, 192, 256, 512, 1024)  # Rényi orders: whole ones have a finite sum
_SECRET_BYTES = 32


@dataclass(frozen=True)
class PrivacySettings:
    """Clip to a length, add Gaussian noise: to the mean at the centre, to a party's change, or to a sum over samples.

    The first two hide a whole party. At the centre, neighbours are the same parties with and without the change of one
    (it counts as 0): the mean of K moves by C/K, and the noise is z·C/K. At the party they are any two of its changes,
    which lie up to 2C apart, and the noise is z·C. The last hides a sample, which is there or is not: z·C on the sum.
    """

    at: Literal["server", "party", "sample"]
    clip: float | None = setting(1.0, "C: the length that a change has at most; not from a paper", above=0)
    noise: float = setting(1.0, "z: the deviation of the noise, in clips; not from a paper", least=0)
    delta: float = setting(1e-5, "δ, at which ε is told: below 1/parties; not from a paper", above=0, below=1)
    budget: float | None = setting(None, "the ε that no round may exceed; None: it is told, and nothing ends", above=0)
    source: NoiseSource = setting(
        "system",
        "where noise comes from: the operating system, or the run's seed, for simulations",
        one_of=("system", "seed"),
    )

    @property
    def noise_std(self) -> float:
        """Of the noise on one party's change, or on the sum of all."""
        return self.noise * self.clip if self.clip is not None and self.noise else 0.0

    def clip_factors(self, lengths: Tensor) -> Tensor:
        """What changes of these lengths are multiplied by, to be no longer than the clip: min(1, C/‖Δ‖).

        >>> Privacy("center", clip=2.0).factors(torch.tensor([1.0, 4.0]))
        tensor([1.0000, 0.5000], dtype=torch.float64)
        """
        lengths = lengths.double()
        if self.clip is None:
            return torch.ones_like(lengths)
        return torch.where(lengths > self.clip, self.clip / lengths, 1.0)

    def epsilon(self, releases: int, rate: float = 1.0) -> float:
        """ε at δ after so many releases, each of which a party is in with probability ``rate`` (by secret draws)."""
        if not self.noise or not releases:
            return math.inf if releases else 0.0
        return epsilon(self.noise / 2 if self.at == "party" else self.noise, releases, self.delta, rate=rate)


@lru_cache(maxsize=4096)
def epsilon(noise: float, releases: int, delta: float, rate: float = 1.0) -> float:
    """ε of a Gaussian mechanism whose noise is ``noise`` times its sensitivity, after so many releases.

    Without sampling it is exact: Balle & Wang (2018), Theorem 8, with noise/√releases. With Poisson sampling it is a
    bound by Rényi differential privacy.
    """
    accounting = _import_dp_accounting()
    if rate >= 1:
        return float(accounting.get_epsilon_gaussian(noise / math.sqrt(releases), delta))
    event = accounting.PoissonSampledDpEvent(rate, accounting.GaussianDpEvent(noise))
    accountant = accounting.rdp.RdpAccountant(_RENYI_ORDERS).compose(event, releases)
    return float(accountant.get_epsilon(delta))


def _import_dp_accounting() -> Any:
    try:
        import dp_accounting
        import dp_accounting.rdp
    except ImportError as error:
        raise SettingError("To count ε needs dp-accounting: pip install 'descant[dp]'.") from error
    return dp_accounting


# ── noise ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def seeded_noise(seed: int, round: int, party: str, count: int) -> Tensor:
    """Standard normal numbers that whoever knows the seed can draw again."""
    return torch.from_numpy(seeds.stream(seed, round, party, "noise").standard_normal(count))


def system_noise(count: int) -> Tensor:
    """Standard normal numbers from the operating system's randomness: never the same again."""
    return _normal_from_bytes(os.urandom(_random_bytes_needed(count)), count)


def secret_noise(secret: bytes, round: int, party: str, message: Tensor) -> Tensor:
    """As many standard normal numbers as the work has, that only the holder of a secret can draw again.

    They are keyed by the work, too: the same answer asked for again is the same to the bit and tells nothing new, and
    another answer never has the same noise, by which a difference could be told.
    """
    return _normal_from_bytes(
        _expand_secret(secret, f"{round}/{party}", message, size=_random_bytes_needed(message.numel())), message.numel()
    )


def secret_uniform(secret: bytes, round: int, party: str, message: Tensor, count: int) -> Tensor:
    """Numbers from 0 to 1, keyed likewise."""
    return torch.from_numpy(
        _uniform_from_bytes(_expand_secret(secret, f"uniform/{round}/{party}", message, size=8 * count))
    )


def _expand_secret(secret: bytes, name: str, message: Tensor, size: int) -> bytes:
    return hashlib.shake_256(secret + f"{name}/".encode() + message.contiguous().numpy().tobytes()).digest(size)


def new_secret() -> Tensor:
    """Bytes that nobody knows."""
    return torch.frombuffer(bytearray(os.urandom(_SECRET_BYTES)), dtype=torch.uint8)


def _random_bytes_needed(count: int) -> int:
    return 16 * -(-count // 2)


def _normal_from_bytes(drawn: bytes, count: int) -> Tensor:
    """Box & Muller (1958): two uniform numbers are two normal ones."""
    first, second = _uniform_from_bytes(drawn).reshape(2, -1)
    length = np.sqrt(-2 * np.log(1 - first))
    angle = 2 * np.pi * second  # 1 - first is never 0
    return torch.from_numpy(np.concatenate([length * np.cos(angle), length * np.sin(angle)])[:count])


def _uniform_from_bytes(drawn: bytes) -> NDArray[Any]:
    """Numbers in [0, 1) of 53 bits each."""
    uniform: NDArray[Any] = (np.frombuffer(drawn, np.uint64) >> np.uint64(11)) * 2.0**-53
    return uniform
