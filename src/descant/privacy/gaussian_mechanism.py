"""The Gaussian mechanism: clipping, noise and the (ε, δ) that it costs.

Dwork & Roth (2014), The algorithmic foundations of differential privacy; McMahan et al. (2018), Learning differentially
private recurrent language models; Balle & Wang (2018), Improving the Gaussian mechanism.

Numbers are floating: the attack of Mironov (2012) on the last bits of noise is not prevented.
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
_RENYI_ORDERS = (*range(2, 65), 80, 96, 128, 192, 256, 512, 1024)  # integer orders have a finite sum
_SECRET_BYTES = 32


@dataclass(frozen=True)
class PrivacySettings:
    """Settings of clipping and Gaussian noise: at the server, at the party, or per sample.

    The first two hide a whole party. At the server, neighbors are the same parties with and without the change of one
    (it counts as 0): the mean of K moves by C/K, and the noise is z·C/K. At the party, neighbors are any two of its
    changes, which lie up to 2C apart, and the noise is z·C. Per sample, a sample is present or not: z·C on the sum.
    """

    at: Literal["server", "party", "sample"]
    clip: float | None = setting(1.0, "C: the maximum norm of a change; not from a paper", above=0)
    noise: float = setting(1.0, "z: the standard deviation of the noise, in units of clip; not from a paper", least=0)
    delta: float = setting(1e-5, "δ at which ε is reported; below 1/parties; not from a paper", above=0, below=1)
    budget: float | None = setting(None, "the ε that no round may exceed; None: ε is only reported", above=0)
    source: NoiseSource = setting(
        "system",
        "source of the noise: the operating system, or the run's seed for simulations",
        one_of=("system", "seed"),
    )

    @property
    def noise_std(self) -> float:
        """Standard deviation of the noise on one party's change, or on the sum of all."""
        return self.noise * self.clip if self.clip is not None and self.noise else 0.0

    def clip_factors(self, lengths: Tensor) -> Tensor:
        """Return the factors min(1, C/‖Δ‖) that clip changes of these norms.

        >>> PrivacySettings("server", clip=2.0).clip_factors(torch.tensor([1.0, 4.0]))
        tensor([1.0000, 0.5000], dtype=torch.float64)
        """
        lengths = lengths.double()
        if self.clip is None:
            return torch.ones_like(lengths)
        return torch.where(lengths > self.clip, self.clip / lengths, 1.0)

    def epsilon(self, releases: int, rate: float = 1.0) -> float:
        """Return ε at δ after ``releases`` rounds, in each of which a party takes part with probability ``rate``."""
        if not self.noise or not releases:
            return math.inf if releases else 0.0
        return epsilon(self.noise / 2 if self.at == "party" else self.noise, releases, self.delta, rate=rate)


@lru_cache(maxsize=4096)
def epsilon(noise: float, releases: int, delta: float, rate: float = 1.0) -> float:
    """Return ε of a Gaussian mechanism after ``releases``, with noise of ``noise`` times its sensitivity.

    Without sampling it is exact: Balle & Wang (2018), Theorem 8, with noise/√releases. With Poisson sampling it is an
    upper bound by Rényi differential privacy.
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
        raise SettingError("Computing ε needs dp-accounting: pip install 'descant[dp]'.") from error
    return dp_accounting


def seeded_noise(seed: int, round: int, party: str, count: int) -> Tensor:
    """Return standard normal numbers that anybody with the seed can draw again."""
    return torch.from_numpy(seeds.stream(seed, round, party, "noise").standard_normal(count))


def system_noise(count: int) -> Tensor:
    """Return standard normal numbers from the operating system's randomness."""
    return _normal_from_bytes(os.urandom(_random_bytes_needed(count)), count)


def secret_noise(secret: bytes, round: int, party: str, message: Tensor) -> Tensor:
    """Return standard normal numbers, one per number of the message, that only the secret's holder can draw again.

    They are keyed by the message, too. A repeated message gets the same noise and reveals nothing new. Another message
    never gets the same noise, which would reveal their difference.
    """
    drawn = _expand_secret(secret, f"{round}/{party}", message, size=_random_bytes_needed(message.numel()))
    return _normal_from_bytes(drawn, message.numel())


def secret_uniform(secret: bytes, round: int, party: str, message: Tensor, count: int) -> Tensor:
    """Return numbers in [0, 1), keyed like :func:`secret_noise`."""
    drawn = _expand_secret(secret, f"uniform/{round}/{party}", message, size=8 * count)
    return torch.from_numpy(_uniform_from_bytes(drawn))


def _expand_secret(secret: bytes, name: str, message: Tensor, size: int) -> bytes:
    return hashlib.shake_256(secret + f"{name}/".encode() + message.contiguous().numpy().tobytes()).digest(size)


def new_secret() -> Tensor:
    """Return random bytes from the operating system."""
    return torch.frombuffer(bytearray(os.urandom(_SECRET_BYTES)), dtype=torch.uint8)


def _random_bytes_needed(count: int) -> int:
    return 16 * -(-count // 2)


def _normal_from_bytes(drawn: bytes, count: int) -> Tensor:
    """Turn pairs of uniform numbers into pairs of normal ones: Box & Muller (1958)."""
    first, second = _uniform_from_bytes(drawn).reshape(2, -1)
    length = np.sqrt(-2 * np.log(1 - first))
    angle = 2 * np.pi * second  # 1 - first is never 0
    return torch.from_numpy(np.concatenate([length * np.cos(angle), length * np.sin(angle)])[:count])


def _uniform_from_bytes(drawn: bytes) -> NDArray[Any]:
    """Return numbers in [0, 1) of 53 bits each."""
    uniform: NDArray[Any] = (np.frombuffer(drawn, np.uint64) >> np.uint64(11)) * 2.0**-53
    return uniform
