"""Methods that do not wait for the slow: FedAsync and FedBuff. A round is a new version of the centre.

Xie, Koyejo, Gupta (2019), Asynchronous federated optimization; Nguyen et al. (2022), Federated learning with buffered
asynchronous aggregation. Staleness is by how many versions the centre has moved on since a party received it. A party
that has reported waits for the next version, so that no two reports of one version are its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from ..core.algorithm import Algorithm, StalenessDiscount
from ..core.settings import Schedule, check_settings, setting
from .components import ServerStep, uniform_weights
from .fedavg import FedAvg, FedProx


@dataclass(frozen=True)
class Polynomial:
    """s(d) = (1+d)^-a.

    >>> Polynomial(0.5)(3)
    0.5
    """

    a: float = setting(0.5, "how quickly a late report loses its weight", least=0)

    def __call__(self, staleness: int) -> float:
        return float((1 + staleness) ** -self.a)


@dataclass(frozen=True)
class Hinge:
    """s(d) = 1 up to a staleness of b, and 1/(a·(d-b)+1) beyond it.

    >>> Hinge(10.0, 4)(4), Hinge(10.0, 4)(5)
    (1.0, 0.09090909090909091)
    """

    a: float = setting(10.0, "how quickly a report that is later than b loses its weight", least=0)
    b: int = setting(4, "the staleness up to which it has all of it", least=0, whole=True)

    def __call__(self, staleness: int) -> float:
        return 1.0 if staleness <= self.b else 1 / (self.a * (staleness - self.b) + 1)


_STALENESS_DISCOUNTS: Mapping[str, StalenessDiscount | None] = {
    "constant": None,
    "polynomial": Polynomial(),
    "hinge": Hinge(),
}


@dataclass(frozen=True)
class _StalenessSetting:
    staleness: str = setting("polynomial", "how a late report is discounted", one_of=tuple(_STALENESS_DISCOUNTS))


def FedAsync(
    mixing: float = 0.6,
    staleness: Literal["constant", "polynomial", "hinge"] | StalenessDiscount = "polynomial",
    rho: Schedule = 0.005,
    max_staleness: int = 16,
) -> Algorithm:
    """Every report is a new version: w̃ ← (1-α_t)·w̃ + α_t·w_k with α_t = ``mixing``·s(staleness).

    Parties add ρ/2·‖w - w̃‖² to their loss. What takes longer than ``max_staleness`` versions is refused. Without a
    clock (`engines.Clocked`) nobody is late, and reports that arrive together are averaged first.

    >>> FedAsync().discount(3)
    0.5
    """
    discount = staleness if callable(staleness) else None
    if not callable(staleness):
        check_settings(_StalenessSetting(staleness), "FedAsync")
        discount = _STALENESS_DISCOUNTS[staleness]
    return replace(
        FedProx(rho, weights="uniform"),
        name="FedAsync",
        server_update=ServerStep(mixing),
        staleness_discount=discount,
        quorum=1,
        max_staleness=max_staleness,
    )


def FedBuff(buffer_size: int = 10, server_step: float = 1.0, a: float = 0.5, max_staleness: int = 100) -> Algorithm:
    """Every ``buffer`` changes are a new version: w̃ ← w̃ + η_g·mean of s(staleness)·Δ_k, with s(d) = 1/√(1+d).

    Δ_k is what the party's model moved from the version that it received. Not from the paper: ``max_staleness``. A
    buffer that is larger than the number of parties at work waits for all of them, which is FedAvg with a plain mean.

    >>> FedBuff(3).quorum, FedBuff(3).report
    (3, 'change')
    """
    return replace(
        FedAvg(),
        name="FedBuff",
        reply_content="update",
        compute_weights=uniform_weights,
        server_update=ServerStep(server_step),
        staleness_discount=Polynomial(a),
        quorum=buffer_size,
        max_staleness=max_staleness,
    )
